"""Products, and sums of two, for float32, bfloat16 and float16 on a GPU."""

from __future__ import annotations

import functools
import math

import numpy as np

from minigrad.backend import Array, address, uses_tf32
from minigrad.kernels.gpu_launch import (
    THREADS,
    add_up_columns,
    aligned,
    ceil_div,
    contiguous,
    cp,
    launch,
    launch_elementwise,
    new_rows,
)
from minigrad.kernels.products import reference
from minigrad.kernels.products.cublaslt import CublasLt
from minigrad.kernels.products.layouts import lines_up

__all__ = ["add", "column_sum", "linear", "multiply", "product", "sum_leading"]


@functools.cache
def _products(device: int) -> CublasLt:
    return CublasLt(tf32=uses_tf32())


def product(a: Array, b: Array, out: Array | None = None, add: bool = False) -> Array:
    fits = a.ndim == b.ndim >= 2 and (*a.shape[:-2], a.shape[-1]) == b.shape[:-1] and a.dtype == b.dtype
    if not (fits and a.size and b.size):
        return reference.product(a, b, out, add)
    rows, columns = a.shape[-2], b.shape[-1]
    if out is None:
        stack = a.ndim > 2
        out = cp.empty((*a.shape[:-1], columns), a.dtype) if stack else new_rows(rows, columns, a.dtype)
    target = _stacked(out)
    takes = out.dtype in (a.dtype, np.float32) and out.strides[-1] == out.itemsize and lines_up(target)
    if not takes or address(target) != address(out):  # the stack is not evenly spaced
        own = product(a, b, cp.empty(out.shape, np.float32 if add or out.dtype != a.dtype else a.dtype))
        out[...] = out + own if add else own
        return out
    _products(cp.cuda.Device().id)(_lined_up(a), _lined_up(b), target, add=add)
    return out


def linear(x: Array, w: Array, b: Array, beside: Array | None = None) -> Array:
    if not (x.size and w.size):
        return reference.linear(x, w, b, beside)
    if address(b) % 16 or not b.flags.c_contiguous:
        y = product(x, w) + b
        return y if beside is None else add(y, beside)
    y = new_rows(len(x), w.shape[1], x.dtype)
    passing = None if beside is None else contiguous(beside)
    _products(cp.cuda.Device().id)(_lined_up(x), _lined_up(w), y, bias=b, beside=passing)
    return y


def linear_then_gelu(x: Array, w: Array, b: Array) -> tuple[Array, Array] | None:
    """Return the GELU of x w + b, tanh form, and x w + b, in one product; None where cuBLASLt has none."""
    n = w.shape[1]
    if not (_bends(x, w) and address(b) % 16 == 0 and b.flags.c_contiguous):
        return None
    y, h = cp.empty((len(x), n), x.dtype), cp.empty((len(x), n), x.dtype)
    _products(cp.cuda.Device().id)(_lined_up(x), _lined_up(w), y, bias=b, before_gelu=h)
    return y, h


def product_through_gelu(g: Array, w: Array, h: Array) -> Array | None:
    """Return g w gelu'(h), tanh form, in one product; None where cuBLASLt has none."""
    if not (_bends(g, w) and h.flags.c_contiguous and address(h) % 16 == 0):
        return None
    dh = cp.empty_like(h)
    _products(cp.cuda.Device().id)(_lined_up(g), _lined_up(w), dh, before_gelu=h)
    return dh


def _bends(a: Array, b: Array) -> bool:
    """Return whether cuBLASLt has GELU in a product of these: of float32 it takes up to three times as long so."""
    return bool(a.size and b.size and a.dtype == b.dtype and a.itemsize == 2 and b.shape[1] % 8 == 0)


def _stacked(x: Array) -> Array:
    """Return a matrix itself, and a stack of any number of axes as one of one axis: a copy where it must be."""
    return x if x.ndim == 2 else x.reshape(-1, *x.shape[-2:])


def _lined_up(x: Array) -> Array:
    x = _stacked(x)
    return x if lines_up(x) else contiguous(x)


def column_sum(g: Array, out: Array | None = None, add: bool = False) -> Array:
    if not lines_up(g) or (g.shape[1] > 1 and g.strides[1] != g.itemsize):
        g = contiguous(g)
    stride = g.strides[0] // g.itemsize
    vectors = stride % 8 == 0 and aligned(g)
    return add_up_columns("column_sum", g.dtype, (g, np.int64(stride)), g.shape, out, add, vectors)


def sum_leading(g: Array, num_axes: int) -> Array:
    shape = g.shape[num_axes:]
    return (
        column_sum(g.reshape(-1, math.prod(shape))).astype(g.dtype, copy=False).reshape(shape)
        if g.size
        else reference.sum_leading(g, num_axes)
    )


def add(x: Array, y: Array) -> Array:
    if x.ndim < y.ndim:
        x, y = y, x
    if not (x.size and y.ndim and x.shape[x.ndim - y.ndim :] == y.shape):
        return x + y
    x, y = contiguous(x), contiguous(y)
    z = cp.empty_like(x)
    vectors = aligned(x, y) and (y.size == x.size or y.size % 8 == 0)
    items = x.size // 8 + x.size % 8 if vectors else x.size
    launch("add", x.dtype, ceil_div(items, THREADS), (x, y, z, y.size, x.size), vectors=vectors)
    return z


def multiply(x: Array, y: Array) -> Array:
    if x.shape != y.shape:
        return x * y
    x, y = contiguous(x), contiguous(y)
    z = cp.empty_like(x)
    if z.size:
        launch_elementwise("multiply", x.dtype, (x, y), (z,), z.size)
    return z
