"""Reductions over axes."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..backend import Array, xp_of
from ..tape import op

Vjp = Callable[[Array], Array]
Axis = int | tuple[int, ...] | None


@op
def sum(x: Array, *, axis: Axis = None, keepdims: bool = False) -> tuple[Array, tuple[Vjp]]:
    """Add up along `axis` (all axes by default). d/dx = 1."""
    spread = _spread(x, axis, keepdims)
    return x.sum(axis=axis, keepdims=keepdims, dtype=x.dtype), (spread,)


@op
def mean(x: Array, *, axis: Axis = None, keepdims: bool = False) -> tuple[Array, tuple[Vjp]]:
    """Average along `axis` (all axes by default). d/dx = 1 / n.

    Raises:
        ValueError: there is nothing to average.
    """
    axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    n = math.prod(x.shape[i] for i in axes)
    if n == 0:
        raise ValueError(f"mean needs at least one element, got shape {x.shape} over axis {axis}")
    spread = _spread(x, axis, keepdims)
    y = x.sum(axis=axis, keepdims=keepdims, dtype=x.dtype)
    return y / n, (lambda g: spread(g / n),)


def _spread(x: Array, axis: Axis, keepdims: bool) -> Vjp:
    """Return the vjp of a sum: repeat a gradient along the axes that were summed."""
    xp, shape = xp_of(x), x.shape

    def spread(g: Array) -> Array:
        if axis is not None and not keepdims:
            g = xp.expand_dims(g, axis)
        return xp.broadcast_to(g, shape)

    return spread
