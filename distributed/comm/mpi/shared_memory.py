"""Collectives in memory that all ranks of a host share: no rank copies another's data before it adds it up.

    rank 0   arrived done | a0 a1 |        1. every rank says that its array is there (arrived)
    rank 1   arrived done | b0 b1 |        2. rank r adds up slice r of all arrays and writes it into all of them:
                                              rank 0 makes both a0 + b0, rank 1 both a1 + b1
                                           3. every rank says that it has done so (done)

A gather is the same without a sum: in step 2 rank r writes its own slice into all arrays.

The counters are numbers of operations and only grow, so none has to be reset, and operations follow each other without
a barrier. Over several hosts each rank's slice is summed with those of the other hosts between the steps 2 and 3,
and only then written. On one host sums are taken in rank order, so the bits are those of `combine`.

This file knows no MPI: it is given the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np

from distributed.comm.communicator import Communicator
from distributed.comm.mpi.progress import Steps
from distributed.comm.reduction import ReduceOp, combine, divide_mean, reduce_in_rank_order, sum_widely
from distributed.comm.work import Array
from minigrad.backend import round_to, widened

HEADER_BYTES = 64  # a cache line of its own for each rank's counters
_ARRIVED, _DONE = 0, 1  # their places in it


@dataclass(frozen=True)
class SharedWindow:
    """Memory of the ranks of a host that each of them can read and write.

    Attributes:
        rank: this process's place among them.
        parts: (nbytes,) uint8 zeros by rank; equally long, and cache lines begin where they do.
        fence: makes what this process wrote before it visible before what it writes after it; reads too.
    """

    rank: int
    parts: Sequence[Array]
    fence: Callable[[], None]


class SharedBuffer:
    """One array on each rank of a communicator, in shared memory.

    Slices of it are reduced where they lie.

    Args:
        window: HEADER_BYTES and the array, for each rank of this host.
        num_ranks: of the communicator, over all hosts.
        between: the ranks that have this one's place on their hosts; None where there is one host.
    """

    def __init__(self, window: SharedWindow, num_ranks: int, between: Communicator | None) -> None:
        self._window = window
        self._num_ranks = num_ranks
        self._between = between
        self._counters = [part[:HEADER_BYTES].view(np.int64) for part in window.parts]
        self._memory = [part[HEADER_BYTES:] for part in window.parts]
        self._num_launched = 0
        self._num_summed = 0
        self._launched: list[tuple[int, int, int]] = []  # number, the start and the end of what is not done everywhere

    @property
    def memory(self) -> Array:
        """This rank's own memory, (nbytes,) uint8."""
        return self._memory[self._window.rank]

    def holds(self, array: Array) -> bool:
        """Return whether an array lies in this rank's memory."""
        offset = _address(array) - _address(self.memory)
        return offset >= 0 and 0 < array.nbytes <= self.memory.nbytes - offset

    @property
    def spans_hosts(self) -> bool:
        return self._between is not None

    def reduce_scatter(self, array: Array, op: ReduceOp) -> Steps:
        """Reduce this rank's slice of an array that this buffer holds, on one host.

        The array is at the same place on every rank.
        """
        assert self._between is None
        size = array.size // len(self._memory)
        yield from self._reduce(array, op, everywhere=False)
        return array[self._window.rank * size : (self._window.rank + 1) * size]

    def allreduce(self, array: Array, op: ReduceOp) -> Steps:
        """Reduce an array that this buffer holds; at the same place on every rank."""
        return (yield from self._reduce(array, op, everywhere=True))

    def sum_widely(self, array: Array, wide: Array, is_wide: Array, *, everywhere: bool) -> Steps:
        """Add up what ranks have in `array`, or where they say so in `wide`, and round it into `array`.

        This buffer holds all three, at the same places on every rank. See `Communicator.sum_widely`.
        """
        narrow, flags = self._own_slices(array), self._everywhere(is_wide)
        wides = self._own_slices(wide)
        outs = narrow if everywhere else [narrow[self._window.rank]]
        number = yield from self._arrive(array, wide, is_wide)
        parts = [w if flag[0] else n for n, w, flag in zip(narrow, wides, flags, strict=True)]
        if self._between is None:
            sum_widely(parts, outs, wide.dtype)
            self._num_summed = number
        else:
            total = np.empty_like(wides[0])
            sum_widely(parts, [total], wide.dtype)
            yield from self._add_hosts(number, total, ReduceOp.SUM)
            for out in outs:
                round_to(out, total)
        yield from self._leave(number)
        return array

    def allgather(self, arrays: Sequence[Array]) -> Steps:
        """Write this rank's slices of arrays that this buffer holds into those of all ranks, on one host.

        The arrays are at the same places on every rank.
        """
        assert self._between is None
        slices = [self._own_slices(array) for array in arrays]
        number = yield from self._arrive(*arrays)
        for parts in slices:
            for rank, part in enumerate(parts):
                if rank != self._window.rank:
                    part[...] = parts[self._window.rank]
        self._num_summed = number
        yield from self._leave(number)
        return arrays[0]

    def _reduce(self, array: Array, op: ReduceOp, *, everywhere: bool) -> Steps:
        """Reduce this rank's slice, and write it into the arrays of all ranks, or into its own alone."""
        parts = self._own_slices(array)
        number = yield from self._arrive(array)
        if self._between is None:
            reduce_in_rank_order(parts, op, parts if everywhere else [parts[self._window.rank]])
            self._num_summed = number
        else:
            total = combine(parts, op, widened(np.empty_like(parts[0])))
            yield from self._add_hosts(number, total, ReduceOp.SUM if op is ReduceOp.MEAN else op)
            divide_mean(total, total, op, self._num_ranks)
            for part in parts:
                part[...] = total
        yield from self._leave(number)
        return array

    def _add_hosts(self, number: int, total: Array, op: ReduceOp) -> Generator[None, None, None]:
        """Reduce this rank's slice over the hosts, in an operation of which this host has `total`."""
        assert self._between is not None
        work = self._between.allreduce(total, op=op)
        self._num_summed = number  # the next one may follow: it was launched after this one on every host
        while not work.test() or self._own_count(_DONE) < number - 1:
            yield

    def _own_slices(self, array: Array) -> list[Array]:
        """Return what this rank works on: its slice of the array of each rank."""
        first, stop = (array.size * rank // len(self._memory) for rank in (self._window.rank, self._window.rank + 1))
        return [whole[first:stop] for whole in self._everywhere(array)]

    def _everywhere(self, array: Array) -> list[Array]:
        """Return the array of each rank."""
        offset = _address(array) - _address(self.memory)
        return [memory[offset : offset + array.nbytes].view(array.dtype) for memory in self._memory]

    def _arrive(self, *arrays: Array) -> Generator[None, None, int]:
        """Launch an operation: wait until all ranks have, and this one has worked on the one before.

        What has any of these arrays in common with an earlier operation waits until all ranks have worked on that:
        nobody need have waited for it, and another rank may have had its slice.
        """
        self._num_launched += 1
        number = self._num_launched
        before = self._last_launched_on(arrays)
        self._launched += [(number, *_bounds(array)) for array in arrays]
        self._announce(_ARRIVED, number)
        while self._num_summed < number - 1 or not self._all_have(_ARRIVED, number):
            yield
        while before and not self._all_have(_DONE, before):
            yield
        return number

    def _last_launched_on(self, arrays: Sequence[Array]) -> int:
        """Return the last operation that is not done everywhere and has memory of these arrays, 0 if none has."""
        done = min(int(counters[_DONE]) for counters in self._counters)
        self._launched = [launched for launched in self._launched if launched[0] > done]
        bounds = [_bounds(array) for array in arrays]
        return max(
            (number for number, start, stop in self._launched for first, end in bounds if start < end and first < stop),
            default=0,
        )

    def _leave(self, number: int) -> Generator[None, None, None]:
        """Wait until all ranks have worked on an operation, as this one has."""
        self._announce(_DONE, number)
        while not self._all_have(_DONE, number):
            yield

    def _announce(self, counter: int, number: int) -> None:
        self._window.fence()
        self._counters[self._window.rank][counter] = number

    def _own_count(self, counter: int) -> int:
        return int(self._counters[self._window.rank][counter])

    def _all_have(self, counter: int, number: int) -> bool:
        there = all(counters[counter] >= number for counters in self._counters)
        self._window.fence()
        return there


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _bounds(array: Array) -> tuple[int, int]:
    return _address(array), _address(array) + array.nbytes
