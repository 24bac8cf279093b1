"""What attention does between its products for float32 and float64 on a CPU, compiled by numba."""

from __future__ import annotations

import numpy as np

from minigrad.backend import Array
from minigrad.kernels.compiling import EXACT, SUMS, compiled, contiguous, flattened
from minigrad.kernels.scalars import bits_of, exp, row_max

__all__ = ["attention_dscores", "attention_weights", "scores_are_small"]


def scores_are_small(q: Array, k: Array, scale: float) -> bool:
    return False  # the maximum costs less than the question


@compiled(SUMS)
def _attention_weights(
    scores: Array,
    bits: Array,
    num_queries: int,
    first: int,
    mask: Array,
    has_mask: bool,
    small: bool,
    inverse: Array,
) -> None:
    m, n = scores.shape
    T = scores.dtype.type
    zero, one, hidden = T(0), T(1), T(-np.inf)
    for i in range(m):
        row = scores[i]
        end = min(n, first + i % num_queries + 1)
        stop = min(n, (end + 31) // 32 * 32)  # whole vectors, also where the query sees less
        for j in range(end, n):
            row[j] = hidden
        if has_mask:
            for j in range(end):
                row[j] = row[j] if mask[i, j] else hidden
        top, total = zero, zero
        if not small:
            top = row_max(bits[i, :stop])
            top = zero if top == hidden else top
        for j in range(stop):
            e = exp(row[j] - top)
            row[j] = e
            total += e
        for j in range(stop, n):
            row[j] = zero
        inverse[i] = one if total == zero else one / total


_NO_MASK = np.ones((1, 1), bool)


def attention_weights(scores: Array, first: int | None, mask: Array | None, small: bool) -> tuple[Array, Array]:
    scores = contiguous(scores)
    num_queries, num_keys = scores.shape[-2:]
    inverse = np.ones((*scores.shape[:-1], 1), scores.dtype)
    if scores.size:
        rows = scores.reshape(-1, num_keys)
        seen = _NO_MASK if mask is None else contiguous(mask).reshape(-1, num_keys)
        first = num_keys if first is None else first
        _attention_weights(rows, bits_of(rows), num_queries, first, seen, mask is not None, small, inverse.reshape(-1))
    return scores, inverse


@compiled(EXACT)
def _attention_dscores(dp: Array, e: Array, dot: Array) -> None:
    m, n = dp.shape
    for i in range(m):
        for j in range(n):
            dp[i, j] = (dp[i, j] - dot[i]) * e[i, j]


def attention_dscores(dp: Array, e: Array, gr: Array, y: Array) -> Array:
    dp, n = contiguous(dp), dp.shape[-1]
    if dp.size:
        dot = np.vecdot(gr, y)
        _attention_dscores(dp.reshape(-1, n), contiguous(e).reshape(-1, n), flattened(dot))
    return dp
