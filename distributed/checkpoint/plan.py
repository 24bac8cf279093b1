"""Who saves what: each tensor, or each slice of one, is saved once, by one of the ranks that hold it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True)
class Slice:
    """A part of a tensor, its elements from `start` to `stop` in C order, in the file of `rank`."""

    rank: Count
    start: Count
    stop: Count


@dataclass(frozen=True)
class Stored:
    """Where a tensor of this shape and dtype is: whole in the file of `rank`, or in slices in those of several."""

    rank: Count
    shape: tuple[Count, ...]
    dtype: str
    slices: tuple[Slice, ...] = ()

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def parts(self) -> tuple[Slice, ...]:
        """Its slices; one, where it is saved whole."""
        return self.slices or (Slice(self.rank, 0, self.size),)

    def key(self, name: str, part: Slice) -> str:
        """Return what a part of the tensor `name` is called in its file."""
        return f"{name}[{part.start}:{part.stop}]" if self.slices else name

    def is_complete(self) -> bool:
        """Return whether the slices are all of the tensor, each element once."""
        ends = [0, *(part.stop for part in self.parts)]
        return [*(part.start for part in self.parts), self.size] == ends


@dataclass(frozen=True)
class Held:
    """A tensor as one rank holds it.

    Attributes:
        num_bytes: of what is here.
        start, stop: of its elements in C order, those that are here; all of them by default.
    """

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    start: int = 0
    stop: int | None = None

    @property
    def slice(self) -> tuple[int, int]:
        return self.start, math.prod(self.shape) if self.stop is None else self.stop


def divide(held: Sequence[Mapping[str, Held]]) -> dict[str, Stored]:
    """Decide who saves what.

    The largest tensors go first, each to the least laden of the ranks that hold it.

    Args:
        held: by rank, then by name.
    Raises:
        ValueError: two ranks hold different tensors of one name, or slices that are not all of it.
    """
    first: dict[str, Held] = {}
    holders: dict[str, dict[tuple[int, int], list[int]]] = {}  # name -> slice -> ranks
    num_bytes: dict[tuple[str, tuple[int, int]], int] = {}
    for rank, tensors in enumerate(held):
        for name, tensor in tensors.items():
            known = first.setdefault(name, tensor)
            if (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                holder = min(ranks[0] for ranks in holders[name].values())
                raise ValueError(
                    f"one name is one tensor on all ranks, but {name} is {show(known)} on rank "
                    f"{holder} and {show(tensor)} on rank {rank}"
                )
            holders.setdefault(name, {}).setdefault(tensor.slice, []).append(rank)
            num_bytes[name, tensor.slice] = tensor.num_bytes
    load = [0] * len(held)
    chosen: dict[str, list[Slice]] = {}
    for name, (start, stop) in sorted(num_bytes, key=lambda key: (-num_bytes[key], key)):
        rank = min(holders[name][start, stop], key=load.__getitem__)
        load[rank] += num_bytes[name, (start, stop)]
        chosen.setdefault(name, []).append(Slice(rank, start, stop))
    plan = {name: _stored(first[name], chosen[name]) for name in chosen}
    for name, stored in plan.items():
        if not stored.is_complete():
            raise ValueError(
                f"the slices of a tensor must be all of it, but of {name}, {show(stored)}, ranks have the elements "
                f"{', '.join(f'{part.start} to {part.stop}' for part in stored.parts)}"
            )
    return plan


def _stored(tensor: Held, slices: Sequence[Slice]) -> Stored:
    in_order = tuple(sorted(slices, key=lambda part: part.start))
    whole = Stored(in_order[0].rank, tensor.shape, tensor.dtype)
    return whole if in_order == whole.parts else Stored(whole.rank, tensor.shape, tensor.dtype, in_order)


def show(tensor: Held | Stored) -> str:
    """Describe a tensor in an error: `float32[3, 4]`."""
    return f"{tensor.dtype}{list(tensor.shape)}"
