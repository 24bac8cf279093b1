"""Collectives of GPU arrays through NCCL, beside the calls of the computation; everything else as another communicator.

    current stream   ...kernels that write the array... |      ...kernels...      | wait() | kernels that read it
    NCCL's stream                                       `-> allreduce ------------------'

No host waits: an operation begins on a stream of its own when the current stream has come to where it was called, and
`wait()` lets the current stream go on when it is done. So buckets travel while the backward computes, and all of it can
be captured in a CUDA graph. Host arrays, objects, point-to-point messages (NCCL has no tags), and what NCCL does not
reduce as the contract says, go through the communicator that this one is made of.

Source: NVIDIA, NCCL documentation, "Collective Communication Functions" and "Using NCCL with CUDA Graphs".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from distributed.comm.communicator import Communicator
from distributed.comm.reduction import ReduceOp, divide_mean, is_comparison
from distributed.comm.transfer import as_bytes
from distributed.comm.work import Array, Work
from minigrad.backend import address, cupy, gpu_bus_id, is_half, nccl_module, xp_of

_HIGHEST_PRIORITY = -5  # or the nearest that there is
_SUM, _AVERAGE = 0, 4  # the second multiplies each value by 1 / size, then adds up
_UINT8 = 1
_DTYPES = {"int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "float32": 7, "float64": 8}
_AVERAGED = ("float32", "float64")
_COLLECTIVES = ("broadcast", "allreduce", "reduce_scatter", "allgather", "all_to_all")


def with_nccl(comm: Communicator) -> Communicator:
    """Let collectives of GPU arrays go through NCCL.

    Returns `comm` itself where ranks share a GPU or lack NCCL. Collective. Every rank has made the GPU that it uses the
    current one.
    """
    devices = comm.gather_objects(gpu_bus_id() if nccl_module() is not None else None)
    if comm.size == 1 or None in devices or len(set(devices)) < comm.size:
        return comm
    return NCCLCommunicator(comm)


class NCCLCommunicator(Communicator):
    """A communicator over another one of the same ranks, each with its own GPU.

    Making one is collective.
    """

    def __init__(self, host: Communicator) -> None:
        super().__init__(host.rank, host.size, max_message_elements=host.max_message_elements)
        self._host = host
        self._wait_contexts = host._wait_contexts  # what waits here waits there
        self._cp = cupy()
        nccl = nccl_module()
        unique_id = host.broadcast_object(nccl.get_unique_id() if host.rank == 0 else None)
        self._nccl = nccl.NcclCommunicator(host.size, unique_id, host.rank)
        # Never ended but with the process: ncclCommDestroy waits for other ranks, and for ever where it is in a graph.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._nccl))
        self._group = (nccl.groupStart, nccl.groupEnd)
        self._version = nccl.get_version()
        # Before all else: a reduction needs few of the multiprocessors, but would wait for kernels that fill them all.
        self._stream = self._cp.cuda.Stream(non_blocking=True, priority=_HIGHEST_PRIORITY)
        self._unfinished: list[_StreamWork] = []  # keeps arrays that NCCL reads and writes

    @property
    def library(self) -> str:
        major, minor = divmod(self._version // 100, 100)
        return f"{self._host.library} and NCCL {major}.{minor}"

    @property
    def max_tag(self) -> int:
        return self._host.max_tag

    @property
    def waited_seconds(self) -> float:
        return self._host.waited_seconds

    def gather_objects(self, obj: object) -> list[Any]:
        return self._host.gather_objects(obj)

    def barrier(self) -> None:
        self._host.barrier()

    def progress(self) -> None:
        self._host.progress()

    def abort(self, message: str) -> NoReturn:
        self._host.abort(message)

    def _split(self, color: int, key: int) -> Communicator:
        part = self._host.split(color, key)
        return NCCLCommunicator(part) if part.size > 1 else part

    def _buffer(self, num_elements: int, dtype: np.dtype[Any]) -> Array:
        return self._host._buffer(num_elements, dtype)

    def _reads_gpu_memory(self, call: str) -> bool:
        return call in _COLLECTIVES

    def _finish_writing(self, array: Array) -> None:
        """Wait for nothing: the stream of an operation waits for what writes its array."""

    # Collectives.

    def _broadcast(self, array: Array, root: int) -> Work:
        if xp_of(array) is np:
            return self._host._broadcast(array, root)
        pointer = address(array)
        return self._start(
            array, lambda stream: self._nccl.broadcast(pointer, pointer, array.nbytes, _UINT8, root, stream)
        )

    def _allreduce(self, array: Array, op: ReduceOp) -> Work:
        if xp_of(array) is np:
            return self._host._allreduce(array, op)
        if not _is_reduced(array, op):
            return self._host.allreduce(array, op=op)

        def reduce(stream: int) -> None:
            total = array.astype(np.float32) if is_half(array.dtype) else array
            pointer, dtype = address(total), _DTYPES[total.dtype.name]
            self._nccl.allReduce(pointer, pointer, total.size, dtype, _SUM, stream)
            divide_mean(total, array, op, self.size)

        return self._start(array, reduce)

    def average(self, array: Array) -> Work:
        if array.dtype.name not in _AVERAGED or xp_of(array) is np or not array.flags.c_contiguous:
            return super().average(array)
        pointer, dtype = address(array), _DTYPES[array.dtype.name]
        return self._start(
            array, lambda stream: self._nccl.allReduce(pointer, pointer, array.size, dtype, _AVERAGE, stream)
        )

    def _reduce_scatter(self, flat: Array, op: ReduceOp) -> Work:
        if xp_of(flat) is np:
            return self._host._reduce_scatter(flat, op)
        if not _is_reduced(flat, op):
            return self._host.reduce_scatter(flat, op=op)
        count = flat.size // self.size
        own = flat[self.rank * count : (self.rank + 1) * count]

        def reduce(stream: int) -> None:
            total = flat.astype(np.float32) if is_half(flat.dtype) else flat
            mine = total[self.rank * count : (self.rank + 1) * count]
            dtype = _DTYPES[total.dtype.name]
            self._nccl.reduceScatter(address(total), address(mine), count, dtype, _SUM, stream)
            divide_mean(mine, own, op, self.size)

        return self._start(own, reduce, flat)

    def _allgather(self, array: Array) -> Work:
        if xp_of(array) is np:
            return self._host._allgather(array)
        gathered = self._cp.empty((self.size, *array.shape), array.dtype)

        def gather(stream: int) -> None:
            self._nccl.allGather(address(array), address(gathered), array.nbytes, _UINT8, stream)

        return self._start(gathered, gather, array)

    def _all_to_all(self, array: Array) -> Work:
        if xp_of(array) is np:
            return self._host._all_to_all(array)
        received = self._cp.empty_like(array)
        sent_bytes, received_bytes = (as_bytes(a).reshape(self.size, -1) for a in (array, received))

        def exchange(stream: int) -> None:
            start_group, end_group = self._group
            start_group()
            for rank in range(self.size):
                count = sent_bytes.shape[1]
                self._nccl.send(address(sent_bytes[rank]), count, _UINT8, rank, stream)
                self._nccl.recv(address(received_bytes[rank]), count, _UINT8, rank, stream)
            end_group()

        return self._start(received, exchange, array)

    # Messages carry a tag, which NCCL does not know: they go by way of the host.

    def _isend(self, array: Array, dest: int, tag: int) -> Work:
        return self._host._isend(array, dest, tag)

    def _irecv(self, array: Array, source: int, tag: int) -> Work:
        return self._host._irecv(array, source, tag)

    def _start(self, result: Array, launch: Callable[[int], None], read: Array | None = None) -> Work:
        """Launch an operation on NCCL's stream, after what the current stream has to do already."""
        current = self._cp.cuda.get_current_stream()
        self._stream.wait_event(current.record())
        if result.size:
            with self._stream:
                launch(self._stream.ptr)
        work = _StreamWork(self._cp, result, read, self._stream.record())
        if not self._cp.cuda.runtime.streamIsCapturing(current.ptr):
            self._unfinished = [other for other in self._unfinished if not other.is_over()]
        self._unfinished.append(work)
        return work


class _StreamWork(Work):
    """An operation on NCCL's stream."""

    def __init__(self, cp: Any, result: Array, read: Array | None, done: Any) -> None:
        self._cp = cp
        self._result = result
        self._read = read
        self._done = done

    def wait(self) -> Array:
        """Let the current stream wait; the host goes on."""
        self._cp.cuda.get_current_stream().wait_event(self._done)
        return self._result

    def test(self) -> bool:
        return self.is_over()

    def is_over(self) -> bool:
        """Return whether the GPU is done with it."""
        return bool(self._done.done)


def _is_reduced(array: Array, op: ReduceOp) -> bool:
    """Return whether NCCL reduces this as the contract says: nan wins no minimum there, and small integers it lacks."""
    return not is_comparison(op) and (is_half(array.dtype) or array.dtype.name in _DTYPES)
