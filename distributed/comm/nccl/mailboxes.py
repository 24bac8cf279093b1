"""Messages of a captured step into memory of the rank that receives them, by the copy engines of the GPUs.

A kernel of NCCL waits where it runs: a receive that is posted before its message comes keeps multiprocessors from the
products beside it, and one of them is enough for these to take a turn more (a stage of GPT-2 124M on one H200: 1.07 to
1.14 times as long with one, 1.3 to 1.4 with sixteen). Here streams wait for a number in memory instead:

    source   side stream      wait free[k] -> free[k] = 0 -> copy the array into the mailbox -> full[k] = 1
    dest     current stream   wait full[k] -> full[k] = 0 -> copy it into the array          -> free[k] = 1

Mailbox and `full` are memory of the dest, `free` is of the source, each opened by the other (CUDA's IPC), so both have
to be of one host. Every message of a captured step has a slot k of its own for as long as there is the mailbox: it
waits for no other message, only for the one of the step before to be taken. What does not fit in goes through NCCL.

Streams may share a queue of the hardware, in which one that waits holds up the others. So whatever this rank sends is
gone before its stream waits for a message: then a rank that waits for this one gets what it needs.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from distributed.comm.communicator import Communicator
from distributed.comm.nccl.side_stream import SideStream
from distributed.comm.nccl.stream_flags import StreamFlags
from distributed.comm.work import Array, Work
from minigrad.backend import address, outside_pools, synchronize

Pair = tuple[int, int]  # source, dest
MAILBOX_BYTES = 128 << 20  # of each direction between two ranks
NUM_SLOTS = 4096
_ALIGNMENT_BYTES = 256
# A handle stands for a whole allocation; smaller ones may be parts of one that other memory lies in, too.
_WHOLE_BYTES = 2 << 20
_COPY = 4  # cudaMemcpyDefault: by the addresses
_LAZILY = 1  # cudaIpcMemLazyEnablePeerAccess, the only way to open memory


class Slot(NamedTuple):
    """Where a message lies."""

    number: int
    offset: int  # in bytes, from the start of the mailbox


class Mailboxes:
    """The mailboxes of one rank: its own, of messages to it, and others', of its messages. Making them is collective.

    Args:
        host: the same ranks, by another way.
        pairs: source and dest of each direction, the same on every rank.
        cp: CuPy.
        flags: what streams wait with.
    """

    def __init__(self, host: Communicator, pairs: Iterable[Pair], *, cp: Any, flags: StreamFlags) -> None:
        self._cp, self._flags = cp, flags
        self._pushes: list[_Push] = []  # that nobody has waited for
        rank = host.rank
        memories: dict[Pair, Array] = {}
        for pair in sorted(pair for pair in pairs if rank in pair):
            with suppress(MemoryError):
                memories[pair] = self._new_memory(pair[0] == rank)
        handles: dict[Pair, bytes] = {}
        for pair, memory in memories.items():
            with suppress(cp.cuda.runtime.CUDARuntimeError):  # some systems share none
                handles[pair] = cp.cuda.runtime.ipcGetMemHandle(address(memory))
        told = host.gather_objects((platform.node(), handles))
        theirs: dict[Pair, int] = {}
        for pair in handles:
            node, others = told[sum(pair) - rank]
            at = self._opened(others.get(pair)) if node == platform.node() else None
            if at is not None and self._is_written(at + _probe(pair[0] != rank)):
                theirs[pair] = at
        host.barrier()  # all probes are there
        arrived = [pair for pair in theirs if int(memories[pair][_probe(pair[0] == rank) // 4]) == 1]
        reached = host.gather_objects(arrived)
        self._ends = {
            pair: _End(address(memories[pair]), at, SideStream(cp))
            for pair, at in theirs.items()
            if all(pair in reached[end] for end in pair)
        }

    def connects(self, pair: Pair) -> bool:
        """Return whether messages of this direction can go this way."""
        return pair in self._ends

    def send(self, array: Array, pair: Pair) -> tuple[Work, Slot] | None:
        """Start sending an array of the GPU, in a step that is being captured.

        Args:
            array: contiguous.
            pair: this rank, and the one that is told the slot.
        Returns:
            The work, and where the message will lie; None where there is no room for it.
        """
        end = self._ends[pair]
        slot = end.new_slot(array.nbytes)
        if slot is None:
            return None
        free, full = _at(end.own, slot), _at(end.other + MAILBOX_BYTES, slot)

        def push(stream: int) -> None:
            self._flags.wait(stream, free)
            self._flags.write(stream, free, 0)
            self._copy(end.other + slot.offset, address(array), array.nbytes, stream)
            self._flags.write(stream, full, 1)

        work = _Push(end.stream.start(array, push), self._pushes)
        return work, slot

    def receive(self, array: Array, pair: Pair, slot: Slot) -> Work:
        """Receive a message into an array of the GPU: when somebody waits for it."""
        return _Taken(self, array, self._ends[pair], slot)

    def take(self, array: Array, end: _End, slot: Slot) -> None:
        """Let the current stream wait for a message, and take it."""
        for push in [*self._pushes]:
            push.wait()
        stream = self._cp.cuda.get_current_stream().ptr
        full = _at(end.own + MAILBOX_BYTES, slot)
        self._flags.wait(stream, full)
        self._flags.write(stream, full, 0)
        self._copy(address(array), end.own + slot.offset, array.nbytes, stream)
        self._flags.write(stream, _at(end.other, slot), 1)

    def _copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._cp.cuda.runtime.memcpyAsync(target, source, num_bytes, _COPY, stream)

    def _new_memory(self, is_source: bool) -> Array:
        """Return the flags of a source, all free, or a dest's mailbox and flags, all empty.

        It is never given back: the other end, or a graph of it, may still write there.
        """
        memory = outside_pools((_WHOLE_BYTES if is_source else MAILBOX_BYTES + _WHOLE_BYTES) // 4, np.uint32)
        memory.fill(0)
        if is_source:
            memory[:NUM_SLOTS].fill(1)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        synchronize(memory)
        return memory

    def _opened(self, handle: Any) -> int | None:
        """Return where another process's memory is, or None if this one cannot have it."""
        runtime = self._cp.cuda.runtime
        try:
            return None if handle is None else int(runtime.ipcOpenMemHandle(handle, _LAZILY))
        except runtime.CUDARuntimeError:
            return None

    def _is_written(self, at: int) -> bool:
        """Write a 1 as messages do; return whether that can be done, which is not yet that it arrives."""
        stream = self._cp.cuda.get_current_stream()
        try:
            self._flags.write(stream.ptr, at, 1)
        except RuntimeError:
            return False
        stream.synchronize()
        return True


