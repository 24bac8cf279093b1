"""Ranks as MPI processes; the only importer of mpi4py.

Arrays travel by mpi4py's upper-case calls, straight from their memory. MPI moves a non-blocking call only while the
process is inside some MPI call, so `progress()`, called between the ops of a backward, is what makes communication
overlap computation.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import re
import shutil
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, cast

import numpy as np
from mpi4py import MPI

from distributed.comm.communicator import MAX_MESSAGE_ELEMENTS, Communicator
from distributed.comm.progress import Engine, Operation, Steps
from distributed.comm.reduction import ReduceOp, finish, reduce_in_rank_order, widen
from distributed.comm.shared_memory import HEADER_BYTES, SharedBuffer, SharedWindow
from distributed.comm.transfer import as_bytes, describe_array, message_size_error
from distributed.comm.work import Array, Work

_OPS = {ReduceOp.SUM: MPI.SUM, ReduceOp.MEAN: MPI.SUM, ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX}
_ABORT_SECONDS = 5.0
_SHARED_MEMORY_FOLDER = "/dev/shm"  # where MPI libraries on Linux put the windows that ranks share
_GPU_CALLS = ("broadcast", "allreduce", "isend", "irecv")  # those that work in place, with nothing of ours in between


@dataclass(frozen=True)
class Settings:
    """How the communicators of a world behave; the same on every rank.

    Attributes:
        synchronous_sends: a send completes only once its receive is posted (Issend): shows who relies on buffering.
        deterministic: reductions sum in rank order, whatever MPI does. Few ranks on several hosts do so in any case.
        timeout_seconds: the longest single wait.
        progress_thread: a thread moves unfinished operations, so that nobody has to call progress().
        max_message_elements: what is longer goes in several messages.
        hosts: the host of each world rank; found out by default. Lets one host pass for several in a test.
    """

    synchronous_sends: bool = False
    deterministic: bool = False
    timeout_seconds: float = 600.0
    progress_thread: bool = False
    max_message_elements: int = MAX_MESSAGE_ELEMENTS
    hosts: Sequence[str] | None = None


def mpi_world(settings: Settings) -> MPICommunicator:
    """Return the communicator of all ranks, and make an uncaught exception on any of them end the job. Collective."""
    abort_on_uncaught_exception()
    if settings.hosts is None:
        settings = replace(settings, hosts=_hosts())
    return MPICommunicator(MPI.COMM_WORLD, settings)


def _hosts() -> list[str]:
    """Return the name of each world rank's host: its first rank there, since names of hosts may repeat. Collective."""
    part = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    name = part.bcast(f"host of rank {MPI.COMM_WORLD.Get_rank()}")
    part.Free()
    return MPI.COMM_WORLD.allgather(name)


