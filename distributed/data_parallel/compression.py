"""Comm hooks that send few bits, and keep what these do not say for the next step: error feedback.

    own gradients + kept    | slice 0 | slice 1 | slice 2 |     narrowed; what is lost is kept
                all_to_all      |          |         |
    rank r          sum of all ranks' slice r, + kept           narrowed once more; what is lost is kept here too
                 allgather  | slice 0 | slice 1 | slice 2 |     the same bits on every rank

Each rank adds up its own slice in rank order. With b bytes a number a rank sends 2 (size - 1) / size b bytes a
gradient, where an allreduce sends as many times its 4 or 8. Whatever is sent over some steps differs from the
gradients of these steps by what is kept at the end alone, so nothing is lost for good.

What is kept belongs in a checkpoint: `WithState` says how it gets there.

Source: Karimireddy et al. 2019 (arXiv 1901.09847), algorithm 2; both sides: Tang et al. 2019 (arXiv 1905.05957).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from distributed.comm.communicator import Array, Communicator, Work
from distributed.data_parallel.buckets import GradientBucketManager
from distributed.protocols import HasTensors
from minigrad.backend import xp_of
from minigrad.nn import Buffer
from minigrad.parameter import Parameter

# The largest value that is sent; a slice travels as multiples of its own largest one over this.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float16": 1.0, "bfloat16": 1.0}
_SCALE_BYTES = 4


class ErrorFeedback:
    """A comm hook that sends gradients in a narrow dtype, and keeps the difference for the next step.

        hook = ErrorFeedback("int8")
        ddp = DistributedDataParallel(model, comm, comm_hook=hook)
        hook.attach(ddp.buckets)
        checkpoints = Checkpointer(folder, comm, WithState(model, hook), optimizer)

    Where a slice is not finite, all of it arrives as nan, so that the step can be left out, and nothing of it is kept.

    Args:
        dtype: one of `LARGEST`; all but int8 and float16 need `ml_dtypes`.

    Attributes:
        sent_bytes, plain_bytes: what this rank has sent so far, and what allreduces of the gradients would have.

    Raises:
        ValueError: dtype is another one.
    """

    def __init__(self, dtype: str) -> None:
        if dtype not in LARGEST:
            raise ValueError(f"gradients can be sent as {', '.join(LARGEST)}, got {dtype!r}")
        self._dtype = np.dtype(dtype if dtype in ("int8", "float16") else _narrow_dtype(dtype))
        self._largest = LARGEST[dtype]
        self.sent_bytes = self.plain_bytes = 0
        self._kept: dict[int, tuple[Buffer, Buffer]] = {}  # by the place in memory that a bucket has for good

    def attach(self, manager: GradientBucketManager) -> None:
        """Make what is kept of each bucket, as zeros: once, before the first backward."""
        size, rank = manager.comm.size, manager.comm.rank
        for bucket in manager.buckets:
            grad, first = bucket.range.grad, bucket.range.params[0].name
            length = -(-grad.size // size)
            sides = {"sent": (size, length), "reduced": (length,)}
            sent, reduced = (
                Buffer(xp_of(grad).zeros(shape, grad.dtype), f"{first}.kept_{side}_{rank}_of_{size}")
                for side, shape in sides.items()
            )
            self._kept[_place(grad)] = sent, reduced

    def buffers(self) -> list[Buffer]:
        """Return what this rank keeps. It is of this number of ranks, and no other layout can load it."""
        return [buffer for pair in self._kept.values() for buffer in pair]

    def __call__(self, grad: Array, comm: Communicator) -> Work:
        if comm.size == 1:
            return comm.allreduce(grad)
        if _place(grad) not in self._kept:
            raise RuntimeError("ErrorFeedback keeps what it does not send: call hook.attach(ddp.buckets) once before")
        sent, reduced = self._kept[_place(grad)]
        rows = sent.data.copy()
        rows.reshape(-1)[: grad.size] += grad
        packed = self.narrowed(rows, sent)
        self.sent_bytes += 2 * packed.nbytes * (comm.size - 1) // comm.size
        self.plain_bytes += 2 * grad.nbytes * (comm.size - 1) // comm.size
        return _TwoPhases(self, comm.all_to_all(packed), grad, reduced, comm)

    def narrowed(self, rows: Array, kept: Buffer) -> Array:
        """Return (size, bytes) what travels of each row, and keep the rest."""
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
        """Return the rows that `narrowed` packed."""
        xp = xp_of(packed)
        codes = xp.ascontiguousarray(packed[:, :-_SCALE_BYTES]).view(self._dtype)
        scales = xp.ascontiguousarray(packed[:, -_SCALE_BYTES:]).view(np.float32)
        return codes.astype(dtype) * scales.astype(dtype)


class _TwoPhases(Work):
    """Slices on their way to the ranks that add them up. Their way back begins in `wait`, in the order of buckets."""

    def __init__(self, hook: ErrorFeedback, arriving: Work, grad: Array, kept: Buffer, comm: Communicator) -> None:
        self._hook, self._arriving, self._grad, self._kept, self._comm = hook, arriving, grad, kept, comm
        self._returning: Work | None = None
        self._done = False

    def test(self) -> bool:
        return self._done

    def wait(self) -> Array:
        if self._done:
            return self._grad
        if self._returning is None:
            parts = self._hook.widened(self._arriving.wait(), self._grad.dtype)
            total = self._kept.data.copy()
            for part in parts:
                total += part
            self._returning = self._comm.allgather(self._hook.narrowed(total[None], self._kept)[0])
        rows = self._hook.widened(self._returning.wait(), self._grad.dtype)
        self._grad[...] = rows.reshape(-1)[: self._grad.size]
        self._done = True
        return self._grad


class HasBuffers(Protocol):
    """A comm hook that keeps something, in buffers whose names no other rank has."""

    def buffers(self) -> Iterable[Buffer]: ...


class WithState:
    """A model together with what a comm hook keeps, for a Checkpointer: a run then goes on bit by bit."""

    def __init__(self, model: HasTensors, hook: HasBuffers) -> None:
        self._model, self._hook = model, hook

    def parameters(self) -> Iterable[Parameter]:
        return self._model.parameters()

    def buffers(self) -> list[Buffer]:
        return [*self._model.buffers(), *self._hook.buffers()]


def _place(grad: Any) -> int:
    return int(grad.ctypes.data if xp_of(grad) is np else grad.data.ptr)


def _narrow_dtype(name: str) -> Any:
    import ml_dtypes

    return getattr(ml_dtypes, name)
