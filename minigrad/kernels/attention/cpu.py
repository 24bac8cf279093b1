"""What attention does between its products, and causal attention whole, for float32 and float64 on a CPU.

A head's loops call BLAS themselves (`kernels/blas.py`): its queries, keys, values and a block's weights stay in the
cache, and what blocks of queries give to the same keys is added up by the products.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minigrad.backend import Array
from minigrad.kernels import blas
from minigrad.kernels.common import KEPT_QUERIES, QUERIES
from minigrad.kernels.compiling import SUMS, compiled, contiguous, inlined
from minigrad.kernels.scalars import bits_of, exp, row_max

__all__ = ["attention_dscores", "attention_weights"]
if blas.is_available:
    __all__ += ["causal_attention"]


@inlined
def _weigh(row: Array, bits: Array, end: int, scale: float) -> None:
    """Turn a row of scores into the softmax of scale times the first `end` of them, and zeros behind."""
    T = row.dtype.type
    n = row.size
    zero, one, hidden, factor = T(0), T(1), T(-np.inf), T(scale)
    stop = min(n, (end + 15) // 16 * 16)  # whole vectors, also where the query sees less
    for j in range(end, stop):
        row[j] = hidden
    top, total = row_max(bits[:stop]), zero
    top = zero if top == hidden else top
    for j in range(stop):
        e = exp((row[j] - top) * factor)
        row[j] = e
        total += e
    inverse = one if total == zero else one / total
    for j in range(stop):
        row[j] *= inverse
    for j in range(stop, n):
        row[j] = zero


@compiled(SUMS)
def _attention_weights(
    scores: Array, bits: Array, num_queries: int, scale: float, first: int, mask: Array, has_mask: bool
) -> None:
    m, n = scores.shape
    hidden = scores.dtype.type(-np.inf)
    for i in range(m):
        row = scores[i]
        end = min(n, first + i % num_queries + 1)
        if has_mask:
            for j in range(end):
                row[j] = row[j] if mask[i, j] else hidden
        _weigh(row, bits[i], end, scale)


_NO_MASK = np.ones((1, 1), bool)


def attention_weights(scores: Array, scale: float, first: int | None, mask: Array | None) -> Array:
    scores = contiguous(scores)
    num_queries, num_keys = scores.shape[-2:]
    if scores.size:
        rows = scores.reshape(-1, num_keys)
        seen = _NO_MASK if mask is None else contiguous(mask).reshape(-1, num_keys)
        first = num_keys if first is None else first
        _attention_weights(rows, bits_of(rows), num_queries, float(scale), first, seen, mask is not None)
    return scores


@inlined
def _through_softmax(drow: Array, row: Array, scale: float) -> None:
    """Turn the gradient by a row of weights into that by the scores, in place."""
    dot, factor = drow.dtype.type(0), drow.dtype.type(scale)
    for j in range(drow.size):
        dot += drow[j] * row[j]
    for j in range(drow.size):
        drow[j] = (drow[j] - dot) * row[j] * factor


@compiled(SUMS)
def _attention_dscores(dp: Array, p: Array, scale: float) -> None:
    for i in range(len(dp)):
        _through_softmax(dp[i], p[i], scale)


def attention_dscores(dp: Array, p: Array, scale: float) -> Array:
    dp, n = contiguous(dp), dp.shape[-1]
    if dp.size:
        _attention_dscores(dp.reshape(-1, n), contiguous(p).reshape(-1, n), float(scale))
    return dp


@inlined
def _turn(x: Array, y: Array) -> None:
    """Write x^T into y, sixteen rows at a time: a number that LLVM knows, and makes whole vectors of."""
    n, m = x.shape
    for i in range(0, n - 15, 16):
        for j in range(m):
            for k in range(16):
                y[j, i + k] = x[i + k, j]
    for i in range(n // 16 * 16, n):
        for j in range(m):
            y[j, i] = x[i, j]


@inlined
def _part(x: Array, sample: int, number: int, width: int) -> Array:
    """Return a head's columns of one sample, (T, width)."""
    return x[sample, :, number * width : (number + 1) * width]