class MPICommunicator(Communicator):
    """A communicator over an mpi4py one.

    It duplicates the one it is given, once, here, so that its messages never meet those of the caller: making one is
    collective.

    Args:
        comm: an intracommunicator.
        engine: of the family that this one belongs to, so that one progress() moves all of it; a new one by default.
    Raises:
        ValueError: a setting is out of range.
        RuntimeError: settings.progress_thread with an MPI that allows only one thread.
    """

    def __init__(self, comm: MPI.Comm, settings: Settings | None = None, *, engine: Engine | None = None) -> None:
        settings = settings or Settings()
        super().__init__(comm.Get_rank(), comm.Get_size(), max_message_elements=settings.max_message_elements)
        self._settings = settings
        self._engine = engine or _new_engine(settings)
        self._comm = comm.Dup()
        self._members = MPI.Group.Translate_ranks(comm.Get_group(), None, MPI.COMM_WORLD.Get_group())
        # Below 4 ranks Open MPI's Iallreduce reduces to one rank and broadcasts: twice the bytes of an exchange.
        far_apart = settings.hosts is not None and len({settings.hosts[rank] for rank in self._members}) > 1
        self._in_rank_order = settings.deterministic or (far_apart and self.size < 4)
        # Each phase of a sum in rank order has its own duplicate: ranks may reach the phases of two sums in any order.
        self._exchange = comm.Dup() if self._in_rank_order else self._comm
        self._gather = comm.Dup() if self._in_rank_order else self._comm
        self._num_sums = 0
        self._num_gathers = 0
        self._max_tag = cast(int, MPI.COMM_WORLD.Get_attr(MPI.TAG_UB))
        self._label = "" if self.size == MPI.COMM_WORLD.Get_size() else f" among ranks {list(self._members)}"
        self._shared: list[SharedBuffer] = []

    @property
    def library(self) -> str:
        return short_name(MPI.Get_library_version())

    @property
    def max_tag(self) -> int:
        return self._max_tag

    @property
    def waited_seconds(self) -> float:
        return self._engine.wait_clock.seconds

    def gather_objects(self, obj: object) -> list[Any]:
        pickled = np.frombuffer(pickle.dumps(obj), np.uint8)
        with self.waiting_for("gather_objects"):
            sizes = self.allgather(np.array([pickled.size])).wait()[:, 0]
            padded = np.zeros(sizes.max(), np.uint8)
            padded[: pickled.size] = pickled
            rows = self.allgather(padded).wait()
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def barrier(self) -> None:
        self._start(_complete(self._comm.Ibarrier(), np.empty(0)), lambda: "barrier").wait()

    def progress(self) -> None:
        """Move the unfinished operations of this communicator and of its splits, at most every 200 us."""
        self._engine.progress()

    def abort(self, message: str) -> NoReturn:
        end_job(message)

    def _broadcast(self, array: Array, root: int) -> Work:
        steps = _complete(self._comm.Ibcast([as_bytes(array), MPI.BYTE], root), array)
        return self._start(steps, lambda: f"broadcast of {_spec(array)} from {root}")

    def _allreduce(self, array: Array, op: ReduceOp) -> Work:
        shared = next((buffer for buffer in self._shared if buffer.holds(array)), None)
        if shared is not None:
            steps = shared.allreduce(array, op)
        elif self._in_rank_order:
            steps = self._allreduce_in_rank_order(array, op)
        else:
            steps = self._allreduce_by_mpi(array, op)
        return self._start(steps, lambda: f"allreduce of {_spec(array)} by {op.name}")

    def _allreduce_by_mpi(self, array: Array, op: ReduceOp) -> Steps:
        total = widen(array)
        yield from _complete(self._comm.Iallreduce(MPI.IN_PLACE, total, _OPS[op]), total)
        return finish(total, array, op, self.size)

    def _reduce_scatter(self, flat: Array, op: ReduceOp) -> Work:
        steps = self._sum_own_slice(flat, op) if self._in_rank_order else self._reduce_scatter_by_mpi(flat, op)
        return self._start(steps, lambda: f"reduce_scatter of {_spec(flat)} by {op.name}")

    def _reduce_scatter_by_mpi(self, flat: Array, op: ReduceOp) -> Steps:
        own = flat[self._slice_of(self.rank, flat)]
        total = widen(flat)
        reduced = np.empty(
            own.shape, total.dtype
        )  # MPI forbids that the slice itself, part of the input, is the output
        yield from _complete(self._comm.Ireduce_scatter_block(total, reduced, _OPS[op]), reduced)
        return finish(reduced, own, op, self.size)

    def _allreduce_in_rank_order(self, array: Array, op: ReduceOp) -> Steps:
        """Sum this rank's slice, then collect everybody's."""
        flat = array.reshape(-1)
        self._num_sums += 1
        number = self._num_sums
        yield from self._sum_own_slice(flat, op)
        while self._num_gathers < number - 1:
            yield  # ranks match collectives by the order of their launch
        self._num_gathers = number
        request = self._gather.Iallgatherv(MPI.IN_PLACE, [as_bytes(flat), self._layout(flat), MPI.BYTE])
        return (yield from _complete(request, array))

    def _sum_own_slice(self, flat: Array, op: ReduceOp) -> Steps:
        """Send every rank its slice of `flat`, and add up in rank order what comes for the own one."""
        own = flat[self._slice_of(self.rank, flat)]
        received = np.empty((self.size, own.size), flat.dtype)
        counts = [own.nbytes] * self.size
        displacements = [own.nbytes * rank for rank in range(self.size)]
        request = self._exchange.Ialltoallv(
            [as_bytes(flat), self._layout(flat), MPI.BYTE], [as_bytes(received), (counts, displacements), MPI.BYTE]
        )
        yield from _complete(request, received)
        reduce_in_rank_order(list(received), op, [own])
        return own

    def _slice_of(self, rank: int, flat: Array) -> slice:
        return slice(rank * flat.size // self.size, (rank + 1) * flat.size // self.size)

    def _layout(self, flat: Array) -> tuple[list[int], list[int]]:
        """Return the bytes of each rank's slice, and where it begins."""
        slices = [self._slice_of(rank, flat) for rank in range(self.size)]
        counts = [(part.stop - part.start) * flat.itemsize for part in slices]
        return counts, [part.start * flat.itemsize for part in slices]

    def _allgather(self, array: Array) -> Work:
        gathered = np.empty((self.size, *array.shape), array.dtype)
        request = self._comm.Iallgather([as_bytes(array), MPI.BYTE], [as_bytes(gathered), MPI.BYTE])
        return self._start(_complete(request, gathered, array), lambda: f"allgather of {_spec(array)}")

    def _all_to_all(self, array: Array) -> Work:
        received = np.empty_like(array)
        request = self._comm.Ialltoall([as_bytes(array), MPI.BYTE], [as_bytes(received), MPI.BYTE])
        return self._start(_complete(request, received, array), lambda: f"all_to_all of {_spec(array)}")

    def _split(self, color: int, key: int) -> Communicator:
        with self.waiting_for("split"):
            self.barrier()  # once all ranks are here the calls of MPI that block are short
        part = self._comm.Split(color, key)
        return self._child(part)

    def _child(self, part: MPI.Comm) -> MPICommunicator:
        child = MPICommunicator(part, self._settings, engine=self._engine)
        part.Free()
        return child

    def _isend(self, array: Array, dest: int, tag: int) -> Work:
        isend = self._comm.Issend if self._settings.synchronous_sends else self._comm.Isend
        request = isend([as_bytes(array), MPI.BYTE], dest, tag)
        return self._start(_complete(request, array), lambda: f"send to {dest} tag {tag} of {_spec(array)}")

    def _irecv(self, array: Array, source: int, tag: int) -> Work:
        request = self._comm.Irecv([as_bytes(array), MPI.BYTE], source, tag)
        steps = _receive(request, array, source, tag)
        return self._start(steps, lambda: f"recv from {source} tag {tag} of {_spec(array)}")

    def _buffer(self, num_elements: int, dtype: np.dtype[Any]) -> Array:
        """See `Communicator.buffer`: shared memory where every host has as many ranks as every other, and several."""
        num_bytes = num_elements * dtype.itemsize
        host, between = self._split_by_host()
        by_rank = self.gather_objects((host.size, _lack_of_space(num_bytes * host.size)))
        host_sizes = {size for size, _ in by_rank}
        plain = super()._buffer(num_elements, dtype)
        if host_sizes == {1} or not num_bytes or (between is not None and self._settings.deterministic):
            return plain  # nothing to share, or no way to sum in rank order
        obstacle = next((lack for _, lack in by_rank if lack), None)
        if len(host_sizes) > 1:
            obstacle = f"hosts have {' or '.join(map(str, sorted(host_sizes)))} ranks"
        window = None
        if obstacle is None:
            window, failure = host.shared_window(HEADER_BYTES + num_bytes)
            obstacle = next(filter(None, self.gather_objects(failure)), None)
        if window is None or obstacle is not None:
            if self.rank == 0:
                warnings.warn(f"gradients are reduced through messages, not shared memory: {obstacle}", stacklevel=3)
            return plain
        self._shared.append(SharedBuffer(window, self.size, between))
        return self._shared[-1].memory[:num_bytes].view(dtype)

    def _split_by_host(self) -> tuple[MPICommunicator, MPICommunicator | None]:
        """Return the ranks on this host, and those of this rank's place on every host, None for one. Collective."""
        hosts = self._settings.hosts
        if hosts is None:
            part = self._comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        else:
            part = self._comm.Split(hosts.index(hosts[self._members[self.rank]]), self.rank)
        host = self._child(part)
        between = self._child(self._comm.Split(host.rank, self.rank))
        return host, between if max(self.gather_objects(between.size)) > 1 else None

    def shared_window(self, num_bytes: int) -> tuple[SharedWindow | None, str | None]:
        """Allocate memory that the ranks of this communicator, all on one host, share; it lives as long as MPI does.

        Collective.

        Returns:
            The window, or None and what is wrong.
        """
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})  # each rank's part begins a page, near its own core
        try:
            window = MPI.Win.Allocate_shared(num_bytes, 1, info, comm=cast(MPI.Intracomm, self._comm))
        except MPI.Exception as error:
            return None, error.Get_error_string()
        finally:
            info.Free()
        window.Lock_all(MPI.MODE_NOCHECK)  # the epoch in which Sync is allowed
        parts = [np.asarray(window.Shared_query(rank)[0], np.uint8) for rank in range(self.size)]
        parts[self.rank][:] = 0
        window.Sync()
        self.barrier()
        return SharedWindow(self.rank, parts, window.Sync), None

    def _reads_gpu_memory(self, call: str) -> bool:
        return call in _GPU_CALLS and not self._in_rank_order and is_cuda_aware()

    def _start(self, steps: Steps, describe: Callable[[], str]) -> Operation:
        def describe_fully() -> str:
            return describe() + self._label + self._describe_context()

        return self._engine.start(steps, describe_fully)


