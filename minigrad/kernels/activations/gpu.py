"""Functions of one number for float32, bfloat16 and float16 on a GPU."""

from __future__ import annotations

import numpy as np

from minigrad.backend import Array
from minigrad.kernels.gpu_launch import aligned, contiguous, cp, launch, launch_elementwise, num_blocks
from minigrad.kernels.products.gpu import add, linear, linear_then_gelu, product, product_through_gelu

__all__ = ["add_select", "gelu", "gelu_back", "gelu_dx", "linear_gelu", "linear_gelu_back", "select"]


def select(x: Array, keep: Array, scale: float = 1.0) -> Array:
    x, keep = contiguous(x), contiguous(keep)
    y = cp.empty_like(x)
    if y.size:
        launch_elementwise("select", x.dtype, (x, keep, np.float32(scale)), (y,), y.size)
    return y


def add_select(x: Array, y: Array, keep: Array, scale: float) -> Array:
    return add(x, select(y, keep, scale))


def gelu(x: Array, exact: bool) -> tuple[Array, Array]:
    x = contiguous(x)
    y = cp.empty_like(x)
    if x.size:
        launch("gelu", x.dtype, num_blocks(x.size, x, y), (x, y, np.bool_(exact), x.size), vectors=aligned(x, y))
    return y, x


def gelu_dx(g: Array, kept: Array, exact: bool) -> Array:
    g = contiguous(g)
    dx = cp.empty_like(g)
    if g.size:
        args = (g, kept, dx, np.bool_(exact), g.size)
        launch("gelu_dx", g.dtype, num_blocks(g.size, g, kept, dx), args, vectors=aligned(g, kept, dx))
    return dx


def linear_gelu(x: Array, w: Array, b: Array, exact: bool) -> tuple[Array, tuple[Array, Array]]:
    y, h = (None if exact else linear_then_gelu(x, w, b)) or gelu(linear(x, w, b), exact)
    return y, (h, y)


def linear_gelu_back(g: Array, w: Array, kept: tuple[Array, Array], exact: bool) -> tuple[Array, Array, None]:
    h, y = kept
    dh = None if exact else product_through_gelu(g, w.T, h)
    return gelu_back(product(g, w.T), kept, exact) if dh is None else (y, dh, None)


def gelu_back(g: Array, kept: tuple[Array, Array], exact: bool) -> tuple[Array, Array, None]:
    h, y = kept
    return y, gelu_dx(g, h, exact), None
