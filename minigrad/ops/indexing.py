"""Selecting with an index: `x[index]`, and what is made of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from minigrad.arguments import as_int
from minigrad.autodiff.tape import op
from minigrad.autodiff.vjps import Vjp
from minigrad.backend import Array, is_half, scatter_add_rows, xp_of
from minigrad.habits import own_options
from minigrad.ops.operands import axes_of
from minigrad.tensor import Tensor


@op
def getitem(x: Array, *, index: Any) -> tuple[Array, tuple[Vjp]]:
    """Select as NumPy's `x[index]`; an element selected twice gets both gradients.

    Args:
        index: integers, slices, None, `...`, arrays of integers, masks of booleans, or a tuple of them. An array of
            integers may be of any integer type.
    """
    xp, shape, dtype = xp_of(x), x.shape, x.dtype
    distinct = all(_is_distinct(part) for part in (index if isinstance(index, tuple) else (index,)))
    of_rows = isinstance(index, xp.ndarray) and index.dtype.kind in "iu"

    def vjp(g: Array) -> Array:
        if distinct:
            dx: Array = xp.zeros(shape, dtype)
            dx[index] = g
            return dx
        dx = xp.zeros(shape, np.float32 if is_half(dtype) else dtype)  # thousands may add up in one place
        g = g.astype(dx.dtype, copy=False)
        if of_rows:
            scatter_add_rows(dx, index.ravel().astype(np.intp) % shape[0], g.reshape(index.size, *shape[1:]))
        else:
            xp.add.at(dx, index, g)
        return dx.astype(dtype, copy=False)

    return x[index], (vjp,)


def _is_distinct(part: Any) -> bool:
    """Return whether this part of an index selects no place twice."""
    is_mask = getattr(getattr(part, "dtype", None), "kind", None) == "b"
    return part is None or part is Ellipsis or isinstance(part, (int, np.integer, slice)) or is_mask


@own_options
def split(x: Tensor, parts: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    """Cut x along an axis into views.

    Args:
        parts: how many equal parts, or the length of each.
    Raises:
        ValueError: the parts are not the whole.
    """
    (axis,) = axes_of("split", x.data, axis)
    n = x.shape[axis]
    count = as_int(parts)
    lengths = list(parts) if count is None else [n // count] * count if count > 0 else []  # type: ignore[arg-type]
    if not lengths or sum(lengths) != n or any(k < 0 for k in lengths):
        raise ValueError(f"split: the parts of an axis of {n} must be equal, or lengths that add up to it, got {parts}")
    before = (slice(None),) * axis
    return [
        getitem(x, index=(*before, slice(end - length, end)))
        for end, length in zip(itertools.accumulate(lengths), lengths, strict=True)
    ]
