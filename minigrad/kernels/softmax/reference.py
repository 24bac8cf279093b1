"""The softmax of rows, and its logarithm."""

from __future__ import annotations

from minigrad.backend import Array, xp_of
from minigrad.kernels.common import half_in_float32

__all__ = ["log_softmax", "log_softmax_dx", "softmax", "softmax_dx"]


@half_in_float32
def softmax(x: Array) -> Array:
    """Return exp(x) over its sum in each row, with the row's maximum taken off first."""
    xp = xp_of(x)
    y = xp.exp(x - x.max(axis=1, keepdims=True))
    y /= y.sum(axis=1, keepdims=True)
    return y


@half_in_float32
def softmax_dx(g: Array, y: Array) -> Array:
    """Return y (g - sum(g y))."""
    dx = g * y
    dx -= y * dx.sum(axis=1, keepdims=True)
    return dx


@half_in_float32
def log_softmax(x: Array) -> Array:
    """Return x - log(sum(exp(x))), with the row's maximum taken off first."""
    xp = xp_of(x)
    y = x - x.max(axis=1, keepdims=True)
    y -= xp.log(xp.exp(y).sum(axis=1, keepdims=True))
    return y


@half_in_float32
def log_softmax_dx(g: Array, y: Array) -> Array:
    """Return g - exp(y) sum(g)."""
    return g - xp_of(y).exp(y) * g.sum(axis=1, keepdims=True)
