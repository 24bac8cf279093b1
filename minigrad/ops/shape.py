"""Ops that move elements and change none; selecting with an index is in `indexing.py`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minigrad.arguments import as_array, as_int
from minigrad.autodiff.tape import op
from minigrad.autodiff.vjps import Vjp
from minigrad.backend import Array, xp_of
from minigrad.habits import check_options
from minigrad.ops.operands import axes_of, in_floating_dtype, unbroadcast
from minigrad.tensor import Tensor


@op
def reshape(x: Array, /, shape: int | Sequence[int]) -> tuple[Array, tuple[Vjp]]:
    """Give the elements another shape, in C order.

    Args:
        shape: as many elements; one length may be -1, which stands for what is left.
    """
    before = x.shape
    return x.reshape(shape), (lambda g: g.reshape(before),)


@op
def transpose(x: Array, /, axes: Sequence[int] | None = None) -> tuple[Array, tuple[Vjp]]:
    """Permute the axes; reverse them by default.

    Args:
        axes: for each axis of the output the one of x: (2, 0, 1) moves the last to the front.
    Raises:
        ValueError: `axes` does not name each axis once.
    """
    if axes is None:
        return x.T, (lambda g: g.T,)
    order = axes_of("transpose", x, axes)
    if len(order) != x.ndim:
        raise ValueError(
            f"transpose: axes must name each axis once, got {axes} for shape {x.shape}; swapaxes exchanges two"
        )
    back = [order.index(i) for i in range(x.ndim)]
    return x.transpose(order), (lambda g: g.transpose(back),)


@op
def swapaxes(x: Array, /, axis1: int, axis2: int) -> tuple[Array, tuple[Vjp]]:
    """Exchange two axes."""
    (i,), (j,) = axes_of("swapaxes", x, axis1), axes_of("swapaxes", x, axis2)
    return x.swapaxes(i, j), (lambda g: g.swapaxes(i, j),)


@op
def moveaxis(x: Array, /, source: int | Sequence[int], destination: int | Sequence[int]) -> tuple[Array, tuple[Vjp]]:
    """Move axes to other places; the others stay in order.

    Args:
        source, destination: places in x and in the output, one or as many of both.
    Raises:
        ValueError: an axis does not exist or comes twice, or there are not as many places as axes.
    """
    start, end = axes_of("moveaxis", x, source), axes_of("moveaxis", x, destination)
    if len(start) != len(end):
        raise ValueError(f"moveaxis: source and destination must be as many, got {source} and {destination}")
    xp = xp_of(x)
    return xp.moveaxis(x, start, end), (lambda g: xp.moveaxis(g, end, start),)


@op
def squeeze(x: Array, /, axis: int | Sequence[int] | None = None) -> tuple[Array, tuple[Vjp]]:
    """Drop axes of length 1; all of them by default.

    Raises:
        ValueError: an axis does not exist or is longer.
    """
    before = x.shape
    axes = axes_of("squeeze", x, axis) if axis is not None else tuple(i for i, n in enumerate(before) if n == 1)
    if any(before[i] != 1 for i in axes):
        raise ValueError(f"squeeze: axes must have length 1, got {axis} for shape {before}")
    return x.squeeze(axes), (lambda g: g.reshape(before),)


@op
def expand_dims(x: Array, /, axis: int | Sequence[int]) -> tuple[Array, tuple[Vjp]]:
    """Insert axes of length 1.

    Args:
        axis: places in the output, one or several.
    """
    before = x.shape
    return xp_of(x).expand_dims(x, axis), (lambda g: g.reshape(before),)


@op
def broadcast_to(x: Array, /, shape: int | Sequence[int]) -> tuple[Array, tuple[Vjp]]:
    """Repeat along new axes and axes of length 1. dx = sum of g over the repetitions.

    Raises:
        ValueError: x does not broadcast to `shape`.
        TypeError: a length is no integer.
    """
    before, one = x.shape, as_int(shape)
    try:
        y = xp_of(x).broadcast_to(x, tuple(shape) if one is None else one)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"broadcast_to: a shape is an integer, or several, got {shape!r}") from None
    except ValueError:
        raise ValueError(f"broadcast_to: only axes of length 1 can be repeated, got {before} for {shape}") from None
    return y, (lambda g: unbroadcast(g, before),)


def _takes_a_list(join: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let an op of any number of arrays take them as one list too, as NumPy's functions do, with the axis after it."""
    name = join.__name__

    @functools.wraps(join)
    def joined(*arrays: Any, **options: Any) -> Tensor:
        if arrays and isinstance(arrays[0], (list, tuple)):
            first, *others = arrays
            if len(others) == 1 and as_int(others[0]) is not None and "axis" not in options:
                options["axis"] = others.pop()
            if not others:
                arrays = tuple(first)
        check_options(name, options, ("axis",))
        return join(*[x if hasattr(x, "shape") else as_array(x) for x in arrays], **options)

    return joined


