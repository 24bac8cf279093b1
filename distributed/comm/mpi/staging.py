"""Reduction of arrays that lie in this rank's own memory, through a little of what the ranks of a host share.

For what comes and goes, such as gradients that nobody keeps whole; what stays lies in a SharedBuffer from the start.
"""

from __future__ import annotations

from distributed.comm.mpi.progress import Steps
from distributed.comm.mpi.shared_memory import SharedBuffer
from distributed.comm.reduction import ReduceOp
from distributed.comm.work import Array

STAGING_BYTES = 1 << 20  # of each rank: what passes through stays in a core's cache


class Staging:
    """Shared memory of one host through which arrays are reduced that lie elsewhere, a piece at a time.

        flat      | a0 a1 a2 | b0 b1 b2 |      each rank's slice, in three pieces
        buffer    | a0 | b0 |                  filled, reduced, and what is this rank's taken out; then the next ones

    Args:
        buffer: on one host, used for nothing else.
        size: how many ranks there are.
    """

    def __init__(self, buffer: SharedBuffer, rank: int, size: int) -> None:
        self._buffer = buffer
        self._rank, self._size = rank, size
        self._num_launched = 0
        self._num_over = 0

    def reduce_scatter(self, flat: Array, op: ReduceOp) -> Steps:
        """Reduce this rank's slice of an array, in its place."""
        self._num_launched += 1
        number = self._num_launched
        slices = flat.reshape(self._size, -1)
        own = slices[self._rank]
        while self._num_over < number - 1:
            yield  # there is one buffer, and all ranks fill it in the order of their calls
        longest = self._buffer.memory.nbytes // (self._size * flat.itemsize)
        for first in range(0, own.size, longest):
            piece = slices[:, first : first + longest]
            staged = self._buffer.memory[: piece.nbytes].view(flat.dtype)
            staged.reshape(piece.shape)[...] = piece
            own[first : first + longest] = yield from self._buffer.reduce_scatter(staged, op)
        self._num_over = number
        return own
