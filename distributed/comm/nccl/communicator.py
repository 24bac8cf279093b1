"""Collectives and messages of GPU arrays through NCCL, beside the calls of the computation.

No host waits: an operation begins on a stream of its own when the current stream has come to where it was called, and
`wait()` lets the current stream go on when it is done (`side_stream.py`). So buckets travel while the backward
computes, and all of it can be captured in a CUDA graph. Host arrays and objects go through the communicator that this
one is made of, and so do messages between ranks that nobody has connected: see `messages.py`.

A maximum of floats is one of integers in their order, where nan is on top: NCCL's own would let a number win.

Source: NVIDIA, NCCL documentation, "Collective Communication Functions" and "Using NCCL with CUDA Graphs".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np

from distributed.comm.communicator import Communicator
from distributed.comm.nccl.messages import NCCLMessages, new_nccl
from distributed.comm.nccl.side_stream import SideStream
from distributed.comm.nccl.stream_flags import StreamFlags
from distributed.comm.reduction import ReduceOp, divide_mean, is_comparison
from distributed.comm.transfer import as_bytes
from distributed.comm.work import Array, JoinedWork, Work
from minigrad.backend import address, cupy, gpu_bus_id, is_half, nccl_module, widened, xp_of

_SUM, _MAX, _MIN, _AVERAGE = 0, 2, 3, 4  # the last multiplies each value by 1 / size, then adds up
_OPS = {ReduceOp.SUM: _SUM, ReduceOp.MEAN: _SUM, ReduceOp.MAX: _MAX, ReduceOp.MIN: _MIN}
_UINT8 = 1
_DTYPES = {"int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "float32": 7, "float64": 8}
_BITS: dict[str, Any] = {"float32": np.int32, "float64": np.int64}
_AVERAGED = ("float32", "float64")
_CALLS = ("broadcast", "allreduce", "reduce_scatter", "allgather", "all_to_all", "isend", "irecv")


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
        self._nccl = self._new_nccl()
        self._group = (nccl.groupStart, nccl.groupEnd)
        self._version = nccl.get_version()
        self._stream = SideStream(self._cp)
        self._gathers: tuple[Any, SideStream] | None = None  # in place: not behind the reductions that are under way
        self._messages: NCCLMessages | None = None

    @property
    def survives(self) -> bool:
        return self._host.survives

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
        if self._messages is not None:
            self._messages.progress()

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        wanted = self._host.gather_objects(sorted(set(pairs)))
        if any(other != wanted[0] for other in wanted):
            raise ValueError(f"connect needs the same pairs on every rank, got {wanted} by rank")
        if self._messages is not None:
            raise RuntimeError("connect() may be called once of a communicator: duplicate() it for other pairs")
        between = [(source, dest) for source, dest in wanted[0] if source != dest]
        flags = StreamFlags()
        self._messages = NCCLMessages(self._host, between, cp=self._cp, nccl=nccl_module(), flags=flags)

    def abort(self, message: str) -> NoReturn:
        self._host.abort(message)

    def _split(self, color: int, key: int) -> Communicator:
        part = self._host.split(color, key)
        return NCCLCommunicator(part) if part.size > 1 else part

    def _buffer(self, num_elements: int, dtype: np.dtype[Any]) -> Array:
        return self._host._buffer(num_elements, dtype)

    def stage_reductions(self) -> None:
        self._host.stage_reductions()

    def _reads_gpu_memory(self, call: str) -> bool:
        return call in _CALLS

    def _finish_writing(self, array: Array) -> None:
        """Wait for nothing: the stream of an operation waits for what writes its array."""

    # Collectives.

    def _broadcast(self, array: Array, root: int) -> Work:
        if xp_of(array) is np:
            return self._host._broadcast(array, root)
        pointer = address(array)
        return self._stream.start(
            array, lambda stream: self._nccl.broadcast(pointer, pointer, array.nbytes, _UINT8, root, stream)
        )

    def _allreduce(self, array: Array, op: ReduceOp) -> Work:
        if xp_of(array) is np:
            return self._host._allreduce(array, op)

        def reduce(stream: int) -> None:
            total = _as_reduced(array, op)
            pointer, dtype = address(total), _DTYPES[total.dtype.name]
            self._nccl.allReduce(pointer, pointer, total.size, dtype, _OPS[op], stream)
            _land(total, array, op, self.size)

        return self._stream.start(array, reduce)

    def average(self, array: Array, *, everywhere: bool = True) -> Work:
        if array.dtype.name not in _AVERAGED or xp_of(array) is np or not array.flags.c_contiguous:
            return super().average(array, everywhere=everywhere)
        pointer, dtype = address(array), _DTYPES[array.dtype.name]
        if everywhere:
            return self._stream.start(
                array, lambda stream: self._nccl.allReduce(pointer, pointer, array.size, dtype, _AVERAGE, stream)
            )
        self._check_slices("average", array)
        own = array[self._own_slice(array)]
        return self._stream.start(
            own,
            lambda stream: self._nccl.reduceScatter(pointer, address(own), own.size, dtype, _AVERAGE, stream),
            array,
        )

    def _reduce_scatter(self, flat: Array, op: ReduceOp) -> Work:
        if xp_of(flat) is np:
            return self._host._reduce_scatter(flat, op)
        own = flat[self._own_slice(flat)]

        def reduce(stream: int) -> None:
            total = _as_reduced(flat, op)
            mine, dtype = total[self._own_slice(total)], _DTYPES[total.dtype.name]
            self._nccl.reduceScatter(address(total), address(mine), mine.size, dtype, _OPS[op], stream)
            _land(mine, own, op, self.size)

        return self._stream.start(own, reduce, flat)

    def _allgather(self, array: Array) -> Work:
        if xp_of(array) is np:
            return self._host._allgather(array)
        gathered = self._cp.empty((self.size, *array.shape), array.dtype)

        def gather(stream: int) -> None:
            self._nccl.allGather(address(array), address(gathered), array.nbytes, _UINT8, stream)

        return self._stream.start(gathered, gather, array)

    def _allgather_in_place(self, flats: Sequence[Array]) -> Work:
        return self._host._allgather_in_place(flats)  # of the host: others are no plain arrays

    def _gathered_into(self, flats: Sequence[Array]) -> Work:
        if any(xp_of(flat) is np for flat in flats):
            return super()._gathered_into(flats)

        if self._gathers is None:
            self._gathers = self._new_nccl(), SideStream(self._cp)
        nccl, side_stream = self._gathers
        full = [flat for flat in flats if flat.size] or flats[:1]

        def gather(stream: int) -> None:
            start_group, end_group = self._group
            start_group()
            for flat in full:
                own = flat[self._own_slice(flat)]
                nccl.allGather(address(own), address(flat), own.nbytes, _UINT8, stream)
            end_group()

        work = side_stream.start(full[0], gather, flats)
        return work if full[0] is flats[0] else JoinedWork([work], lambda _: flats[0])

    def _new_nccl(self) -> Any:
        """Make NCCL's communicator of these ranks. Collective."""
        nccl = nccl_module()
        unique_id = self._host.broadcast_object(nccl.get_unique_id() if self.rank == 0 else None)
        return new_nccl(nccl, self.size, unique_id, self.rank)

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

        return self._stream.start(received, exchange, array)

    # Messages. Both ends know who is connected, and go the same way.

    def _isend(self, array: Array, dest: int, tag: int) -> Work:
        if self._messages is not None and self._messages.connects(self.rank, dest):
            return self._messages.isend(array, dest, tag)
        return self._host.isend(array, dest=dest, tag=tag)

    def _irecv(self, array: Array, source: int, tag: int) -> Work:
        if self._messages is not None and self._messages.connects(source, self.rank):
            return self._messages.irecv(array, source, tag)
        return self._host.irecv(array, source=source, tag=tag)


def _as_reduced(array: Array, op: ReduceOp) -> Array:
    """Return the array as NCCL reduces it, itself where it can: halves and short integers wider, floats compared."""
    wide = widened(array)
    if wide.dtype.name not in _DTYPES:
        wide = wide.astype(np.int32)
    if not is_comparison(op) or wide.dtype.kind != "f":
        return wide
    beyond = np.iinfo(_BITS[wide.dtype.name])
    keys = _in_order(wide.view(beyond.dtype))
    xp = xp_of(array)
    return xp.where(xp.isnan(wide), keys.dtype.type(beyond.max if op is ReduceOp.MAX else beyond.min), keys)


def _land(total: Array, out: Array, op: ReduceOp, size: int) -> None:
    """Write what NCCL has made of `_as_reduced` into `out`."""
    if is_comparison(op) and out.dtype.kind not in "iu":
        total = _in_order(total).view(np.float32 if is_half(out.dtype) else out.dtype)
    divide_mean(total, out, op, size)


def _in_order(bits: Array) -> Array:
    """Return integers in the order of the floats with these bits; the same again gives the bits back."""
    last = bits.itemsize * 8 - 1
    return bits ^ ((bits >> last) & np.iinfo(bits.dtype).max)
