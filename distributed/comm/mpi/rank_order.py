"""Reductions that add up in rank order, whatever the MPI does: the same bits in every run and from every MPI.

    rank 0   | a0 a1 |    exchange      | a0 b0 |  sum    | s0 |    gather    | s0 s1 |
    rank 1   | b0 b1 |      ->          | a1 b1 |   ->    | s1 |      ->      | s0 s1 |

Every rank sends slice r to rank r, adds up what it got, and collects the sums. Each of the two phases has messages of
its own, and is launched in call order on every rank: ranks may reach the phases of two sums in any order.

This file knows no MPI: it is given communicators of mpi4py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distributed.comm.mpi.progress import Steps, until_done
from distributed.comm.reduction import ReduceOp, reduce_in_rank_order
from distributed.comm.transfer import as_bytes
from distributed.comm.work import Array

_BYTE = "B"


class RankOrderReduction:
    """The reductions of one communicator.

    Args:
        exchange, gather: duplicates of it, one for each phase.
    """

    def __init__(self, exchange: Any, gather: Any) -> None:
        self._exchange = exchange
        self._gather = gather
        self._rank, self._size = exchange.Get_rank(), exchange.Get_size()
        self._num_sums = 0
        self._num_gathers = 0

    def allreduce(self, array: Array, op: ReduceOp) -> Steps:
        """Reduce `array` in place: sum this rank's slice, then collect everybody's."""
        flat = array.reshape(-1)
        self._num_sums += 1
        number = self._num_sums
        yield from self.reduce_own_slice(flat, op)
        while self._num_gathers < number - 1:
            yield  # ranks match collectives by the order of their launch
        self._num_gathers = number
        request = self._gather.Iallgatherv(None, [as_bytes(flat), self._layout(flat), _BYTE])
        return (yield from until_done(request, array))

    def reduce_own_slice(self, flat: Array, op: ReduceOp) -> Steps:
        """Send every rank its slice of `flat`, and add up what comes for the own one.

        The sum is in rank order.
        """
        own = flat[self._slice_of(self._rank, flat)]
        received = np.empty((self._size, own.size), flat.dtype)
        if flat.size % self._size == 0:  # no slice need be told its place, which beyond 2 GiB MPI could not count
            request = self._exchange.Ialltoall([as_bytes(flat), _BYTE], [as_bytes(received), _BYTE])
        else:
            counts = [own.nbytes] * self._size
            displacements = [own.nbytes * rank for rank in range(self._size)]
            request = self._exchange.Ialltoallv(
                [as_bytes(flat), self._layout(flat), _BYTE], [as_bytes(received), (counts, displacements), _BYTE]
            )
        yield from until_done(request, received)
        reduce_in_rank_order(list(received), op, [own])
        return own

    def _slice_of(self, rank: int, flat: Array) -> slice:
        return slice(rank * flat.size // self._size, (rank + 1) * flat.size // self._size)

    def _layout(self, flat: Array) -> tuple[list[int], list[int]]:
        """Return the bytes of each rank's slice, and where it begins."""
        slices = [self._slice_of(rank, flat) for rank in range(self._size)]
        counts = [(part.stop - part.start) * flat.itemsize for part in slices]
        return counts, [part.start * flat.itemsize for part in slices]
