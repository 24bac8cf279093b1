"""Error feedback: comm hooks that send less than a gradient, and keep what they have not said for the next step.

    own gradients + kept    --->    what is sent
                                    what is not: kept

Whatever is sent over some steps differs from the gradients of these steps by what is kept at the end alone, so nothing
is lost for good. How little is sent is each hook's own: few bits (`few_bits.py`), few columns (`low_rank.py`), few
numbers (`top_k.py`). What is kept belongs in a checkpoint: `WithState` says how it gets there.

Source: Karimireddy et al. 2019 (arXiv 1901.09847), algorithm 2.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, Self

import numpy as np

from distributed.comm.communicator import Array, Communicator, Work
from distributed.comm.sequence import MessageSteps, SequenceWork, Turn
from distributed.data_parallel.buckets.manager import GradientBucketManager
from distributed.protocols import HasTensors, Packs
from minigrad.backend import xp_of
from minigrad.flat_range import FlatRange
from minigrad.nn import Buffer
from minigrad.parameter import Parameter


class FeedbackHook(ABC):
    """A comm hook with a memory.

        hook = ErrorFeedback("int8")
        ddp = DistributedDataParallel(model, comm, comm_hook=hook)
        hook.attach(ddp.buckets)
        checkpoints = Checkpointer(folder, comm, WithState(model, hook), optimizer)

    Where gradients are not finite, what arrives is not either, so that the step can be left out, and nothing of it is
    kept.

    Attributes:
        sent_bytes, plain_bytes: what this rank has sent so far, and what allreduces of the gradients would have.
    """

    def __init__(self) -> None:
        self.sent_bytes = self.plain_bytes = 0
        self._held: dict[int, tuple[FlatRange, list[Buffer]]] = {}  # by the place that a bucket has in memory for good
        self._later: Communicator  # of the second message of a bucket
        self._rank, self._size = 0, 1
        self._last_turn: Turn | None = None

    def anew(self) -> Self:
        """Return a hook that sends as this one does, and has sent and kept nothing yet."""
        hook = copy.copy(self)
        FeedbackHook.__init__(hook)
        return hook

    def attach(self, manager: GradientBucketManager) -> None:
        """Make what is kept of each bucket: once, before the first backward. Collective."""
        self.attach_to([(bucket.range.grad, bucket.range) for bucket in manager.buckets], manager.comm)

    def attach_to(self, messages: Iterable[tuple[Array, FlatRange]], comm: Communicator) -> None:
        """Make what is kept of each message, as `attach` does of buckets. Collective.

        Args:
            messages: the memory that will be sent each time, and what it is of.
            comm: that it will be sent over.
        """
        self._later = comm.duplicate()
        self._rank, self._size = comm.rank, comm.size
        for array, part in messages if self._size > 1 else ():
            self._held[_place(array)] = part, self._new_memory(part, self._rank, self._size)

    def buffers(self) -> list[Buffer]:
        """Return what this rank keeps.

        It is of this number of ranks, and of these buckets.
        """
        return [buffer for _, kept in self._held.values() for buffer in kept]

    def forget(self) -> None:
        """Begin anew with what is kept, as before the first step."""
        for part, kept in self._held.values():
            for buffer, new in zip(kept, self._new_memory(part, self._rank, self._size), strict=True):
                buffer.data = new.data

    def state_dict(self) -> dict[str, int]:
        """Return what it has counted.

        What it keeps of gradients is in `buffers`.
        """
        return {"sent_bytes": self.sent_bytes, "plain_bytes": self.plain_bytes}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Count on from there."""
        self.sent_bytes, self.plain_bytes = state["sent_bytes"], state["plain_bytes"]

    def __call__(self, grad: Array, comm: Communicator) -> Work:
        if comm.size == 1 or not grad.size:
            return comm.allreduce(grad)
        held = self._held.get(_place(grad))
        if held is None:
            name = type(self).__name__
            raise RuntimeError(f"{name} keeps what it does not send: call hook.attach(ddp.buckets) once before")
        part, kept = held
        self.plain_bytes += allreduce_bytes(grad.nbytes, comm.size)
        return self._launch(grad, part, kept, comm)

    def _launch(self, grad: Array, part: FlatRange, kept: list[Buffer], comm: Communicator) -> Work:
        """Send a bucket on its way, by its steps, which move while this rank computes. See `_steps`."""
        run = comm.sequence if xp_of(grad) is np else SequenceWork  # a thread of MPI's knows of no stream of a GPU
        turn = self._last_turn = Turn(self._last_turn)
        turn.sequence = run(self._steps(grad, part, kept, comm, turn))
        return turn.sequence

    @abstractmethod
    def _new_memory(self, part: FlatRange, rank: int, size: int) -> list[Buffer]:
        """Return what a bucket has, before the first step: what a rank has of its own, by a name of its own."""

    @abstractmethod
    def _steps(self, grad: Array, part: FlatRange, kept: list[Buffer], comm: Communicator, turn: Turn) -> MessageSteps:
        """Put the sum over ranks into `grad`, about, and what is missing into `kept`.

        Args:
            grad: (n,) of a bucket.
            comm: of the first message.
            turn: comes before the second one, which goes through `self._later`.
        """

    def _count(self, message: Array, size: int) -> None:
        """Count what an allreduce of this costs, or an all_to_all of this and an allgather of as much."""
        self.sent_bytes += allreduce_bytes(message.nbytes, size)


def own_buffer(part: FlatRange, what: str, shape: tuple[int, ...], rank: int, size: int) -> Buffer:
    """Return zeros that this rank alone keeps of a message.

    Args:
        part: the message's parameters.
        what: it is, for its name.
        shape: of the zeros.
        rank, size: of this rank among those that reduce the message; in the name too.
    """
    data = part.data
    return Buffer(xp_of(data).zeros(shape, data.dtype), f"{part.params[0].name}.kept_{what}_{rank}_of_{size}")


class HasMemory(Protocol):
    """A comm hook that keeps something of its own, or `LocalSteps`."""

    def buffers(self) -> Iterable[Buffer]:
        """Return what is kept, each by a name that is the same wherever the same is kept."""
        ...

    def forget(self) -> None:
        """Begin anew, where a checkpoint has been loaded that has nothing for these."""
        ...


class WithState:
    """A model together with what a comm hook keeps, for a Checkpointer.

    With it a run goes on from a checkpoint bit by bit. Where a checkpoint is of another layout, or was saved without
    the hook, the hook begins anew.
    """

    def __init__(self, model: HasTensors, hook: HasMemory) -> None:
        self._model, self._hook = model, hook

    def parameters(self) -> Iterable[Parameter]:
        return self._model.parameters()

    def buffers(self) -> Iterable[Buffer]:
        return self._model.buffers()

    def memories(self) -> Iterable[Buffer]:
        return self._hook.buffers()

    def forget(self) -> None:
        self._hook.forget()

    def pack(self) -> None:
        if isinstance(self._hook, Packs):
            self._hook.pack()

    def unpack(self) -> None:
        if isinstance(self._hook, Packs):
            self._hook.unpack()


def allreduce_bytes(num_bytes: int, size: int) -> int:
    """Return what each rank sends where an allreduce sends least.

    Args:
        num_bytes: of the array.
        size: number of ranks.
    """
    return 2 * num_bytes * (size - 1) // size


def _place(grad: Any) -> int:
    return int(grad.ctypes.data if xp_of(grad) is np else grad.data.ptr)
