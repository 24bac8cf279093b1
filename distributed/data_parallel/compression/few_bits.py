"""Gradients in few bits, with error feedback: a comm hook.

Two ranks tell each other all they have, in one message:

    own gradients + kept    narrowed; what is lost is kept
               allgather    the other's is added to what the own one says: the same bits on both

With more ranks that would be more bytes the more there are. So each adds up a slice for everybody:

    own gradients + kept    | slice 0 | slice 1 | slice 2 |     narrowed; what is lost is kept
                all_to_all      |          |         |
    rank r          sum of all ranks' slice r, + kept           narrowed once more; what is lost is kept here too
                 allgather  | slice 0 | slice 1 | slice 2 |     the same bits on every rank

With b bytes a number a rank sends 2 (size - 1) / size b bytes a gradient, where an allreduce sends as many times its 4
or 8. `number_formats.py` has how numbers are narrowed.

Source: Tang et al. 2019 (arXiv 1905.05957), whose "double squeeze" has error feedback on both ways.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distributed.comm.communicator import Array, Communicator, Work
from distributed.comm.sequence import MessageSteps, Turn
from distributed.comm.work import JoinedWork
from distributed.data_parallel.compression.feedback import FeedbackHook, own_buffer
from distributed.data_parallel.compression.number_formats import GPU_FORMATS, number_format
from minigrad.backend import xp_of
from minigrad.flat_range import FlatRange
from minigrad.nn import Buffer


class ErrorFeedback(FeedbackHook):
    """A comm hook that sends gradients in a narrow format, and keeps the difference.

    What is kept is added in the next step. Where a number is not finite, all of its block arrives as nan.

    Args:
        dtype: one of `NUMBER_FORMATS`; all but int8, int4, float4_e2m1fn and float16 need
            `ml_dtypes`.

    Raises:
        ValueError: dtype is another one, or, where the hook is attached, one that a GPU does not have.
    """

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self._name = dtype
        self._format = number_format(dtype)

    def _new_memory(self, part: FlatRange, rank: int, size: int) -> list[Buffer]:
        if xp_of(part.grad) is not np and self._name not in GPU_FORMATS:
            raise ValueError(f"gradients of a GPU can be sent as {', '.join(GPU_FORMATS)}, got {self._name!r}")
        num_slices = size if size > 2 else 1
        room = self._format.room_for(-(-(part.stop - part.start) // num_slices))
        sent = own_buffer(part, "sent", (num_slices, room), rank, size)
        return [sent] if num_slices == 1 else [sent, own_buffer(part, "reduced", (room,), rank, size)]

    def _launch(self, grad: Array, part: FlatRange, kept: list[Buffer], comm: Communicator) -> Work:
        if comm.size > 2:
            return super()._launch(grad, part, kept, comm)
        (message,) = self._pack([grad], kept[0].data)
        self._count(message, comm.size)

        def add_other(results: list[Array]) -> Array:
            (rows,) = results
            self._format.unpack(rows[1 - comm.rank], kept[0].data.size, grad, add=True)
            return grad

        # Added up in `wait`: while the last bucket is on its way there is nothing else to do.
        return JoinedWork([comm.allgather(message)], add_other)

    def _steps(self, grad: Array, part: FlatRange, kept: list[Buffer], comm: Communicator, turn: Turn) -> MessageSteps:
        sent, reduced = (buffer.data for buffer in kept)
        length = -(-grad.size // comm.size)
        slices = [grad[i * length : (i + 1) * length] for i in range(comm.size)]
        total = xp_of(grad).empty(length, grad.dtype)
        messages = self._pack(slices, sent)
        self._count(messages, comm.size)
        for i, row in enumerate((yield comm.all_to_all(messages))):
            self._format.unpack(row, reduced.size, total, add=i > 0)
        (message,) = self._pack([total], reduced[None])
        yield turn
        turn.take()
        for its, row in zip(slices, (yield self._later.allgather(message)), strict=True):
            self._format.unpack(row, reduced.size, its, add=False)
        return grad

    def _pack(self, parts: Sequence[Array], kept: Array) -> Array:
        """Return what travels of each part, (number of parts, bytes); what is lost goes into the rows of `kept`."""
        num_parts, room = kept.shape
        messages = xp_of(kept).empty((num_parts, self._format.packed_bytes(room)), np.uint8)
        for part, missing, message in zip(parts, kept, messages, strict=True):
            self._format.pack(part, missing, message)
        return messages
