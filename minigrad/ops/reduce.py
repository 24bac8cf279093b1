"""Reductions over axes: one, a tuple of them, or all; and sums that run along one."""

from __future__ import annotations

import math
from typing import Any

from minigrad.autodiff.tape import op
from minigrad.autodiff.vjps import Vjp
from minigrad.backend import Array, xp_of
from minigrad.ops.operands import Axis, add_up, axes_of, half_in_float32, in_floats, select


class _Reduced:
    """The axes of one reduction, and the way back: shapes with and without them.

    Attributes:
        axes: counted from the front, distinct.
        count: how many elements become one.
    """

    __slots__ = ("_axis", "_kept", "_shape", "axes", "count")

    def __init__(self, name: str, x: Array, axis: Axis) -> None:
        self.axes = axes_of(name, x, axis)
        self._axis = axis
        self._shape = x.shape
        self._kept = tuple([1 if i in self.axes else n for i, n in enumerate(x.shape)])
        self.count = math.prod([x.shape[i] for i in self.axes])

    def keep(self, g: Array) -> Array:
        """Return what has the shape of the output with the reduced axes as length 1: it broadcasts against x."""
        return g.reshape(self._kept)

    def spread(self, g: Array) -> Array:
        """Repeat along the reduced axes: the vjp of a sum."""
        return xp_of(g).broadcast_to(self.keep(g), self._shape)

    def needs_elements(self, name: str) -> None:
        """Raise a ValueError if there is nothing to reduce."""
        if self.count == 0:
            raise ValueError(f"{name} needs at least one element, got shape {self._shape} over axis {self._axis}")


@op
def sum(x: Array, /, axis: Axis = None, *, keepdims: bool = False) -> tuple[Array, tuple[Vjp]]:
    """Add up along `axis` (all axes by default); nothing sums to 0. d/dx = 1.

    Args:
        axis: one, or several, negative ones counted from the end.
        keepdims: leave the axes as ones of length 1, so that the result broadcasts against x.
    """
    over = _Reduced("sum", x, axis)
    return add_up(x, axis=over.axes, keepdims=keepdims), (over.spread,)


@op
@half_in_float32
def mean(x: Array, /, axis: Axis = None, *, keepdims: bool = False) -> tuple[Array, tuple[Vjp]]:
    """Average along `axis` (all axes by default). d/dx = 1 / n.

    Raises:
        ValueError: there is nothing to average.
    """
    over = _Reduced("mean", x, axis)
    over.needs_elements("mean")
    n = over.count
    return x.sum(axis=over.axes, keepdims=keepdims) / n, (lambda g: over.spread(g / n),)


@op
@half_in_float32
def var(x: Array, /, axis: Axis = None, *, keepdims: bool = False, ddof: int = 0) -> tuple[Array, tuple[Vjp]]:
    """Average the squared distance from the mean. d/dx = 2 (x - mean) / (n - ddof).

    Args:
        ddof: taken off the number of elements that the sum is divided by; 1 for an unbiased estimate.
    Raises:
        ValueError: there are not more than ddof elements.
    """
    over, distance, n = _distances("var", x, axis, ddof)
    y = (distance * distance).sum(axis=over.axes, keepdims=keepdims) / n
    return y, (lambda g: over.keep(g * 2 / n) * distance,)


@op
@half_in_float32
def std(x: Array, /, axis: Axis = None, *, keepdims: bool = False, ddof: int = 0) -> tuple[Array, tuple[Vjp]]:
    """Take y, the root of `var`. d/dx = (x - mean) / ((n - ddof) y), 0 where y = 0.

    Args:
        ddof: as in `var`.
    Raises:
        ValueError: there are not more than ddof elements.
    """
    xp = xp_of(x)
    over, distance, n = _distances("std", x, axis, ddof)
    y = xp.sqrt((distance * distance).sum(axis=over.axes, keepdims=keepdims) / n)
    return y, (lambda g: over.keep(g / (n * xp.where(y == 0, 1, y))) * distance,)


def _distances(name: str, x: Array, axis: Axis, ddof: int) -> tuple[_Reduced, Array, int]:
    """Return the reduction, x - mean, and n - ddof."""
    over = _Reduced(name, x, axis)
    if over.count <= ddof:
        raise ValueError(f"{name} needs more than {ddof} elements, got shape {x.shape} over axis {axis}")
    return over, x - x.sum(axis=over.axes, keepdims=True) / over.count, over.count - ddof


