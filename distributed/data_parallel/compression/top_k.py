"""Top-k: of each bucket only the largest numbers are sent, with error feedback.

    own gradients + kept    | .  7  .  .  -9  .  . |    the k largest, with their places; all others are kept
           allgather        places and values of all ranks
    every rank              adds them up in rank order: the same bits everywhere

A rank sends (size - 1) k (4 + b) bytes a bucket, for numbers of b bytes: this is for few ranks.

Source: Stich, Cordonnier and Jaggi 2018 (arXiv 1809.07599), algorithm 1 (memory); Aji and Heafield 2017
(arXiv 1704.05021), who send one gradient in a hundred.
"""

from __future__ import annotations

import numpy as np

from distributed.comm.communicator import Array, Communicator
from distributed.comm.sequence import MessageSteps, Turn
from distributed.data_parallel.compression.feedback import FeedbackHook, own_buffer
from minigrad.backend import xp_of
from minigrad.flat_range import FlatRange
from minigrad.nn import Buffer


class TopK(FeedbackHook):
    """A comm hook that sends a bucket's largest gradients, and keeps the others.

    What is kept is added in the next step. Where a gradient of a bucket is not finite, some of the bucket arrives as
    nan.

    Args:
        share: of a bucket's numbers that is sent, at least one; a hundredth by default.

    Raises:
        ValueError: share is not above 0 and at most 1.
    """

    def __init__(self, share: float = 0.01) -> None:
        super().__init__()
        if not 0 < share <= 1:
            raise ValueError(f"the share of gradients that is sent must be above 0 and at most 1, got {share}")
        self._share = share

    def _new_memory(self, part: FlatRange, rank: int, size: int) -> list[Buffer]:
        return [own_buffer(part, "error", (part.stop - part.start,), rank, size)]

    def _steps(self, grad: Array, part: FlatRange, kept: list[Buffer], comm: Communicator, turn: Turn) -> MessageSteps:
        (error,) = kept
        xp = xp_of(grad)
        grad += error.data
        num_sent = max(1, round(self._share * grad.size))
        chosen = xp.argpartition(abs(grad), grad.size - num_sent)[grad.size - num_sent :]
        values = grad[chosen]
        if xp.isfinite(grad).all():
            error.data = grad.copy()
            error.data[chosen] = 0
        else:
            values[...] = np.nan
            error.data = xp.zeros_like(grad)
        places = chosen.astype(np.int32 if grad.size < 2**31 else np.int64)
        message = xp.concatenate([places.view(np.uint8), values.view(np.uint8)])
        self.sent_bytes += (comm.size - 1) * message.nbytes
        rows = yield comm.allgather(message)
        grad[...] = 0
        for row in rows:
            their_places = row[: places.nbytes].view(places.dtype)
            grad[their_places] += row[places.nbytes :].view(values.dtype)
        return grad