def short_name(library_version: str) -> str:
    """Return the name and the version in what an MPI says of itself, which may be pages about its build.

    "MPICH Version:      5.0.2\\nMPICH Release date: ..."  ->  "MPICH 5.0.2"
    """
    line = library_version.partition("\n")[0]
    line = re.sub(r"^MPI VERSION\s*:\s*", "", line)  # Cray's heading, before the name
    line = re.split(r",| for | \(ANL ", line)[0]  # then: package, operating system, the MPICH that it is made from
    return re.sub(r"\s+version\s*:?\s*", " ", line, flags=re.IGNORECASE).strip()


def _new_engine(settings: Settings) -> Engine:
    if settings.progress_thread and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            "progress_thread=True needs an MPI that allows calls from several threads, this one does not"
        )
    rank = MPI.COMM_WORLD.Get_rank()
    engine = Engine(rank=rank, timeout_seconds=settings.timeout_seconds, thread=settings.progress_thread)
    atexit.register(engine.stop)  # before mpi4py ends MPI
    return engine


def _complete(request: MPI.Request, result: Array, sent: Array | None = None) -> Steps:
    """Wait for one request; `sent` is an array that it reads, and that must live as long."""
    while not request.Test():
        yield
    return result


def _receive(request: MPI.Request, array: Array, source: int, tag: int) -> Steps:
    status = MPI.Status()
    try:
        while not request.Test(status):
            yield
    except MPI.Exception as error:
        if error.Get_error_class() != MPI.ERR_TRUNCATE:
            raise
        raise message_size_error(array, source=source, tag=tag, longer=True) from error
    if status.Get_count(MPI.BYTE) != array.nbytes:
        raise message_size_error(array, source=source, tag=tag, longer=False)
    return array