@_takes_a_list
@op
def concatenate(*arrays: Array, axis: int = 0) -> tuple[Array, tuple[Vjp, ...]]:
    """Join arrays along an axis that exists.

    Raises:
        ValueError: there are no arrays, or the shapes differ along another axis.
    """
    (axis,) = axes_of("concatenate", arrays[0], axis) if arrays else (axis,)
    if len({(*x.shape[:axis], ..., *x.shape[axis + 1 :]) for x in arrays}) != 1:
        shapes = [x.shape for x in arrays]
        raise ValueError(f"concatenate: shapes must agree in all axes but {axis}, got {shapes}")
    parts = in_floating_dtype(*arrays)
    y = xp_of(parts[0]).concatenate(parts, axis=axis)
    ends = itertools.accumulate(x.shape[axis] for x in parts)
    before = (slice(None),) * axis

    def vjp_of(x: Array, stop: int) -> Vjp:
        part, dtype = (*before, slice(stop - x.shape[axis], stop)), x.dtype
        return lambda g: g[part].astype(dtype, copy=False)

    return y, tuple(vjp_of(x, stop) for x, stop in zip(parts, ends, strict=True))


@_takes_a_list
@op
def stack(*arrays: Array, axis: int = 0) -> tuple[Array, tuple[Vjp, ...]]:
    """Join arrays of one shape along a new axis.

    Raises:
        ValueError: there are no arrays, or the shapes differ.
    """
    if len({x.shape for x in arrays}) != 1:
        raise ValueError(f"stack: shapes must be equal, got {[x.shape for x in arrays]}")
    parts = in_floating_dtype(*arrays)
    y = xp_of(parts[0]).stack(parts, axis=axis)
    before = (slice(None),) * (axis % y.ndim)

    def vjp_of(x: Array, i: int) -> Vjp:
        dtype = x.dtype
        return lambda g: g[(*before, i)].astype(dtype, copy=False)

    return y, tuple(vjp_of(x, i) for i, x in enumerate(parts))


@op
def pad(x: Array, /, widths: int | Sequence[Sequence[int]], *, value: float = 0.0) -> tuple[Array, tuple[Vjp]]:
    """Put `value` around x.

    Args:
        widths: how many before and after, a pair for each axis, or one number for all.
    Raises:
        ValueError: there is not one pair for each axis, or a width is negative.
        TypeError: the widths are neither.
    """
    one = as_int(widths)
    try:
        pairs = [tuple(pair) for pair in widths] if one is None else [(one, one)] * x.ndim  # type: ignore[union-attr]
    except TypeError:
        raise TypeError(f"pad: widths must be a pair for each axis, or one number, got {widths!r}") from None
    if x.dtype.kind in "iub" and not isinstance(value, complex) and not float(value).is_integer():
        x = x.astype(np.float64)  # which an integer array would cut
    if len(pairs) != x.ndim or any(len(pair) != 2 or min(pair) < 0 for pair in pairs):
        raise ValueError(f"pad: widths must be a pair >= 0 for each axis, got {widths} for shape {x.shape}")
    inside = tuple(slice(before, before + n) for (before, _), n in zip(pairs, x.shape, strict=True))
    return xp_of(x).pad(x, pairs, constant_values=value), (lambda g: g[inside],)


@op
def flip(x: Array, /, axis: int | Sequence[int] | None = None) -> tuple[Array, tuple[Vjp]]:
    """Reverse the order along axes; all of them by default."""
    axes = axes_of("flip", x, axis)
    xp = xp_of(x)
    return xp.flip(x, axes), (lambda g: xp.flip(g, axes),)
