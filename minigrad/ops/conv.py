"""Convolution and pooling over images (B, C, H, W): views of sliding windows, and their way back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minigrad.arguments import as_int
from minigrad.autodiff.tape import op
from minigrad.autodiff.vjps import Vjp
from minigrad.backend import Array, xp_of
from minigrad.ops.operands import half_in_float32

Pair = tuple[int, int]


@op
@half_in_float32
def conv2d(
    x: Array, w: Array, b: Array, *, stride: int | Pair = 1, padding: int | Pair = 0
) -> tuple[Array, tuple[Vjp, Vjp, Vjp]]:
    """Slide a kernel over an image: y[:, o] = sum over c, i, j of w[o, c, i, j] x[:, c, s h + i, s w + j], plus b[o].

    As a product with the matrix whose columns are the windows: y = w cols, so dcols = w^T g, dw = g cols^T. The columns
    are many times larger than x, as many as the kernel has places: they are not kept, the backward makes them again.

    Args:
        x: (B, C, H, W), w: (O, C, kernel height, kernel width), b: (O,).
        stride: how far the kernel moves, one number or (down, right).
        padding: zeros on each side, one number or (above and below, left and right).
    Returns:
        (B, O, H', W'), H' = (H + 2 padding - kernel height) // stride + 1.
    Raises:
        ValueError: shapes do not fit, or the kernel is larger than the image.
    """
    if x.ndim != 4 or w.ndim != 4 or x.shape[1] != w.shape[1] or b.shape != w.shape[:1]:
        raise ValueError(
            f"conv2d: x (B, C, H, W), w (O, C, h, w) and b (O,) do not fit, got {x.shape}, {w.shape} and {b.shape}"
        )
    stride, padding, kernel = _pair("stride", stride, 1), _pair("padding", padding, 0), w.shape[2:]
    rows, cols = ((n + 2 * p - k) // s + 1 for n, p, k, s in zip(x.shape[2:], padding, kernel, stride, strict=True))
    xp, dtype, w_shape, (batch, channels, height, width) = xp_of(x), x.dtype, w.shape, x.shape
    matrix = w.reshape(len(w), channels * kernel[0] * kernel[1])
    num_places, (top, left) = matrix.shape[1], padding

    def columns() -> Array:
        """Return the windows as (B, C h w, H' W')."""
        padded = xp.pad(x, ((0, 0), (0, 0), (top, top), (left, left)))
        windows = _windows(padded, kernel, stride).transpose(0, 1, 4, 5, 2, 3)
        return windows.reshape(batch, num_places, rows * cols)

    y = matrix @ columns()
    y += b[:, None]
    flat = y.shape  # (B, O, H' W')

    def vjp_x(g: Array) -> Array:
        parts = (matrix.T @ g.reshape(flat)).reshape(batch, channels, *kernel, rows, cols)
        dx = xp.zeros((batch, channels, height + 2 * top, width + 2 * left), dtype)
        _add_windows(lambda i, j: parts[:, :, i, j], dx, kernel, (rows, cols), stride)
        return dx[:, :, top : top + height, left : left + width]

    def vjp_w(g: Array) -> Array:
        return (g.reshape(flat) @ columns().swapaxes(1, 2)).sum(axis=0).reshape(w_shape)

    return y.reshape(batch, len(w), rows, cols), (vjp_x, vjp_w, lambda g: g.sum(axis=(0, 2, 3)))


@op
def max_pool2d(x: Array, *, size: int | Pair, stride: int | Pair | None = None) -> tuple[Array, tuple[Vjp]]:
    """Take the largest value in each window. Its gradient goes to where that is, to the first place of several.

    Args:
        x: (B, C, H, W).
        size: of a window, one number or (height, width).
        stride: from window to window; by default the size, so that windows neither overlap nor leave gaps.
    Returns:
        (B, C, H', W'), H' = (H - height) // stride + 1. What does not fill a window is left out.
    Raises:
        ValueError: x is no batch of images, or a window is larger than one.
    """
    kernel, stride, windows = _pool("max_pool2d", x, size, stride)
    xp, shape, dtype = xp_of(x), x.shape, x.dtype
    windows = windows.reshape(*windows.shape[:4], kernel[0] * kernel[1])
    place = windows.argmax(axis=-1)
    y = xp.take_along_axis(windows, place[..., None], axis=-1)[..., 0]
    place = place.astype(np.min_scalar_type(kernel[0] * kernel[1]))  # the residual: mostly one byte a window

    def vjp(g: Array) -> Array:
        def part(i: int, j: int) -> Array:
            return xp.where(place == i * kernel[1] + j, g, 0)

        return _add_windows(part, xp.zeros(shape, dtype), kernel, place.shape[2:], stride)

    return y, (vjp,)


@op
@half_in_float32
def avg_pool2d(x: Array, *, size: int | Pair, stride: int | Pair | None = None) -> tuple[Array, tuple[Vjp]]:
    """Average each window. Its gradient is spread evenly.

    Args:
        x: (B, C, H, W).
        size: of the window, one number or (height, width).
        stride: how far the window moves, likewise; its size by default.
    Returns:
        (B, C, H', W').
    """
    kernel, stride, windows = _pool("avg_pool2d", x, size, stride)
    xp, shape, dtype = xp_of(x), x.shape, x.dtype

    def vjp(g: Array) -> Array:
        part = g / (kernel[0] * kernel[1])
        return _add_windows(lambda i, j: part, xp.zeros(shape, dtype), kernel, part.shape[2:], stride)

    return windows.mean(axis=(-2, -1)), (vjp,)


def _pool(name: str, x: Array, size: int | Pair, stride: int | Pair | None) -> tuple[Pair, Pair, Array]:
    """Return a pooling's window size, stride and windows."""
    if x.ndim != 4:
        raise ValueError(f"{name}: x must be (B, C, H, W), got {x.shape}")
    kernel = _pair("size", size, 1)
    step = kernel if stride is None else _pair("stride", stride, 1)
    return kernel, step, _windows(x, kernel, step)


def _pair(name: str, value: int | Pair, smallest: int) -> Pair:
    """Return a number for both directions as a pair.

    Raises:
        ValueError: below the smallest that makes sense.
    """
    one = as_int(value)
    down, right = value if one is None else (one, one)  # type: ignore[misc]
    if min(down, right) < smallest:
        raise ValueError(f"{name} must be at least {smallest}, got {value}")
    return down, right


def _windows(x: Array, kernel: Pair, stride: Pair) -> Array:
    """View (B, C, H, W) as (B, C, H', W', kernel height, kernel width), read-only."""
    if x.shape[2] < kernel[0] or x.shape[3] < kernel[1]:
        raise ValueError(f"a window must fit into the (padded) image, got {kernel} and {x.shape[2:]}")
    view = xp_of(x).lib.stride_tricks.sliding_window_view(x, kernel, axis=(2, 3))
    return view[:, :, :: stride[0], :: stride[1]]


def _add_windows(part: Callable[[int, int], Array], dx: Array, kernel: Pair, size: Pair, stride: Pair) -> Array:
    """Add up in dx, zeros so far, what flows back into its windows.

    Args:
        part: (i, j) -> (B, C, H', W'), the gradients of place (i, j) in all windows.
        size: (H', W').
    """
    (down, right), (rows, cols) = stride, size
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            dx[:, :, i : i + down * rows : down, j : j + right * cols : right] += part(i, j)
    return dx
