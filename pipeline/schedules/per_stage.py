"""One number for all, or one for each: how times, sizes and limits of stages, boundaries and ranks are given."""

from __future__ import annotations

import math
from collections.abc import Sequence

PerStage = float | Sequence[float]
"""One number for every stage (or boundary, or rank), or one for each."""


def each(
    name: str, value: PerStage, count: int, of_what: str, *, positive: bool = False, infinite: bool = False
) -> tuple[float, ...]:
    """Return the number of each.

    Args:
        count, of_what: how many there are, of what: "stages".
        positive: whether 0 is refused.
        infinite: whether inf is allowed.
    Raises:
        ValueError: there are not so many numbers, or one is out of range or nan.
    """
    values = tuple(value) if isinstance(value, Sequence) else (value,) * count
    if len(values) != count:
        raise ValueError(f"{name} must be one number or one for each of the {of_what}, got {len(values)} for {count}")
    if not all((x > 0 or (x == 0 and not positive)) and (x < math.inf or infinite) for x in values):
        least = "positive" if positive else "at least 0"
        raise ValueError(f"{name} must be {least}{'' if infinite else ' and finite'}, got {value}")
    return values
