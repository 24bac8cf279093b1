"""Micro-batches: how a batch is split, and what each part weighs.

    batch of 7 samples, M = 3      | 0 1 2 | 3 4 | 5 6 |      weights 3/7, 2/7, 2/7

The loss of a batch is the mean over its samples, so a micro-batch's mean loss counts by its share of the samples, or
of whatever else the caller says that it is the mean over, such as the tokens whose target counts.
The executor starts each micro-batch's backward from that share, and divides nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from minigrad.backend import Array, xp_of


def split(batch: Array, num_microbatches: int) -> list[Array]:
    """Cut a batch along its first axis into parts of nearly equal size.

    They are views; the larger ones come first.

    Args:
        batch: (samples, ...).
        num_microbatches: at least 1, and at most the number of samples.
    Raises:
        ValueError: there is no batch axis, or there are fewer samples than micro-batches.
    """
    if batch.ndim == 0:
        raise ValueError(f"a batch needs a first axis of samples, got a scalar of dtype {batch.dtype}")
    if len(batch) < num_microbatches:
        raise ValueError(
            f"a batch needs at least one sample for each micro-batch, got {len(batch)} and {num_microbatches}"
        )
    ends = list(accumulate(sizes(len(batch), num_microbatches)))
    return [batch[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def as_microbatches(x: Array | Sequence[Array], num_microbatches: int, name: str) -> list[Array]:
    """Return a batch, or a list of micro-batches, as a list of micro-batches.

    Raises:
        ValueError: as `split`; or a list has another length, or an item without samples.
    """
    if not isinstance(x, (list, tuple)):
        return split(_as_array(x), num_microbatches)
    parts = [_as_array(part) for part in x]
    if len(parts) != num_microbatches:
        raise ValueError(f"{name}: num_microbatches is {num_microbatches}, got a list of {len(parts)}")
    for i, part in enumerate(parts):
        if part.ndim == 0 or len(part) == 0:
            raise ValueError(f"{name}: micro-batch {i} needs a first axis of samples, got shape {part.shape}")
    return parts


def num_parts(x: Array | Sequence[Array], at_most: int) -> int:
    """Return how many micro-batches a batch makes where fewer will do.

    As many as it has samples, up to `at_most`.
    """
    return max(1, min(len(x) if isinstance(x, (list, tuple)) or _as_array(x).ndim else 1, at_most))


def _as_array(x: Any) -> Array:
    return x if xp_of(x) is not np else np.asarray(x)


def check_used_once(parts: Sequence[Array]) -> None:
    """Refuse a list that holds one array in two places: its samples would count twice.

    Raises:
        ValueError: it does.
    """
    place: dict[int, int] = {}
    for i, part in enumerate(parts):
        first = place.setdefault(id(part), i)
        if first != i:
            raise ValueError(f"x: each micro-batch can be used only once, but {first} and {i} are the same array")


def sizes(num_samples: int, num_microbatches: int) -> list[int]:
    """Return the sizes of the parts that `split` makes.

    Args:
        num_samples: of the batch.
        num_microbatches: parts of it.
    """
    small, larger = divmod(num_samples, num_microbatches)
    return [small + (i < larger) for i in range(num_microbatches)]


def shares(counts: Sequence[float]) -> list[float]:
    """Return what share of the whole batch each micro-batch has."""
    total = sum(counts)
    return [count / total for count in counts]


def check_weights(weights: Sequence[float], num_microbatches: int | None) -> list[float]:
    """Return the weights of the micro-batches of one batch as numbers.

    Args:
        weights: one for each micro-batch.
        num_microbatches: how many there must be; None asks for no number.
    Raises:
        ValueError: there is not one for each micro-batch, one is negative or not finite, or all are 0.
    """
    given = [float(weight) for weight in weights]
    if num_microbatches is not None and len(given) != num_microbatches:
        raise ValueError(f"weights: there must be one for each micro-batch, got {len(given)} and {num_microbatches}")
    if not all(0 <= weight < math.inf for weight in given) or not sum(given):
        raise ValueError(f"weights must be at least 0 and finite, and one of them above 0, got {given}")
    return given