@inlined
def _weigh_block(q: Array, turned: Array, start: int, scale: float, p: Array, bits: Array) -> None:
    """Write the weights of some queries, the first of which is number `start`, into p; `turned` are the keys."""
    one, zero = q.dtype.type(1), q.dtype.type(0)
    blas.product(one, q, turned[:, : p.shape[1]], zero, p)
    for i in range(len(p)):
        _weigh(p[i], bits[i], start + i + 1, scale)


@compiled(SUMS)
def _causal_attention(qkv: Array, num_heads: int, scale: float, p: Array, bits: Array, turned: Array, y: Array) -> None:
    batch, time, width3 = qkv.shape
    d, keep = width3 // 3 // num_heads, p.shape[1] == time
    one, zero = qkv.dtype.type(1), qkv.dtype.type(0)
    for sample in range(batch):
        for head in range(num_heads):
            q, out = _part(qkv, sample, head, d), _part(y, sample, head, d)
            k, v = _part(qkv, sample, num_heads + head, d), _part(qkv, sample, 2 * num_heads + head, d)
            own = sample * num_heads + head if keep else 0
            _turn(k, turned)
            for start in range(0, time, QUERIES):
                stop, first = min(time, start + QUERIES), start if keep else 0
                weights = p[own, first : first + stop - start, :stop]
                _weigh_block(q[start:stop], turned, start, scale, weights, bits[own, first:])
                blas.product(one, weights, v[:stop], zero, out[start:stop])


@compiled(SUMS)
def _causal_attention_back(
    g: Array, qkv: Array, num_heads: int, scale: float, p: Array, bits: Array, turned: Array, dp: Array, dqkv: Array
) -> None:
    batch, time, width3 = qkv.shape
    d, keep = width3 // 3 // num_heads, p.shape[1] == time
    one, zero = qkv.dtype.type(1), qkv.dtype.type(0)
    for sample in range(batch):
        for head in range(num_heads):
            q, dq, own_g = _part(qkv, sample, head, d), _part(dqkv, sample, head, d), _part(g, sample, head, d)
            k, dk = _part(qkv, sample, num_heads + head, d), _part(dqkv, sample, num_heads + head, d)
            v, dv = _part(qkv, sample, 2 * num_heads + head, d), _part(dqkv, sample, 2 * num_heads + head, d)
            own = sample * num_heads + head if keep else 0
            _turn(v, turned[0])
            if not keep:
                _turn(k, turned[1])
            for start in range((time - 1) // QUERIES * QUERIES, -1, -QUERIES):
                stop, first = min(time, start + QUERIES), start if keep else 0
                weights, dscores = p[own, first : first + stop - start, :stop], dp[: stop - start, :stop]
                if not keep:
                    _weigh_block(q[start:stop], turned[1], start, scale, weights, bits[own])
                blas.product(one, own_g[start:stop], turned[0, :, :stop], zero, dscores)
                for i in range(stop - start):
                    _through_softmax(dscores[i], weights[i], scale)
                share = zero if stop == time else one  # the last block comes first, and reaches every key
                blas.product(one, weights.T, own_g[start:stop], share, dv[:stop])
                blas.product(one, dscores.T, q[start:stop], share, dk[:stop])
                blas.product(one, dscores, k[:stop], zero, dq[start:stop])


def causal_attention(qkv: Array, num_heads: int) -> tuple[Array, Callable[[Array], Array]]:
    qkv = contiguous(qkv)
    batch, time, width3 = qkv.shape
    width, dtype = width3 // 3, qkv.dtype
    d = width // num_heads
    keep, y = time <= KEPT_QUERIES, np.empty((batch, time, width), dtype)

    def room() -> Array:
        """Return memory for weights: of all heads, by head, or of one block of queries."""
        return np.empty((batch * num_heads, time, time) if keep else (1, QUERIES, time), dtype)

    p, scale = room(), float(d**-0.5)
    _causal_attention(qkv, num_heads, scale, p, bits_of(p), np.empty((d, time), dtype), y)
    kept = p if keep else None

    def vjp(g: Array) -> Array:
        p, dqkv = room() if kept is None else kept, np.empty_like(qkv)
        turned, dp = np.empty((2, d, time), dtype), np.empty((QUERIES, time), dtype)
        _causal_attention_back(contiguous(g), qkv, num_heads, scale, p, bits_of(p), turned, dp, dqkv)
        return dqkv

    return y, vjp
