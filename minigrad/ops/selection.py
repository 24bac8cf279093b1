"""Ops that choose between values. Gradients are selected too, never multiplied by a mask: 0 times inf is nan."""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad.autodiff.tape import op
from minigrad.autodiff.vjps import Vjp
from minigrad.backend import Array, xp_of
from minigrad.ops.operands import check_broadcast, fit, half_in_float32, pair, select

_BOOLEAN = np.dtype(bool)


@op
def where(condition: Array, a: Array, b: Array) -> tuple[Array, tuple[None, Vjp, Vjp]]:
    """Take a where the condition holds, else b. d/da = 1 where it holds, d/db = 1 where it does not, else 0.

    Raises:
        TypeError: the condition is not boolean.
        ValueError: the shapes do not broadcast.
    """
    if getattr(condition, "dtype", None) is not _BOOLEAN:
        kind = getattr(condition, "dtype", type(condition).__name__)
        raise TypeError(f"where: the condition must be an array of booleans, got {kind}")
    a, b = pair("where", a, b)
    for x in (a, b):
        if hasattr(x, "shape"):
            check_broadcast("where", condition, x)
    y = select(condition, a, b, np.result_type(a, b))
    vjps = fit(a, b, y, lambda g: select(condition, g, 0, g.dtype), lambda g: select(condition, 0, g, g.dtype))
    return y, (None, *vjps)


@op
def maximum(a: Array, b: Array) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Take the larger of two. d/da = 1 where a > b, 1/2 where they are equal, else 0; d/db likewise."""
    a, b = pair("maximum", a, b)
    xp = xp_of(a) if hasattr(a, "dtype") else xp_of(b)
    y = xp.maximum(a, b)
    return y, _to_the_winner(a, b, y, a < b, a > b)


@op
def minimum(a: Array, b: Array) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Take the smaller of two. d/da = 1 where a < b, 1/2 where they are equal, else 0; d/db likewise."""
    a, b = pair("minimum", a, b)
    xp = xp_of(a) if hasattr(a, "dtype") else xp_of(b)
    y = xp.minimum(a, b)
    return y, _to_the_winner(a, b, y, a > b, a < b)


def _to_the_winner(a: Any, b: Any, y: Array, a_lost: Array, b_lost: Array) -> tuple[Vjp, Vjp]:
    """Return the vjps that pass a gradient to the operand that was taken, and half of it to each of equal ones.

    Where one is nan none has lost and both get half, so that a nan is not the end of a gradient.
    """
    one_lost = a_lost | b_lost

    def vjp_of(lost: Array) -> Vjp:
        return lambda g: select(lost, 0, select(one_lost, g, g / 2, g.dtype), g.dtype)

    return fit(a, b, y, vjp_of(a_lost), vjp_of(b_lost))


@op
@half_in_float32
def clip(x: Array, /, low: float | None = None, high: float | None = None) -> tuple[Array, tuple[Vjp]]:
    """Limit x to [low, high]; None is no limit. d/dx = 1 inside and at the limits, else 0.

    Raises:
        ValueError: there is no limit at all, or low > high.
    """
    if (low is None and high is None) or (low is not None and high is not None and low > high):
        raise ValueError(f"clip needs low or high, and low <= high, got {low} and {high}")
    xp = xp_of(x)
    outside = xp.zeros(x.shape, bool)
    if low is not None:
        outside |= x < low
    if high is not None:
        outside |= x > high
    return xp.clip(x, low, high), (lambda g: xp.where(outside, 0, g),)