def _spec(array: Array) -> str:
    return f"{describe_array(array)}, {array.nbytes} bytes"


def _lack_of_space(num_bytes: int) -> str | None:
    """Say what is missing, where a window is too large: MPI might fail on one rank, and the others would wait."""
    if not Path(_SHARED_MEMORY_FOLDER).exists():
        return None
    free = shutil.disk_usage(_SHARED_MEMORY_FOLDER).free
    if num_bytes <= free:
        return None
    return f"{_SHARED_MEMORY_FOLDER} has {free >> 20} MiB free, and {(num_bytes >> 20) + 1} MiB are needed"


@cache
def is_cuda_aware() -> bool:
    """Return whether this MPI reads and writes GPU memory, as it says itself: MPIX_Query_cuda_support."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    for path in {line.split()[-1] for line in lines if "/libmpi" in line}:
        query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
        if query is not None:
            return bool(query())
    return False


def abort_on_uncaught_exception() -> None:
    """Make an exception that nobody catches, on any thread, end the whole job at once.

    Without it the other ranks would wait for ever for the rank that is gone. Under `python -m mpi4py` this hook still
    speaks first, and MPI is gone before that one could. SystemExit is no exception here: a script that calls
    sys.exit(2) on every rank ends with 2; where only some ranks call it, `python -m mpi4py` is what ends the others.
    """
    sys.excepthook = _abort_on_exception
    threading.excepthook = _abort_on_thread_exception


def end_job(message: str, status: int = 1) -> NoReturn:
    """Print the message, each line after this rank, and end every rank of the job.

    Where MPI's own Abort blocks, as it can over a cut link, this process still ends.
    """
    prefix = f"[rank {MPI.COMM_WORLD.Get_rank()}] "
    sys.stdout.flush()
    sys.stderr.write("".join(f"{prefix}{line}\n" for line in message.splitlines()))
    sys.stderr.flush()
    watchdog = threading.Timer(_ABORT_SECONDS, os._exit, (status,))
    watchdog.daemon = True
    watchdog.start()
    MPI.COMM_WORLD.Abort(status)
    os._exit(status)


def _abort_on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    end_job("".join(traceback.format_exception(kind, error, trace)))


def _abort_on_thread_exception(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is not SystemExit:
        end_job("".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)))
