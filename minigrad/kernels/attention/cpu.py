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
from minigrad.kernels.compiling import FUSED, SUMS, compiled, contiguous, inlined
from minigrad.kernels.scalars import bits_of, exp, row_max

__all__ = ["attention_dscores", "attention_weights"]
if blas.is_available:
    __all__ += ["causal_attention"]


@inlined(SUMS)
def _weigh(row: Array, bits: Array, end: int, scale: float) -> None:
    """Turn a row of scores into the softmax of scale times the first `end` of them, and zeros behind."""
    T = row.dtype.type
    n = row.size
    zero, one, hidden, factor = T(0), T(1), T(-np.inf), T(scale)
    stop = min(n, (end + 63) // 64 * 64)  # whole vectors, four at a time, also where the query sees less
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


@inlined(SUMS)
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


@inlined(FUSED)
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


@inlined(FUSED)
def _part(x: Array, sample: int, number: int, width: int) -> Array:
    """Return a head's columns of one sample, (T, width)."""
    return x[sample, :, number * width : (number + 1) * width]


@inlined(FUSED)
def _weigh_columns(s: Array, start: int, scale: float, top: Array, inverse: Array, known: bool) -> None:
    """Turn scores into weights, in place: a row for each key, a column for each query, number `start` the first.

    So 16 queries go side by side through a vector, whatever they see.

    Args:
        s: (stop, QUERIES).
        top, inverse: of each query the largest score and one over the sum of exponentials; written unless `known`.
    """
    T, (m, n) = s.dtype.type, s.shape  # not QUERIES: what LLVM knows to be short it unrolls, and makes no vectors of
    zero, one, hidden, factor = T(0), T(1), T(-np.inf), T(scale)
    for j in range(start, m):
        for i in range(j - start):
            s[j, i] = hidden
    if known:
        for j in range(m):
            for i in range(n):
                s[j, i] = exp((s[j, i] - top[i]) * factor) * inverse[i]
        return
    for i in range(n):
        top[i], inverse[i] = hidden, zero
    for j in range(m):
        for i in range(n):
            top[i] = s[j, i] if s[j, i] > top[i] else top[i]
    for i in range(n):
        top[i] = zero if top[i] == hidden else top[i]
    for j in range(m):
        for i in range(n):
            e = exp((s[j, i] - top[i]) * factor)
            s[j, i] = e
            inverse[i] += e
    for i in range(n):
        inverse[i] = one if inverse[i] == zero else one / inverse[i]
    for j in range(m):
        for i in range(n):
            s[j, i] *= inverse[i]


@inlined(FUSED)
def _through_columns(ds: Array, p: Array, scale: float, dot: Array) -> None:
    """Turn the gradient by the weights into that by the scores, in place; `dot` is room for a number a query."""
    T, (m, n) = ds.dtype.type, ds.shape
    factor = T(scale)
    for i in range(n):
        dot[i] = T(0)
    for j in range(m):
        for i in range(n):
            dot[i] += ds[j, i] * p[j, i]
    for j in range(m):
        for i in range(n):
            ds[j, i] = (ds[j, i] - dot[i]) * p[j, i] * factor


@compiled(FUSED)
def _causal_attention(
    qkv: Array,
    num_heads: int,
    scale: float,
    p: Array,
    keep: bool,
    top: Array,
    inverse: Array,
    turned: Array,
    y: Array,
) -> None:
    batch, time, width3 = qkv.shape
    d = width3 // 3 // num_heads
    one, zero = qkv.dtype.type(1), qkv.dtype.type(0)
    for sample in range(batch):
        for head in range(num_heads):
            q, out = _part(qkv, sample, head, d), _part(y, sample, head, d)
            k, v = _part(qkv, sample, num_heads + head, d), _part(qkv, sample, 2 * num_heads + head, d)
            own = sample * num_heads + head
            for start in range(0, time, QUERIES):
                stop, block = min(time, start + QUERIES), start // QUERIES
                weights = p[own, block, :stop] if keep else p[0, 0, :stop]
                _turn(q[start:stop], turned)
                blas.product(one, k[:stop], turned, zero, weights)
                _weigh_columns(weights, start, scale, top[own, block], inverse[own, block], False)
                blas.product(one, weights[:, : stop - start].T, v[:stop], zero, out[start:stop])


@compiled(FUSED)
def _causal_attention_back(
    g: Array,
    qkv: Array,
    num_heads: int,
    scale: float,
    p: Array,
    keep: bool,
    top: Array,
    inverse: Array,
    turned: Array,
    ds: Array,
    dot: Array,
    dqkv: Array,
) -> None:
    batch, time, width3 = qkv.shape
    d = width3 // 3 // num_heads
    one, zero = qkv.dtype.type(1), qkv.dtype.type(0)
    for sample in range(batch):
        for head in range(num_heads):
            q, dq, own_g = _part(qkv, sample, head, d), _part(dqkv, sample, head, d), _part(g, sample, head, d)
            k, dk = _part(qkv, sample, num_heads + head, d), _part(dqkv, sample, num_heads + head, d)
            v, dv = _part(qkv, sample, 2 * num_heads + head, d), _part(dqkv, sample, 2 * num_heads + head, d)
            own = sample * num_heads + head
            for start in range((time - 1) // QUERIES * QUERIES, -1, -QUERIES):
                stop, block = min(time, start + QUERIES), start // QUERIES
                weights, dscores = p[own, block, :stop] if keep else p[0, 0, :stop], ds[:stop]
                queries, cotangent = q[start:stop], own_g[start:stop]
                if not keep:
                    _turn(queries, turned)
                    blas.product(one, k[:stop], turned, zero, weights)
                    _weigh_columns(weights, start, scale, top[own, block], inverse[own, block], True)
                _turn(cotangent, turned)
                blas.product(one, v[:stop], turned, zero, dscores)
                _through_columns(dscores, weights, scale, dot)
                share = zero if stop == time else one  # the last block comes first, and reaches every key
                blas.product(one, weights[:, : stop - start], cotangent, share, dv[:stop])
                blas.product(one, dscores[:, : stop - start], queries, share, dk[:stop])
                blas.product(one, dscores[:, : stop - start].T, k[:stop], zero, dq[start:stop])


def causal_attention(qkv: Array, num_heads: int) -> tuple[Array, Callable[[Array], Array]]:
    qkv = contiguous(qkv)
    batch, time, width3 = qkv.shape
    width, dtype = width3 // 3, qkv.dtype
    d, num_blocks = width // num_heads, -(-time // QUERIES)
    keep, y = time <= KEPT_QUERIES, np.empty((batch, time, width), dtype)

    def room() -> Array:
        """Return memory for weights: of all heads, by head and block of queries, or of one block."""
        return np.empty((batch * num_heads, num_blocks, time, QUERIES) if keep else (1, 1, time, QUERIES), dtype)

    p, scale = room(), float(d**-0.5)
    top, inverse = np.empty((2, batch * num_heads, num_blocks, QUERIES), dtype)
    _causal_attention(qkv, num_heads, scale, p, keep, top, inverse, np.zeros((d, QUERIES), dtype), y)
    kept = p if keep else None

    def vjp(g: Array) -> Array:
        p, dqkv = room() if kept is None else kept, np.empty_like(qkv)
        turned, ds, dot = np.zeros((d, QUERIES), dtype), np.empty((time, QUERIES), dtype), np.empty(QUERIES, dtype)
        _causal_attention_back(contiguous(g), qkv, num_heads, scale, p, keep, top, inverse, turned, ds, dot, dqkv)
        return dqkv

    return y, vjp
