"""Functions of one number for float32, bfloat16 and float16 on a GPU."""

from __future__ import annotations

import numpy as np

from minigrad.backend import Array
from minigrad.kernels.gpu_launch import aligned, contiguous, cp, launch, launch_elementwise, num_blocks
from minigrad.kernels.products.gpu import add, linear, linear_then_gelu, product, product_through_gelu

__all__ = [
    "add_select",
    "gelu",
    "gelu_back",
    "gelu_dx",
    "linear_gelu",
    "linear_gelu_back",
    "relu",
    "select",
    "sigmoid",
    "sigmoid_dx",
    "silu",
    "silu_dx",
]


def select(x: Array, keep: Array, scale: float = 1.0) -> Array:
    x, keep = contiguous(x), contiguous(keep)
    y = cp.empty_like(x)
    if y.size:
        launch_elementwise("select", x.dtype, (x, keep, np.float32(scale)), (y,), y.size)
    return y


def add_select(x: Array, y: Array, keep: Array, scale: float) -> Array:
    return add(x, select(y, keep, scale))


def relu(x: Array) -> tuple[Array, Array]:
    x = contiguous(x)
    y, positive = cp.empty_like(x), cp.empty(x.shape, bool)
    if x.size:
        launch_elementwise("relu", x.dtype, (x,), (y, positive), x.size)
    return y, positive


def sigmoid(x: Array) -> Array:
    return _elementwise("sigmoid", x)


def sigmoid_dx(g: Array, y: Array) -> Array:
    return _elementwise("sigmoid_dx", g, y)


def silu(x: Array) -> tuple[Array, Array]:
    x = contiguous(x)
    return _elementwise("silu", x), x


def silu_dx(g: Array, kept: Array) -> Array:
    return _elementwise("silu_dx", g, kept)


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


def _elementwise(name: str, *inputs: Array) -> Array:
    """Launch a kernel that makes an array of those of one shape."""
    inputs = (*map(contiguous, inputs),)
    y = cp.empty_like(inputs[0])
    if y.size:
        launch_elementwise(name, y.dtype, inputs, (y,), y.size)
    return y
