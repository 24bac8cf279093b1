"""Who saves what: each tensor is saved once, by one of the ranks that hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True)
class Stored:
    """Where a tensor is: in the file of `rank`, with this shape and dtype."""

    rank: Count
    shape: tuple[Count, ...]
    dtype: str


@dataclass(frozen=True)
class Held:
    """A tensor as one rank holds it."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


def divide(held: Sequence[Mapping[str, Held]]) -> dict[str, Stored]:
    """Decide who saves what: the largest first, each by the least laden of the ranks that hold it.

    Args:
        held: by rank, then by name.
    Raises:
        ValueError: two ranks hold different tensors of one name.
    """
    first: dict[str, Held] = {}
    holders: dict[str, list[int]] = {}
    for rank, tensors in enumerate(held):
        for name, tensor in tensors.items():
            if first.setdefault(name, tensor) != tensor:
                raise ValueError(
                    f"one name is one tensor on all ranks, but {name} is {show(first[name])} on rank "
                    f"{holders[name][0]} and {show(tensor)} on rank {rank}"
                )
            holders.setdefault(name, []).append(rank)
    load = [0] * len(held)
    plan = {}
    for name in sorted(first, key=lambda name: (-first[name].num_bytes, name)):
        rank = min(holders[name], key=load.__getitem__)
        load[rank] += first[name].num_bytes
        plan[name] = Stored(rank, first[name].shape, first[name].dtype)
    return plan


def show(tensor: Held | Stored) -> str:
    """Describe a tensor in an error: `float32[3, 4]`."""
    return f"{tensor.dtype}{list(tensor.shape)}"
