"""Gradients in few bits: int8, float8, float16 or bfloat16, with error feedback on both ways.

    own gradients + kept    | slice 0 | slice 1 | slice 2 |     narrowed; what is lost is kept
                all_to_all      |          |         |
    rank r          sum of all ranks' slice r, + kept           narrowed once more; what is lost is kept here too
                 allgather  | slice 0 | slice 1 | slice 2 |     the same bits on every rank

Each rank adds up its own slice in rank order. With b bytes a number a rank sends 2 (size - 1) / size b bytes a
gradient, where an allreduce sends as many times its 4 or 8.

Numbers go in blocks of at most 256 with a scale each, four bytes: gradients of a gain and of a matrix may lie in one
slice, and with one scale the smaller ones would all be rounded to nothing.

Source: Tang et al. 2019 (arXiv 1905.05957), whose "double squeeze" has error feedback on both ways; Dettmers et al.
2022 (arXiv 2110.02861), section 2.1: blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distributed.comm.communicator import Array, Communicator
from distributed.comm.sequence import MessageSteps, Turn
from distributed.data_parallel.compression.feedback import FeedbackHook, own_buffer
from minigrad.backend import xp_of
from minigrad.extras import needs
from minigrad.flat import FlatRange
from minigrad.nn import Buffer

# The largest value that is sent; a block travels as multiples of its own largest one over this.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float16": 1.0, "bfloat16": 1.0}
MOST_IN_BLOCK = 256  # numbers


class ErrorFeedback(FeedbackHook):
    """A comm hook that sends gradients in a narrow dtype, and keeps the difference.

    What is kept is added in the next step. Where a number is not finite, all of its block arrives as nan.

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
        num_blocks, block = _blocks(-(-(part.stop - part.start) // size))
        shapes = {"sent": (size, num_blocks, block), "reduced": (1, num_blocks, block)}
        return [own_buffer(part, what, shape, rank, size) for what, shape in shapes.items()]

    def _steps(self, grad: Array, part: FlatRange, kept: list[Buffer], comm: Communicator, turn: Turn) -> MessageSteps:
        sent, reduced = kept
        rows = sent.data.copy()
        rows.reshape(-1)[: grad.size] += grad
        packed = self.narrowed(rows, sent)
        self._count(packed, comm.size)
        parts = self.widened((yield comm.all_to_all(packed)), rows)
        total = reduced.data.copy()
        for row in parts:
            total += row
        packed = self.narrowed(total, reduced)[0]
        yield turn
        turn.take()
        rows = self.widened((yield self._later.allgather(packed)), rows)
        grad[...] = rows.reshape(-1)[: grad.size]
        return grad

    def narrowed(self, rows: Array, kept: Buffer) -> Array:
        """Return what travels of each row, (number of rows, bytes), and keep the rest.

        Args:
            rows: (number of rows, number of blocks, n), each block scaled by itself.
            kept: as many numbers; overwritten with what does not travel.
        """
        xp = xp_of(rows)
        scales = xp.maximum(rows.max(axis=2), -rows.min(axis=2))
        scales = (scales / self._largest).astype(np.float32)
        is_broken = ~xp.isfinite(scales)
        steps = xp.where(is_broken | (scales == 0), 1, scales).astype(np.float32)
        if is_broken.any():
            rows = xp.where(is_broken[:, :, None], 0, rows)
        wide_steps = steps.astype(rows.dtype)[:, :, None]
        scaled = rows / wide_steps
        codes = (xp.rint(scaled, out=scaled) if self._dtype.kind == "i" else scaled).astype(self._dtype)
        said = codes.astype(rows.dtype)
        said *= wide_steps
        kept.data = xp.subtract(rows, said, out=said)
        steps[is_broken] = np.nan
        num_rows = len(rows)
        return xp.concatenate([codes.reshape(num_rows, -1).view(np.uint8), steps.view(np.uint8)], axis=1)

    def widened(self, packed: Array, like: Array) -> Array:
        """Return the rows that `narrowed` packed.

        Args:
            packed: (number of rows, bytes).
            like: (any number of rows, number of blocks, n), of the dtype of the result.
        """
        xp = xp_of(packed)
        _, num_blocks, block = like.shape
        num_code_bytes = num_blocks * block * self._dtype.itemsize
        codes = xp.ascontiguousarray(packed[:, :num_code_bytes]).view(self._dtype)
        scales = xp.ascontiguousarray(packed[:, num_code_bytes:]).view(np.float32)
        rows = codes.reshape(len(packed), num_blocks, block).astype(like.dtype)
        rows *= scales.astype(like.dtype)[:, :, None]
        return rows


def _blocks(length: int) -> tuple[int, int]:
    """Return into how many blocks so many numbers are cut, and how many each has.

    They are as few and as even as can be.
    """
    num_blocks = -(-length // MOST_IN_BLOCK)
    return num_blocks, -(-length // num_blocks)


def _narrow_dtype(name: str) -> Any:
    try:
        import ml_dtypes
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(needs(name, "ml_dtypes", "bfloat16")) from error

    return getattr(ml_dtypes, name)
