"""Ops that move elements and change none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..backend import Array, xp_of
from ..tape import op

Vjp = Callable[[Array], Array]


@op
def reshape(x: Array, *, shape: Sequence[int]) -> tuple[Array, tuple[Vjp]]:
    """Give the elements another shape, in C order; one length may be -1."""
    before = x.shape
    return x.reshape(shape), (lambda g: g.reshape(before),)


@op
def transpose(x: Array, *, axes: Sequence[int] | None = None) -> tuple[Array, tuple[Vjp]]:
    """Permute the axes; reverse them by default."""
    back = None if axes is None else tuple(np.argsort([axis % x.ndim for axis in axes]))
    return x.transpose(axes), (lambda g: g.transpose(back),)


@op
def concatenate(*arrays: Array, axis: int = 0) -> tuple[Array, tuple[Vjp, ...]]:
    """Join arrays along an axis that exists."""
    ends = list(itertools.accumulate(x.shape[axis] for x in arrays))
    y = xp_of(arrays[0]).concatenate(arrays, axis=axis)
    before = (slice(None),) * (axis % y.ndim)

    def part(start: int, stop: int, dtype: Any) -> Vjp:
        return lambda g: g[(*before, slice(start, stop))].astype(dtype, copy=False)

    return y, tuple(part(a, b, x.dtype) for a, b, x in zip([0, *ends], ends, arrays, strict=False))


@op
def getitem(x: Array, *, index: Any) -> tuple[Array, tuple[Vjp]]:
    """Select as NumPy's `x[index]`; an element selected twice gets both gradients."""
    xp, shape, dtype = xp_of(x), x.shape, x.dtype
    parts = index if isinstance(index, tuple) else (index,)
    distinct = all(part is None or part is Ellipsis or isinstance(part, (int, slice)) for part in parts)

    def vjp(g: Array) -> Array:
        dx: Array = xp.zeros(shape, dtype)
        if distinct:
            dx[index] = g
        else:
            xp.add.at(dx, index, g)
        return dx

    return x[index], (vjp,)