def _at(flags: int, slot: Slot) -> int:
    return flags + 4 * slot.number


def _probe(is_source: bool) -> int:
    """Return where, in the memory of this end, the other one writes to show that it can."""
    return (0 if is_source else MAILBOX_BYTES) + 4 * NUM_SLOTS


class _End:
    """One end of one direction.

    Args:
        own, other: where this rank's memory and the other's lie.
        stream: of a source's copies.
    """

    def __init__(self, own: int, other: int, stream: SideStream) -> None:
        self.own, self.other, self.stream = own, other, stream
        self._num_slots, self._used_bytes = 0, 0

    def new_slot(self, num_bytes: int) -> Slot | None:
        if not num_bytes or self._num_slots == NUM_SLOTS or self._used_bytes + num_bytes > MAILBOX_BYTES:
            return None
        slot = Slot(self._num_slots, self._used_bytes)
        self._num_slots += 1
        self._used_bytes += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return slot


class _Push(Work):
    """A message on its way into a mailbox; nobody waits for it as long as it is in a list of such."""

    def __init__(self, work: Work, unwaited: list[_Push]) -> None:
        self._work, self._unwaited = work, unwaited
        unwaited.append(self)

    def wait(self) -> Array:
        if self in self._unwaited:
            self._unwaited.remove(self)
        return self._work.wait()

    def test(self) -> bool:
        return self._work.test()

    @property
    def done_event(self) -> Any:
        return self._work.done_event


class _Taken(Work):
    """A message that lies in the mailbox, or will."""

    def __init__(self, mailboxes: Mailboxes, array: Array, end: _End, slot: Slot) -> None:
        self._mailboxes, self._array, self._end, self._slot = mailboxes, array, end, slot
        self._is_taken = False

    def wait(self) -> Array:
        if not self._is_taken:
            self._mailboxes.take(self._array, self._end, self._slot)
            self._is_taken = True
        return self._array

    def test(self) -> bool:
        return self._is_taken
