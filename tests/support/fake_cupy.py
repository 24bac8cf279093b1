"""A CuPy of NumPy arrays and threads: as much of it as copies, messages and reductions between ranks need.

A stream is a thread that does what it is told one after the other, so a send that nobody receives holds up all that
comes after it, as on a GPU; NCCL's calls make connections with both hosts, as NCCL does. The stream that computes does
everything at once, and where it waits for an event its host waits. Nothing waits for more than `PATIENCE` seconds.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

PATIENCE = 10.0
_UNIQUE_IDS = itertools.count()  # over all tests, as a communicator of one is not to be found by another


class ndarray(np.ndarray):  # noqa: N801  # CuPy's name
    """An array that only ranks of the fake know to be on a GPU."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])

    def get(self, stream: Any = None, out: Any = None) -> Any:
        """Copy to the host: now, or into `out` when the stream comes to it."""
        if out is None:
            return np.array(self)
        stream.enqueue(lambda: out.__setitem__(..., np.array(self)))
        return out

    def set(self, values: Any, stream: Any) -> None:
        """Copy when the stream comes to it, from memory that had better not have changed."""
        stream.enqueue(lambda: self.__setitem__(..., values))


def _on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: np.asarray(function(*args, **kwargs)).view(ndarray)


class Event:
    def __init__(self) -> None:
        self._happened = threading.Event()

    @property
    def done(self) -> bool:
        return self._happened.is_set()

    def happen(self) -> None:
        self._happened.set()

    def synchronize(self) -> None:
        self.wait()

    def wait(self) -> None:
        assert self._happened.wait(PATIENCE), "a stream waits for what never comes"


class ComputeStream:
    """The stream that is current by default."""

    ptr = 0

    def record(self) -> Event:
        event = Event()
        event.happen()
        return event

    def synchronize(self) -> None: ...

    def wait_event(self, event: Event) -> None:
        event.wait()


class Stream:
    """A stream beside it."""

    by_pointer: dict[int, Stream] = {}  # noqa: RUF012  # of this process, as pointers are
    _pointers = itertools.count(1)  # ranks are threads, and no two of them may get the same

    def __init__(self, **_: Any) -> None:
        self.ptr = next(Stream._pointers)
        Stream.by_pointer[self.ptr] = self
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._queue.get()()

    def enqueue(self, call: Callable[[], None]) -> None:
        self._queue.put(call)

    def record(self) -> Event:
        event = Event()
        self.enqueue(event.happen)
        return event

    def wait_event(self, event: Event) -> None:
        self.enqueue(event.wait)

    def synchronize(self) -> None:
        self.record().wait()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _World:
    """What the ranks of one NCCL communicator share."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.sent = {pair: queue.SimpleQueue[Any]() for pair in itertools.product(range(size), repeat=2)}
        self.arrays: list[Any] = [None] * size


class NcclCommunicator:
    worlds: dict[int, _World] = {}  # noqa: RUF012
    lock = threading.Lock()

    def __init__(self, size: int, unique_id: int, rank: int) -> None:
        with NcclCommunicator.lock:
            self._world = NcclCommunicator.worlds.setdefault(unique_id, _World(size))
        self._size, self._rank = size, rank
        self._is_connected = False
        self._world.barrier.wait()

    def send(self, pointer: int, count: int, dtype: int, dest: int, stream: int) -> None:
        self._connect()
        ours, taken = self._world.sent[self._rank, dest], Event()

        def run() -> None:
            ours.put((pointer, count, taken))
            taken.wait()

        Stream.by_pointer[stream].enqueue(run)

    def recv(self, pointer: int, count: int, dtype: int, source: int, stream: int) -> None:
        self._connect()
        theirs = self._world.sent[source, self._rank]

        def run() -> None:
            sent, size, taken = theirs.get(timeout=PATIENCE)
            assert size == count, "a message of another size would hang NCCL"
            ctypes.memmove(pointer, sent, count)
            taken.happen()

        Stream.by_pointer[stream].enqueue(run)

    def allReduce(self, source: int, dest: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._reduce(source, dest, slice(0, count), count, dtype, op)

    def reduceScatter(self, source: int, dest: int, count: int, dtype: int, op: int, stream: int) -> None:
        own = slice(self._rank * count, (self._rank + 1) * count)
        self._reduce(source, dest, own, count * self._size, dtype, op)

    def allGather(self, source: int, dest: int, count: int, dtype: int, stream: int) -> None:
        assert dtype == 1, "bytes"
        self._world.arrays[self._rank] = ctypes.string_at(source, count)
        self._world.barrier.wait()
        gathered = b"".join(self._world.arrays)
        self._world.barrier.wait()
        ctypes.memmove(dest, gathered, len(gathered))

    def _reduce(self, source: int, dest: int, own: slice, count: int, dtype: int, op: int) -> None:
        kind = np.dtype(["i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8"][dtype])
        values = np.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(source), kind)
        if op == 4:
            values = values * kind.type(1 / self._size)
        self._world.arrays[self._rank] = values.copy()
        self._world.barrier.wait()
        combine = {0: np.add, 2: np.fmax, 3: np.fmin, 4: np.add}[op]  # NCCL's maximum does not see nan
        total = self._world.arrays[0]
        for values in self._world.arrays[1:]:
            total = combine(total, values)
        self._world.barrier.wait()
        part = np.ascontiguousarray(total[own])
        ctypes.memmove(dest, part.ctypes.data, part.nbytes)

    def _connect(self) -> None:
        """Block both hosts in the first call between two, as NCCL does."""
        if self._size == 2 and not self._is_connected:
            self._world.barrier.wait()
            self._is_connected = True


def _on_stream(stream: int, call: Callable[[], None]) -> None:
    """Do it in a stream's turn, or at once in the one that computes."""
    call() if stream == ComputeStream.ptr else Stream.by_pointer[stream].enqueue(call)


