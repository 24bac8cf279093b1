"""Gradients in few bits: int8, float8, float16 or bfloat16, with error feedback on both ways.

    own gradients + kept    | slice 0 | slice 1 | slice 2 |     narrowed; what is lost is kept
                all_to_all      |          |         |
    rank r          sum of all ranks' slice r, + kept           narrowed once more; what is lost is kept here too
                 allgather  | slice 0 | slice 1 | slice 2 |     the same bits on every rank

Each rank adds up its own slice in rank order. With b bytes a number a rank sends 2 (size - 1) / size b bytes a
gradient, where an allreduce sends as many times its 4 or 8.

Source: Tang et al. 2019 (arXiv 1905.05957), whose "double squeeze" has error feedback on both ways.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distributed.comm.communicator import Array, Communicator
from distributed.comm.sequence import MessageSteps, Turn
from distributed.data_parallel.feedback import FeedbackHook, own_buffer
from minigrad.backend import xp_of
from minigrad.extras import needs
from minigrad.flat import FlatRange
from minigrad.nn import Buffer

# The largest value that is sent; a slice travels as multiples of its own largest one over this.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float16": 1.0, "bfloat16": 1.0}
_SCALE_BYTES = 4


class ErrorFeedback(FeedbackHook):
    """A comm hook that sends gradients in a narrow dtype, and keeps the difference.

    What is kept is added in the next step. Where a slice is not finite, all of it arrives as nan.

    Args:
        dtype: one of `LARGEST`; all but int8 and float16 need `ml_dtypes`.

    Raises:
        ValueError: dtype is another one.
    """

    def __init__(self, dtype: str) -> None:
        super().__init__()
        if dtype not in LARGEST:
            raise ValueError(f"gradients can be sent as {', '.join(LARGEST)}, got {dtype!r}")
        self._dtype = np.dtype(dtype if dtype in ("int8", "float16") else _narrow_dtype(dtype))
        self._largest = LARGEST[dtype]

    def _new_memory(self, part: FlatRange, rank: int, size: int) -> list[Buffer]:
        length = -(-(part.stop - part.start) // size)
        shapes: dict[str, tuple[int, ...]] = {"sent": (size, length), "reduced": (length,)}
        return [own_buffer(part, what, shape, rank, size) for what, shape in shapes.items()]

    def _steps(self, grad: Array, part: FlatRange, kept: list[Buffer], comm: Communicator, turn: Turn) -> MessageSteps:
        sent, reduced = kept
        rows = sent.data.copy()
        rows.reshape(-1)[: grad.size] += grad
        packed = self.narrowed(rows, sent)
        self._count(packed, comm.size)
        parts = self.widened((yield comm.all_to_all(packed)), grad.dtype)
        total = reduced.data.copy()
        for row in parts:
            total += row
        packed = self.narrowed(total[None], reduced)[0]
        yield turn
        turn.take()
        rows = self.widened((yield self._later.allgather(packed)), grad.dtype)
        grad[...] = rows.reshape(-1)[: grad.size]
        return grad

    def narrowed(self, rows: Array, kept: Buffer) -> Array:
        """Return what travels of each row, (number of rows, bytes), and keep the rest.

        Args:
            rows: (number of rows, n), each scaled by itself.
            kept: as many numbers; overwritten with what does not travel.
        """
        xp = xp_of(rows)
        scales = (abs(rows).max(axis=1, initial=0) / self._largest).astype(np.float32)
        broken = ~xp.isfinite(scales)
        steps = xp.where(broken | (scales == 0), 1, scales).astype(rows.dtype)[:, None]
        scaled = xp.where(broken[:, None], 0, rows / steps)
        limited = xp.clip(scaled, -self._largest, self._largest)
        codes = (xp.rint(limited) if self._dtype.kind == "i" else limited).astype(self._dtype)
        kept.data = xp.where(broken[:, None], 0, rows - codes.astype(rows.dtype) * steps).reshape(kept.shape)
        scales = xp.where(broken, np.nan, steps[:, 0]).astype(np.float32)
        return xp.concatenate([codes.view(np.uint8), scales[:, None].view(np.uint8)], axis=1)

    def widened(self, packed: Array, dtype: Any) -> Array:
        """Return the rows that `narrowed` packed.

        Args:
            packed: (number of rows, bytes).
            dtype: of the result.
        """
        xp = xp_of(packed)
        codes = xp.ascontiguousarray(packed[:, :-_SCALE_BYTES]).view(self._dtype)
        scales = xp.ascontiguousarray(packed[:, -_SCALE_BYTES:]).view(np.float32)
        return codes.astype(dtype) * scales.astype(dtype)


def _narrow_dtype(name: str) -> Any:
    try:
        import ml_dtypes
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(needs(name, "ml_dtypes", "bfloat16")) from error

    return getattr(ml_dtypes, name)
