"""Layer norm and RMS norm for float32, bfloat16 and float16 on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad.backend import Array
from minigrad.kernels.gpu_launch import (
    THREADS,
    WIDEST_ROW,
    add_up_columns,
    add_up_parts,
    ceil_div,
    contiguous,
    cp,
    launch,
    rows_aligned,
)
from minigrad.kernels.norms import reference

__all__ = [
    "layer_norm",
    "layer_norm_back",
    "layer_norm_dgain",
    "layer_norm_dx",
    "rms_norm",
    "rms_norm_dgain",
    "rms_norm_dx",
    "sum_parts",
]


_NORM_BLOCKS = 264  # two on each of an H100's multiprocessors
_SHARED_BYTES = 48 << 10  # that a block gets without asking


def layer_norm_dgain(g: Array, x: Array, mean: Array, inverse: Array) -> Array:
    return _norm_dgain(g, x, mean, inverse)


def rms_norm_dgain(g: Array, x: Array, inverse: Array) -> Array:
    return _norm_dgain(g, x, np.uintp(0), contiguous(inverse).astype(np.float32, copy=False))


def _norm_dgain(g: Array, x: Array, mean: Any, inverse: Array) -> Array:
    g, x = contiguous(g), contiguous(x)
    vectors = rows_aligned(g.shape[1], g, x)
    return add_up_columns("norm_dgain", g.dtype, (g, x, mean, inverse), g.shape, None, False, vectors)


def layer_norm(x: Array, gain: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    rows, n = x.shape
    if n > WIDEST_ROW or not x.size:
        return reference.layer_norm(x, gain, bias, eps)
    x, gain, bias = contiguous(x), contiguous(gain), contiguous(bias)
    y, mean, inverse = cp.empty_like(x), cp.empty((rows, 1), np.float32), cp.empty((rows, 1), np.float32)
    args = (x, gain, bias, y, mean, inverse, rows, np.float32(eps))
    launch("layer_norm", x.dtype, ceil_div(rows, 8), args, width=n, vectors=rows_aligned(n, x, gain, bias))
    return y, mean, inverse


def rms_norm(x: Array, gain: Array, eps: float) -> tuple[Array, Array]:
    rows, n = x.shape
    if n > WIDEST_ROW or not x.size:
        return reference.rms_norm(x, gain, eps)
    x, gain = contiguous(x), contiguous(gain)
    y, inverse = cp.empty_like(x), cp.empty((rows, 1), np.float32)
    args = (x, gain, y, inverse, rows, np.float32(eps))
    launch("rms_norm", x.dtype, ceil_div(rows, 8), args, width=n, vectors=rows_aligned(n, x, gain))
    return y, inverse


def rms_norm_dx(g: Array, x: Array, inverse: Array, gain: Array) -> Array:
    rows, n = x.shape
    if n > WIDEST_ROW or not x.size:
        return reference.rms_norm_dx(g, x, inverse, gain)
    g, x, gain = contiguous(g), contiguous(x), contiguous(gain)
    dx = cp.empty_like(x)
    args = (g, x, inverse, gain, dx, rows)
    launch("rms_norm_dx", x.dtype, ceil_div(rows, 8), args, width=n, vectors=rows_aligned(n, g, x, gain))
    return dx


def layer_norm_dx(g: Array, x: Array, mean: Array, inverse: Array, gain: Array) -> Array:
    rows, n = x.shape
    if n > WIDEST_ROW or not x.size:
        return reference.layer_norm_dx(g, x, mean, inverse, gain)
    g, x, gain = contiguous(g), contiguous(x), contiguous(gain)
    dx = cp.empty_like(x)
    args = (g, x, mean, inverse, gain, dx, rows)
    launch("layer_norm_dx", x.dtype, ceil_div(rows, 8), args, width=n, vectors=rows_aligned(n, g, x, gain))
    return dx


def layer_norm_back(
    g: Array, x: Array, mean: Array, inverse: Array, gain: Array, beside: Array | None = None
) -> tuple[Array, Array | None, Array | None]:
    rows, n = x.shape
    shared_bytes = THREADS // 32 * n * 4
    if not x.size or shared_bytes > _SHARED_BYTES:
        dx = layer_norm_dx(g, x, mean, inverse, gain)
        return (dx if beside is None else dx + beside), None, None
    g, x, gain = contiguous(g), contiguous(x), contiguous(gain)
    dx, blocks = cp.empty_like(x), min(_NORM_BLOCKS, ceil_div(rows, 8))
    parts = cp.empty((2, blocks, n), np.float32)
    extra: Any = dx if beside is None else contiguous(beside)
    args = (g, x, mean, inverse, gain, np.uintp(0) if beside is None else extra, dx, parts[0], parts[1], rows)
    vectors = rows_aligned(n, g, x, dx, extra)
    launch("layer_norm_back", x.dtype, blocks, args, width=n, vectors=vectors, shared_bytes=shared_bytes)
    return dx, parts[0], parts[1]


def sum_parts(parts: Array, out: Array, add: bool) -> None:
    add_up_parts(parts, out, add)
