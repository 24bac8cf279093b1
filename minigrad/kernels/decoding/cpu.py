"""A transformer's block for a single position, compiled by numba: its products are vectors times matrices.

Their time is that of reading the weights once. What stands between them is so little that a call of NumPy for each of
its parts would take longer than the products.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minigrad.backend import Array
from minigrad.kernels.compiling import SUMS, compiled, contiguous, inlined_sums
from minigrad.kernels.scalars import exp, gelu_constants, gelu_tanh

__all__ = ["block_step"]


@inlined_sums
def _norm(x: Array, gain: Array, bias: Array, eps: float, y: Array) -> None:
    T = x.dtype.type
    share, total, squares = T(1 / x.size), T(0), T(0)
    for j in range(x.size):
        total += x[j]
    mean = total * share
    for j in range(x.size):
        squares += (x[j] - mean) * (x[j] - mean)
    r = T(1) / np.sqrt(squares * share + T(eps))
    for j in range(x.size):
        y[j] = (x[j] - mean) * r * gain[j] + bias[j]


@inlined_sums
def _linear(x: Array, w: Array, b: Array, y: Array) -> None:
    """Write x w + b, reading w once, four rows at a time."""
    n, k = w.shape
    for j in range(k):
        y[j] = b[j]
    whole = n // 4 * 4
    for i in range(0, whole, 4):
        a0, a1, a2, a3 = x[i], x[i + 1], x[i + 2], x[i + 3]
        w0, w1, w2, w3 = w[i], w[i + 1], w[i + 2], w[i + 3]
        for j in range(k):
            y[j] += (a0 * w0[j] + a1 * w1[j]) + (a2 * w2[j] + a3 * w3[j])
    for i in range(whole, n):
        for j in range(k):
            y[j] += x[i] * w[i, j]


@inlined_sums
def _attention(qkv: Array, keys: Array, values: Array, length: int, p: Array, y: Array) -> None:
    """Write the attention of one position to the `length` first ones, head by head."""
    T = qkv.dtype.type
    num_heads, _, d = keys.shape
    scale = T(1) / np.sqrt(T(d))
    for h in range(num_heads):
        q, out = qkv[h * d : (h + 1) * d], y[h * d : (h + 1) * d]
        top = T(-np.inf)
        for t in range(length):
            score = T(0)
            for j in range(d):
                score += q[j] * keys[h, t, j]
            p[t] = score * scale
            top = p[t] if p[t] > top else top
        top = T(0) if top == T(-np.inf) else top
        total = T(0)
        for t in range(length):
            p[t] = exp(p[t] - top)
            total += p[t]
        inverse = T(1) if total == T(0) else T(1) / total
        for j in range(d):
            out[j] = T(0)
        for t in range(length):
            share = p[t] * inverse
            for j in range(d):
                out[j] += share * values[h, t, j]


@compiled(SUMS)
def _block_step(
    x: Array,
    gain1: Array,
    bias1: Array,
    qkv_weight: Array,
    qkv_bias: Array,
    out_weight: Array,
    out_bias: Array,
    gain2: Array,
    bias2: Array,
    up_weight: Array,
    up_bias: Array,
    down_weight: Array,
    down_bias: Array,
    eps: float,
    keys: Array,
    values: Array,
    position: int,
) -> None:
    num_texts, width = x.shape
    _, num_heads, _, d = keys.shape
    h, y, change = np.empty_like(x[0]), np.empty_like(x[0]), np.empty_like(x[0])
    qkv, wide, p = np.empty_like(qkv_bias), np.empty_like(up_bias), np.empty(position + 1, x.dtype)
    constants = gelu_constants(x)
    for i in range(num_texts):
        _norm(x[i], gain1, bias1, eps, h)
        _linear(h, qkv_weight, qkv_bias, qkv)
        for head in range(num_heads):
            for j in range(d):
                keys[i, head, position, j] = qkv[width + head * d + j]
                values[i, head, position, j] = qkv[2 * width + head * d + j]
        _attention(qkv, keys[i], values[i], position + 1, p, y)
        _linear(y, out_weight, out_bias, change)
        for j in range(width):
            x[i, j] += change[j]
        _norm(x[i], gain2, bias2, eps, h)
        _linear(h, up_weight, up_bias, wide)
        for j in range(wide.size):
            wide[j], _ = gelu_tanh(wide[j], constants)
        _linear(wide, down_weight, down_bias, change)
        for j in range(width):
            x[i, j] += change[j]


def block_step(
    x: Array, weights: Sequence[Array], num_heads: int, eps: float, memory: Array, position: int
) -> Array | None:
    keys, values = memory
    y = np.array(x[:, 0], order="C")
    _block_step(y, *map(contiguous, weights), float(eps), keys, values, position)
    return y[:, None]
