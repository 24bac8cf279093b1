"""FlatRange: a contiguous slice of a flat, such as a bucket, a shard, or all that an optimizer updates.

    flat.grad           | b1 |    w1    | b0 |    w0    |
    a range             |<-------------->|
    cut in two                |<- - ->|<- - - - - - - - >|     ends may lie inside parameters

A TensorSlice is the other way to look at it: what of one parameter lies in a range.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from minigrad.backend import Array
from minigrad.parameter import Parameter

if TYPE_CHECKING:
    from minigrad.flat import FlatBuffer


@dataclass(frozen=True)
class FlatRange:
    """A contiguous slice of a flat.

    Attributes:
        flat: the owner of the memory.
        start, stop: in elements.
        params: that lie in it, in memory order; the first and the last of them may be cut.
    """

    flat: FlatBuffer
    start: int
    stop: int
    params: tuple[Parameter, ...]

    @staticmethod
    def over(params: Sequence[Parameter]) -> FlatRange:
        """Return the range that adjacent parameters of one flat fill.

        Args:
            params: at least one, in memory order.
        """
        first, last = params[0], params[-1]
        assert first.flat is not None
        return FlatRange(first.flat, first.start, last.stop, tuple(params))

    @cached_property
    def name(self) -> str:
        """The first and the last parameter in it, for messages."""
        return f"{self.params[0].label} ... {self.params[-1].label}"

    @property
    def data(self) -> Array:
        """(n,) values, a view."""
        return self.flat.data[self.start : self.stop]

    @property
    def copy(self) -> Array | None:
        """(n,) what ops see in place of `data`, a view.

        None where they see `data` itself.
        """
        return None if self.flat.copy is None else self.flat.copy[self.start : self.stop]

    @property
    def grad(self) -> Array:
        """(n,) gradients, a view.

        Those that backward did not reach are filled with zeros first, and sums in a wider dtype are rounded.
        """
        for p in self.params:
            p.fill_missing_grad()
            if p.is_sum:
                p.grad_view()
        return self.flat.grad_slice(self.start, self.stop)

    def cut(self, start: int, stop: int) -> FlatRange:
        """Return a part of this range, which may begin and end inside parameters.

        Args:
            start, stop: in elements of the flat, within this range.
        """
        inside = tuple([p for p in self.params if p.start < stop and start < p.stop])
        return FlatRange(self.flat, start, stop, inside)

    def over_run(self, params: Iterable[Parameter]) -> FlatRange:
        """Return what adjacent parameters, given in memory order, have of this range."""
        run = tuple(params)
        return FlatRange(self.flat, max(run[0].start, self.start), min(run[-1].stop, self.stop), run)

    def refresh_copy(self) -> None:
        """Write the values into the copy that ops see, if there is one."""
        copy = self.copy
        if copy is not None:
            copy[...] = self.data

    def note_step(self, by: str, *, copied: bool = False) -> None:
        """Note that the values of all parameters that require grad were changed in place; see `note_change`."""
        for is_changed, run in groupby(self.params, lambda p: p.requires_grad):
            if is_changed:
                params = tuple(run)
                part = self if len(params) == len(self.params) else self.over_run(params)
                part.note_change(by, copied=copied)

    def note_change(self, by: str, *, copied: bool = False) -> None:
        """Note that the values were changed in place.

        A backward that still needs them can then say so.

        Args:
            copied: the copy that ops see is written by the caller.
        """
        name = f"{self.name} (by {by})"
        self.flat.version.note(self.data, name)
        if self.copy is not None:
            if not copied:
                self.refresh_copy()
            self.flat.version.note(self.copy, name)


class TensorSlice(NamedTuple):
    """A part of a tensor.

    Attributes:
        array: a view; 1-D where the part is not the whole.
        shape: of the whole tensor.
        start, stop: of its elements in C order.
    """

    array: Array
    shape: tuple[int, ...]
    start: int
    stop: int

    @staticmethod
    def whole(array: Array) -> TensorSlice:
        """Return all of a tensor as a slice of it."""
        return TensorSlice(array, array.shape, 0, array.size)


def slices_in(part: FlatRange, array: Array) -> Iterator[tuple[Parameter, TensorSlice]]:
    """Cut an array of a range's elements into what belongs to each parameter."""
    for p in part.params:
        start, stop = max(p.start, part.start), min(p.stop, part.stop)
        own = array[start - part.start : stop - part.start]
        is_whole = stop - start == p.size
        yield p, TensorSlice(own.reshape(p.shape) if is_whole else own, p.shape, start - p.start, stop - p.start)
