"""Products of matrices, and sums of two arrays.

An `out` of another dtype than the operands gets what would have been rounded to theirs.
"""

from __future__ import annotations

import numpy as np

from minigrad.backend import Array, is_half, widened, xp_of
from minigrad.kernels.common import put

__all__ = ["add", "column_sum", "linear", "multiply", "product", "sum_leading"]


def product(a: Array, b: Array, out: Array | None = None, add: bool = False) -> Array:
    """Return a b, of matrices or stacks of them, written or added into `out` if there is one.

    Half precision goes through float32 on the CPU, where NumPy is much faster at that; so do stacks of bfloat16 on a
    GPU, since CuPy has no product for them.
    """
    half = a.dtype == b.dtype and is_half(a.dtype)
    if out is None:
        if half and (xp_of(a) is np or (a.dtype.kind == "V" and (a.ndim > 2 or b.ndim > 2))):
            return (a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype)
        return a @ b
    if not add and a.dtype == b.dtype == out.dtype and not half:
        return xp_of(a).matmul(a, b, out=out)
    return put(widened(a) @ widened(b), out, add)


def linear(x: Array, w: Array, b: Array, beside: Array | None = None) -> Array:
    """Return x w + b, plus `beside` if there is one; w (n, k), b (k,), beside (m, k)."""
    y = product(x, w)
    for other in (b,) if beside is None else (b, beside):
        if other.dtype == y.dtype:
            y += other
        else:
            y = y + other
    return y


def column_sum(g: Array, out: Array | None = None, add: bool = False) -> Array:
    """Return the sum of g over rows, (n,), written or added into `out` if there is one. In float32 at least."""
    g = widened(g)
    total = xp_of(g).ones(len(g), g.dtype) @ g  # a GEMV is faster than sum(0)
    return total if out is None else put(total, out, add)


def sum_leading(g: Array, num_axes: int) -> Array:
    """Return the sum of g over its first axes, in its dtype.

    Half precision is added up in float32.
    """
    axes = tuple(range(num_axes))
    return g.sum(axis=axes, dtype=np.float32).astype(g.dtype) if is_half(g.dtype) else g.sum(axis=axes)


def add(x: Array, y: Array) -> Array:
    """Return x + y, of one dtype; the shapes are the same or broadcast."""
    return x + y


def multiply(x: Array, y: Array) -> Array:
    """Return x y, of one shape and dtype."""
    return x * y