class StreamFlags:
    """Words that streams write and wait for, as the driver's."""

    def wait(self, stream: int, at: int) -> None:
        def until_it_is_one() -> None:
            start = time.monotonic()
            while not ctypes.c_uint32.from_address(at).value:
                assert time.monotonic() < start + PATIENCE, "a stream waits for a word that nobody writes"
                time.sleep(1e-4)

        _on_stream(stream, until_it_is_one)

    def write(self, stream: int, at: int, value: int) -> None:
        _on_stream(stream, lambda: setattr(ctypes.c_uint32.from_address(at), "value", value))


class Runtime:
    """Calls of CUDA. All ranks are one process, where another's memory lies where it says.

    Attributes:
        is_capturing: whether streams say that what they are told becomes part of a graph. They do it at once.
        shares_memory, opens_memory: whether a rank can let others have its memory, and whether these can have it.
    """

    class CUDARuntimeError(RuntimeError):
        status = 0

    def __init__(self) -> None:
        self.is_capturing, self.shares_memory, self.opens_memory = False, True, True

    def streamIsCapturing(self, pointer: int) -> bool:
        return self.is_capturing

    def ipcGetMemHandle(self, pointer: int) -> bytes:
        if not self.shares_memory:
            raise Runtime.CUDARuntimeError
        return str(pointer).encode()

    def ipcOpenMemHandle(self, handle: bytes, flags: int) -> int:
        if not self.opens_memory:
            raise Runtime.CUDARuntimeError
        return int(handle)

    def memcpyAsync(self, target: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        _on_stream(stream, lambda: ctypes.memmove(target, source, num_bytes) and None)


def install(monkeypatch: Any) -> ModuleType:
    """Let this be CuPy for a test."""
    cupy, cuda, nccl = ModuleType("cupy"), ModuleType("cupy.cuda"), ModuleType("cupy.cuda.nccl")
    names = ("empty", "zeros", "ones", "full", "asarray", "empty_like", "where", "isnan")
    cupy.__dict__.update({name: _on_gpu(getattr(np, name)) for name in names}, ndarray=ndarray, cuda=cuda)
    cupy.__dict__.update(asnumpy=lambda array: np.array(array))
    nccl.__dict__.update(
        NcclCommunicator=NcclCommunicator,
        get_unique_id=lambda: next(_UNIQUE_IDS),
        get_version=lambda: 22800,
        available=True,
        groupStart=lambda: None,
        groupEnd=lambda: None,
    )
    compute = ComputeStream()
    cuda.__dict__.update(nccl=nccl, Stream=Stream, get_current_stream=lambda: compute, runtime=Runtime())
    cuda.__dict__.update(alloc_pinned_memory=bytearray, using_allocator=lambda allocator: nullcontext())
    monkeypatch.setattr("distributed.comm.nccl.communicator.StreamFlags", StreamFlags)
    monkeypatch.setattr("distributed.comm.nccl.mailboxes.MAILBOX_BYTES", 1 << 14)
    for module in (cupy, cuda, nccl):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return cupy
