"""The cross-entropy of rows for float32 and float64 on a CPU, compiled by numba."""

from __future__ import annotations

import numpy as np

from minigrad.backend import Array
from minigrad.kernels.compiling import SUMS, compiled, contiguous
from minigrad.kernels.scalars import bits_of, exp, row_max

__all__ = ["cross_entropy"]


@compiled(SUMS)
def _cross_entropy(
    x: Array,
    bits: Array,
    targets: Array,
    smoothing: float,
    smooth: float,
    weight: float,
    losses: Array,
    dx: Array,
) -> None:
    m, n = x.shape
    T = x.dtype.type
    hit, each, zero = T(1 - smoothing), T(smooth), T(0)
    factor, weighted_hit, weighted_each = T(weight), T(weight * (1 - smoothing)), T(weight * smooth)
    for i in range(m):
        target = targets[i]
        if target < 0:
            losses[i] = zero
            for j in range(n):
                dx[i, j] = zero
            continue
        row, out = x[i], dx[i]
        top, total, shifted = row_max(bits[i]), zero, zero
        for j in range(n):
            e = exp(row[j] - top)
            out[j] = e
            total += e
        if each > zero:
            for j in range(n):
                shifted += row[j] - top
        losses[i] = (
            np.log(total) - hit * (row[target] - top) - each * shifted
            if each > zero
            else np.log(total) - (row[target] - top)
        )
        share = factor / total
        for j in range(n):
            out[j] = out[j] * share - weighted_each
        out[target] -= weighted_hit


def cross_entropy(logits: Array, targets: Array, smoothing: float, weight: float) -> tuple[Array, Array]:
    losses, dx = np.empty(len(targets), logits.dtype), np.empty(logits.shape, logits.dtype)
    smooth = smoothing / max(1, logits.shape[1])
    targets = contiguous(targets.astype(np.int64, copy=False))
    if logits.size:
        x = contiguous(logits)
        _cross_entropy(x, bits_of(x), targets, float(smoothing), smooth, float(weight), losses, dx)
    return losses, dx
