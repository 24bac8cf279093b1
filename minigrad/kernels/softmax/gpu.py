"""The softmax of rows and its logarithm for float32, bfloat16 and float16 on a GPU; attention's is one of them."""

from __future__ import annotations

import numpy as np

from minigrad.backend import Array
from minigrad.kernels.gpu_launch import ceil_div, contiguous, cp, launch, rows_aligned

__all__ = ["attention_dscores", "attention_weights", "log_softmax", "log_softmax_dx", "softmax", "softmax_dx"]

_MOST_THREADS = 1024
_SEES_ALL = -1


def softmax(x: Array) -> Array:
    return _softmax(x, cp.empty(x.shape, x.dtype))


def log_softmax(x: Array) -> Array:
    return _softmax(x, cp.empty(x.shape, x.dtype), logarithm=True)


def softmax_dx(g: Array, y: Array) -> Array:
    return _softmax_dx(g, y, cp.empty(g.shape, g.dtype))


def log_softmax_dx(g: Array, y: Array) -> Array:
    return _softmax_dx(g, y, cp.empty(g.shape, g.dtype), logarithm=True)


def attention_weights(scores: Array, scale: float, first: int | None, mask: Array | None) -> Array:
    scores = contiguous(scores)
    return _softmax(scores, scores, scale=scale, attention=True, first=first, mask=mask)


def attention_dscores(dp: Array, p: Array, scale: float) -> Array:
    dp = contiguous(dp)
    return _softmax_dx(dp, p, dp, scale=scale)


def _softmax(
    x: Array,
    y: Array,
    *,
    scale: float = 1.0,
    logarithm: bool = False,
    attention: bool = False,
    first: int | None = None,
    mask: Array | None = None,
) -> Array:
    """Write the softmax of the last axis of x into y."""
    if x.size:
        x, n = contiguous(x), x.shape[-1]
        seen = np.uintp(0) if mask is None else contiguous(cp.broadcast_to(mask, x.shape))
        start, period = np.int64(_SEES_ALL if first is None else first), np.int64(x.shape[-2])
        args = (x, y, n, np.float32(scale), np.bool_(logarithm), np.bool_(attention), start, period, seen)
        launch("softmax", x.dtype, x.size // n, args, threads=_threads(n), vectors=rows_aligned(n, x, y))
    return y


def _softmax_dx(g: Array, y: Array, dx: Array, *, scale: float = 1.0, logarithm: bool = False) -> Array:
    if g.size:
        g, y, n = contiguous(g), contiguous(y), g.shape[-1]
        args = (g, y, dx, n, np.float32(scale), np.bool_(logarithm))
        launch("softmax_dx", g.dtype, g.size // n, args, threads=_threads(n), vectors=rows_aligned(n, g, y, dx))
    return dx


def _threads(n: int) -> int:
    """Return how many threads read a row of n numbers, 8 each at a time."""
    return min(_MOST_THREADS, 32 * ceil_div(n, 256))
