"""Products that are added to something, for float32 and float64 on a CPU: BLAS does it, and no pass comes after.

Where it adds to nothing it begins by writing zeros, so what is there instead costs as good as nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad.backend import Array
from minigrad.kernels import blas
from minigrad.kernels.compiling import EXACT, compiled
from minigrad.kernels.products import reference

__all__ = ["linear", "product"] if blas.is_available else []


@compiled(EXACT)
def _add_product(a: Array, b: Array, out: Array) -> None:
    one = out.dtype.type(1)
    blas.product(one, a, b, one, out)


def product(a: Array, b: Array, out: Array | None = None, add: bool = False) -> Array:
    if out is None or not add or not (_is_ready(a, out.dtype) and _is_ready(b, out.dtype) and out.flags.carray):
        return reference.product(a, b, out, add)
    _add_product(a, b, out)
    return out


def _is_ready(x: Array, dtype: np.dtype[Any]) -> bool:
    """Return whether BLAS takes x as it is: a matrix, not empty, rows or columns side by side."""
    return x.dtype == dtype and x.ndim == 2 and x.size > 0 and x.flags.forc and x.flags.behaved


@compiled(EXACT)
def _linear(x: Array, w: Array, b: Array, beside: Array, has_beside: bool, y: Array) -> None:
    one, (m, n) = y.dtype.type(1), y.shape
    for i in range(m):
        if has_beside:
            for j in range(n):
                y[i, j] = beside[i, j] + b[j]
        else:
            for j in range(n):
                y[i, j] = b[j]
    blas.product(one, x, w, one, y)


def linear(x: Array, w: Array, b: Array, beside: Array | None = None) -> Array:
    y = np.empty((len(x), w.shape[1]), x.dtype)
    extra = y if beside is None else beside
    if not (x.size and w.size) or not all(array.flags.carray for array in (x, w, b, extra)):
        return reference.linear(x, w, b, beside)
    _linear(x, w, b, extra, beside is not None, y)
    return y
