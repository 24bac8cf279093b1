"""What attention does between its products for float32 and float64 on a CPU, compiled by numba."""

from __future__ import annotations

import numpy as np

from minigrad.backend import Array
from minigrad.kernels.compiling import SUMS, compiled, contiguous
from minigrad.kernels.scalars import bits_of, exp, row_max

__all__ = ["attention_dscores", "attention_weights"]


@compiled(SUMS)
def _attention_weights(
    scores: Array, bits: Array, num_queries: int, scale: float, first: int, mask: Array, has_mask: bool
) -> None:
    m, n = scores.shape
    T = scores.dtype.type
    zero, one, hidden, factor = T(0), T(1), T(-np.inf), T(scale)
    for i in range(m):
        row = scores[i]
        end = min(n, first + i % num_queries + 1)
        stop = min(n, (end + 63) // 64 * 64)  # whole vectors, also where the query sees less
        for j in range(end, n):
            row[j] = hidden
        if has_mask:
            for j in range(end):
                row[j] = row[j] if mask[i, j] else hidden
        top, total = row_max(bits[i, :stop]), zero
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


@compiled(SUMS)
def _attention_dscores(dp: Array, p: Array, scale: float) -> None:
    m, n = dp.shape
    T = dp.dtype.type
    factor = T(scale)
    for i in range(m):
        dot = T(0)
        for j in range(n):
            dot += dp[i, j] * p[i, j]
        for j in range(n):
            dp[i, j] = (dp[i, j] - dot) * p[i, j] * factor


def attention_dscores(dp: Array, p: Array, scale: float) -> Array:
    dp, n = contiguous(dp), dp.shape[-1]
    if dp.size:
        _attention_dscores(dp.reshape(-1, n), contiguous(p).reshape(-1, n), float(scale))
    return dp
