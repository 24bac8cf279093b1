"""The matrix product of the BLAS that NumPy has, for the loops that numba compiles.

An op whose products are small, as those of attention's heads, would spend as much time on calls from Python as on them,
and would have its arrays go through the cache once for each. A loop that calls BLAS itself has one head's arrays in the
cache from its first product to its last, and can add a product to what is there.

BLAS is asked for by name, in the library that NumPy was linked to; where it is not found under a known name there is no
`product`, and no kernel that wants it.
"""

from __future__ import annotations

import ctypes
import importlib
import platform
import sys
from typing import Any

import numpy as np

from minigrad.kernels.compiling import FUSED, c_function, inlined, is_single, overloading

_ROW_MAJOR, _AS_IT_IS, _TRANSPOSED = np.int32(101), np.int32(111), np.int32(112)  # of the CBLAS interface
# The first has integers of 64 bits: OpenBLAS in NumPy's wheels, elsewhere, Apple's. The last one's are C's `int`. They
# can be called with 64 bits where each argument takes a whole register or 8 bytes of the stack, lowest first.
_NAMES = ["scipy_cblas_{}gemm64_", "cblas_{}gemm64_", "cblas_{}gemm$NEWLAPACK$ILP64"]
if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64"):
    _NAMES.append("cblas_{}gemm")


def _address(letter: str) -> int | None:
    """Return where the product of float32 (s) or float64 (d) lies, or None."""
    numpy_itself = importlib.import_module("numpy._core._multiarray_umath")
    library = ctypes.CDLL(numpy_itself.__file__)  # and what it was linked to
    for name in _NAMES:
        function = getattr(library, name.format(letter), None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def _declared(letter: str, number: str) -> Any:
    """Return the product as a loop calls it, or None."""
    address = _address(letter)
    matrix = "uintp, int64"  # where it begins, and how far apart its rows are
    flags, sizes = "int32, int32, int32", "int64, int64, int64"
    signature = f"void({flags}, {sizes}, {number}, {matrix}, {matrix}, {number}, {matrix})"
    return None if address is None else c_function(f"minigrad_{letter}gemm", address, signature)


_sgemm, _dgemm = _declared("s", "float32"), _declared("d", "float64")
is_available = _sgemm is not None and _dgemm is not None


def product(factor: Any, a: Any, b: Any, share: Any, c: Any) -> None:
    """Write factor a b + share c into c; share 0: whatever was there.

    Args:
        factor, share: of the dtype of the matrices.
        a, b, c: not empty; rows or, but for c, columns contiguous, and as far apart as they like.
    """


@inlined(FUSED)
def _layout(x: Any) -> Any:
    """Return how BLAS should take a matrix, and how many numbers lie between the begins of two rows, or columns."""
    if x.strides[1] == x.itemsize:
        return _AS_IT_IS, x.strides[0] // x.itemsize
    return _TRANSPOSED, x.strides[1] // x.itemsize


def _product_by(gemm: Any) -> Any:
    def product(factor: Any, a: Any, b: Any, share: Any, c: Any) -> None:
        (m, n), k = c.shape, a.shape[1]
        turn_a, lead_a = _layout(a)
        turn_b, lead_b = _layout(b)
        at_a, at_b, at_c, lead_c = a.ctypes.data, b.ctypes.data, c.ctypes.data, c.strides[0] // c.itemsize
        gemm(_ROW_MAJOR, turn_a, turn_b, m, n, k, factor, at_a, lead_a, at_b, lead_b, share, at_c, lead_c)

    return product


_product_single, _product_double = _product_by(_sgemm), _product_by(_dgemm)


@overloading(product)
def _choose_product(factor: Any, a: Any, b: Any, share: Any, c: Any) -> Any:
    return _product_single if is_single(c.dtype) else _product_double
