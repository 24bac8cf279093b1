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

import numpy as np

from distributed.comm.communicator import Array, Communicator
from distributed.comm.sequence import MessageSteps, Turn
from distributed.data_parallel.compression.feedback import FeedbackHook, own_buffer
from distributed.data_parallel.compression.number_formats import number_format, room_for
from minigrad.backend import xp_of
from minigrad.flat_range import FlatRange
from minigrad.nn import Buffer


class ErrorFeedback(FeedbackHook):
    """A comm hook that sends gradients in a narrow format, and keeps the difference.

    What is kept is added in the next step. Where a number is not finite, all of its block arrives as nan.

    Args:
        dtype: one of `NUMBER_FORMATS`; all but int8, int4 and float16 need `ml_dtypes`.

    Raises:
        ValueError: dtype is another one.
    """

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self._format = number_format(dtype)

    def _new_memory(self, part: FlatRange, rank: int, size: int) -> list[Buffer]:
        num_slices = size if size > 2 else 1
        room = room_for(-(-(part.stop - part.start) // num_slices))
        sent = own_buffer(part, "sent", (num_slices, room), rank, size)
        return [sent] if num_slices == 1 else [sent, own_buffer(part, "reduced", (room,), rank, size)]

    def _steps(self, grad: Array, part: FlatRange, kept: list[Buffer], comm: Communicator, turn: Turn) -> MessageSteps:
        sent = kept[0].data
        num_slices, room = sent.shape
        length = -(-grad.size // num_slices)
        slices = [grad[i * length : (i + 1) * length] for i in range(num_slices)]
        messages = xp_of(grad).empty((num_slices, self._format.packed_bytes(room)), np.uint8)
        for its, missing, message in zip(slices, sent, messages, strict=True):
            self._format.pack(its, missing, message)
        self._count(messages, comm.size)
        if num_slices == 1:
            rows = yield comm.allgather(messages[0])
            self._format.unpack(rows[1 - comm.rank], room, grad, add=True)  # a + b is b + a: the same bits on both
            return grad
        total, message = xp_of(grad).empty(length, grad.dtype), messages[0]
        for i, row in enumerate((yield comm.all_to_all(messages))):
            self._format.unpack(row, room, total, add=i > 0)
        self._format.pack(total, kept[1].data, message)
        yield turn
        turn.take()
        for its, row in zip(slices, (yield self._later.allgather(message)), strict=True):
            self._format.unpack(row, room, its, add=False)
        return grad
