"""The cross-entropy of rows for float32, bfloat16 and float16 on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad.backend import Array
from minigrad.kernels.gpu_launch import THREADS, aligned, ceil_div, contiguous, cp, launch, new_rows
from minigrad.kernels.losses import reference

__all__ = ["cross_entropy", "cross_entropy_dlogits"]

_MOST_BLOCKS = 1056


def cross_entropy(logits: Array, targets: Array, smoothing: float, weight: float) -> tuple[Array, Array]:
    rows, n = logits.shape
    if not logits.size:
        return reference.cross_entropy(logits, targets, smoothing, weight)
    if logits.strides[1] != logits.itemsize:
        logits = contiguous(logits)
    dlogits, losses = new_rows(rows, n, logits.dtype), cp.empty(rows, np.float32)
    stride, dstride = (x.strides[0] // x.itemsize if rows > 1 else n for x in (logits, dlogits))
    vectors = stride % 8 == dstride % 8 == 0 and aligned(logits, dlogits)
    targets = targets.astype(np.int32, copy=False)
    arrays = (logits, np.int64(stride), targets, losses, dlogits, np.int64(dstride))
    args = (*arrays, np.int32(n), np.float32(smoothing), np.float32(weight))
    threads = 1024 if n > 4096 else 256 if n > 512 else 32
    launch("cross_entropy", logits.dtype, rows, args, threads=threads, vectors=vectors)
    return losses, dlogits


def cross_entropy_dlogits(dlogits: Array, g: Array, dtype: Any) -> Array:
    if dlogits.size:
        base = dlogits if dlogits.base is None else dlogits.base  # with what fills up its rows
        blocks = min(_MOST_BLOCKS, ceil_div(base.size, 8 * THREADS))
        args = (base, g.astype(np.float32, copy=False), base.size)
        launch("scale_by", dtype, blocks, args, vectors=aligned(base))
    return dlogits
