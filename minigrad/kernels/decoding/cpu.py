"""A transformer's block for a single position, compiled by numba: its products are vectors times matrices.

Their time is that of reading the weights once. What stands between them is so little that NumPy, with a call for each
of its parts, would take longer than the products.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minigrad.backend import Array
from minigrad.kernels.compiling import SUMS, compiled, contiguous
from minigrad.kernels.scalars import exp, gelu_constants, gelu_tanh

__all__ = ["block_step"]


@compiled(SUMS)
def _norm(x: Array, gain: Array, bias: Array, eps: float, y: Array) -> None:
    m, n = x.shape
    T = x.dtype.type
    share = T(1 / n)
    for i in range(m):
        row, total, squares = x[i], T(0), T(0)
        for j in range(n):
            total += row[j]
        mean = total * share
        for j in range(n):
            squares += (row[j] - mean) * (row[j] - mean)
        r = T(1) / np.sqrt(squares * share + T(eps))
        for j in range(n):
            y[i, j] = (row[j] - mean) * r * gain[j] + bias[j]


@compiled(SUMS)
def _linear(x: Array, w: Array, b: Array, add: bool, y: Array) -> None:
    """Write x w + b into y, or add it, reading w four rows at a time."""
    n, k = w.shape
    for i in range(len(x)):
        row, out = x[i], y[i]
        for j in range(k):
            out[j] = out[j] + b[j] if add else b[j]
        whole = n // 4 * 4
        for c in range(0, whole, 4):
            a0, a1, a2, a3 = row[c], row[c + 1], row[c + 2], row[c + 3]
            for j in range(k):
                out[j] += (a0 * w[c, j] + a1 * w[c + 1, j]) + (a2 * w[c + 2, j] + a3 * w[c + 3, j])
        for c in range(whole, n):
            for j in range(k):
                out[j] += row[c] * w[c, j]


@compiled(SUMS)
def _attention(qkv: Array, keys: Array, values: Array, position: int, p: Array, y: Array) -> None:
    """Put the position's keys and values to those before it, and write its attention to all of them, head by head.

    `p` is room for the weights.
    """
    m, num_heads, _, d = keys.shape
    T, width, length = qkv.dtype.type, num_heads * d, position + 1
    scale = T(1) / np.sqrt(T(d))
    for i in range(m):
        for h in range(num_heads):
            first = h * d
            top, total = T(-np.inf), T(0)
            for j in range(d):
                keys[i, h, position, j] = qkv[i, width + first + j]
                values[i, h, position, j] = qkv[i, 2 * width + first + j]
                y[i, first + j] = T(0)
            for t in range(length):
                score = T(0)
                for j in range(d):
                    score += qkv[i, first + j] * keys[i, h, t, j]
                p[t] = score * scale
                top = p[t] if p[t] > top else top
            top = T(0) if top == T(-np.inf) else top
            for t in range(length):
                p[t] = exp(p[t] - top)
                total += p[t]
            inverse = T(1) if total == T(0) else T(1) / total
            for t in range(length):
                share = p[t] * inverse
                for j in range(d):
                    y[i, first + j] += share * values[i, h, t, j]


@compiled(SUMS)
def _gelu(x: Array) -> None:
    constants, (m, n) = gelu_constants(x), x.shape
    for i in range(m):
        for j in range(n):
            x[i, j], _ = gelu_tanh(x[i, j], constants)


def block_step(
    x: Array, weights: Sequence[Array], num_heads: int, eps: float, memory: Array, position: int
) -> Array | None:
    gain1, bias1, qkv_w, qkv_b, out_w, out_b, gain2, bias2, up_w, up_b, down_w, down_b = map(contiguous, weights)
    keys, values = memory
    y: Array = np.array(x[:, 0], order="C")
    m, dtype = len(y), y.dtype
    h, qkv, wide = np.empty_like(y), np.empty((m, qkv_b.size), dtype), np.empty((m, up_b.size), dtype)
    _norm(y, gain1, bias1, float(eps), h)
    _linear(h, qkv_w, qkv_b, False, qkv)
    _attention(qkv, keys, values, position, np.empty(position + 1, dtype), h)
    _linear(h, out_w, out_b, True, y)
    _norm(y, gain2, bias2, float(eps), h)
    _linear(h, up_w, up_b, False, wide)
    _gelu(wide)
    _linear(wide, down_w, down_b, True, y)
    return y[:, None]