@op
@in_floats
@half_in_float32
def norm(x: Array, *, axis: Axis = None, keepdims: bool = False) -> tuple[Array, tuple[Vjp]]:
    """Take the length y = sqrt(sum of x^2). d/dx = x / y, 0 where y = 0."""
    xp = xp_of(x)
    over = _Reduced("norm", x, axis)
    y = xp.sqrt((x * x).sum(axis=over.axes, keepdims=keepdims))
    return y, (lambda g: over.keep(g / xp.where(y == 0, 1, y)) * x,)


@op
@in_floats
@half_in_float32
def logsumexp(x: Array, /, axis: Axis = None, *, keepdims: bool = False) -> tuple[Array, tuple[Vjp]]:
    """Take log(sum of exp(x)), stable. d/dx = softmax(x), 0 where all x are -inf.

    Raises:
        ValueError: there is nothing to add up.
    """
    xp = xp_of(x)
    over = _Reduced("logsumexp", x, axis)
    over.needs_elements("logsumexp")
    top = x.max(axis=over.axes, keepdims=True)
    top = xp.where(xp.isfinite(top), top, 0)
    p = xp.exp(x - top)
    total = p.sum(axis=over.axes, keepdims=True)
    nothing = total == 0  # all x are -inf
    total = xp.where(nothing, 1, total)
    p /= total
    y = xp.where(nothing, -xp.inf, xp.log(total) + top).astype(x.dtype, copy=False)
    return y if keepdims else y.squeeze(over.axes), (lambda g: over.keep(g) * p,)


@op
def max(x: Array, /, axis: Axis = None, *, keepdims: bool = False) -> tuple[Array, tuple[Vjp]]:
    """Take the largest. d/dx = 1 / n at each of the n largest, else 0.

    Raises:
        ValueError: there is no element.
    """
    return _extreme("max", x, axis, keepdims)


@op
def min(x: Array, /, axis: Axis = None, *, keepdims: bool = False) -> tuple[Array, tuple[Vjp]]:
    """Take the smallest. d/dx = 1 / n at each of the n smallest, else 0.

    Raises:
        ValueError: there is no element.
    """
    return _extreme("min", x, axis, keepdims)


def _extreme(name: str, x: Array, axis: Axis, keepdims: bool) -> tuple[Array, tuple[Vjp]]:
    """Do the work of max and min. The residual is a mask; where the result is nan, the nans count as largest."""
    over = _Reduced(name, x, axis)
    over.needs_elements(name)
    y = getattr(x, name)(axis=over.axes, keepdims=keepdims)
    chosen = x == over.keep(y)
    chosen |= x != x

    def vjp(g: Array) -> Array:
        share = over.keep(g) / chosen.sum(axis=over.axes, keepdims=True)  # float64 for a while: the count is int64
        return select(chosen, share.astype(g.dtype), 0, g.dtype)

    return y, (vjp,)


@op
@half_in_float32
def prod(x: Array, /, axis: Axis = None, *, keepdims: bool = False) -> tuple[Array, tuple[Vjp]]:
    """Multiply along `axis` (all axes by default). d/dx = the product of the others, exact also where some are 0."""
    over = _Reduced("prod", x, axis)
    return x.prod(axis=over.axes, keepdims=keepdims), (lambda g: over.keep(g) * _product_of_others(x, over),)


def _product_of_others(x: Array, over: _Reduced) -> Array:
    """Return for each element the product of those before it and after it, along the reduced axes as if one."""
    xp: Any = xp_of(x)
    order = (*(i for i in range(x.ndim) if i not in over.axes), *over.axes)  # the reduced axes last
    moved = x.transpose(order)
    rows = moved.reshape(-1 if over.count else 0, over.count)
    before, after = xp.ones_like(rows), xp.ones_like(rows)
    before[:, 1:] = rows[:, :-1].cumprod(axis=1)
    after[:, :-1] = rows[:, :0:-1].cumprod(axis=1)[:, ::-1]
    back = [order.index(i) for i in range(x.ndim)]
    return (before * after).reshape(moved.shape).transpose(back)


@op
@half_in_float32
def cumsum(x: Array, /, axis: int) -> tuple[Array, tuple[Vjp]]:
    """Add up from the start of an axis to each element. d/dx: the same, from the end.

    Returns:
        The shape of x: y[i] = x[0] + ... + x[i] along `axis`.
    """
    axes_of("cumsum", x, axis)

    def vjp(g: Array) -> Array:
        xp = xp_of(g)
        return xp.flip(xp.flip(g, axis).cumsum(axis), axis)

    return x.cumsum(axis), (vjp,)
