"""Ranks as MPI processes; the only importer of mpi4py.

Arrays travel by mpi4py's upper-case calls, straight from their memory. MPI moves a non-blocking call only while the
process is inside some MPI call, so `progress()`, called between the ops of a backward, is what makes communication
overlap computation.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, cast

import numpy as np
from mpi4py import MPI

from distributed.communicator import Array, Communicator, ReduceOp, Work, as_bytes, message_size_error

_OPS = {ReduceOp.SUM: MPI.SUM, ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX}
_PROGRESS_SECONDS = 200e-6  # a test of many requests costs microseconds, and a backward has thousands of ops
_ABORT_SECONDS = 5.0


def mpi_world(*, synchronous_sends: bool = False) -> MPICommunicator:
    """Return the communicator of all ranks, and make an uncaught exception on any of them end the job. Collective."""
    abort_on_uncaught_exception()
    return MPICommunicator(MPI.COMM_WORLD, synchronous_sends=synchronous_sends)


class MPICommunicator(Communicator):
    """A communicator over an mpi4py one.

    It duplicates the one it is given, once, here, so that its messages never meet those of the caller: making one is
    collective.

    Args:
        comm: an intracommunicator.
        synchronous_sends: a send completes only once its receive is posted (Issend): shows who relies on buffering.
    """

    def __init__(self, comm: MPI.Comm, *, synchronous_sends: bool = False) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self._comm = comm.Dup()
        self._synchronous_sends = synchronous_sends
        self._max_tag = cast(int, MPI.COMM_WORLD.Get_attr(MPI.TAG_UB))
        self._outstanding = _Outstanding()

    @property
    def library(self) -> str:
        return MPI.Get_library_version().split(",")[0].strip()

    @property
    def max_tag(self) -> int:
        return self._max_tag

    def gather_objects(self, obj: object) -> list[Any]:
        return self._comm.allgather(obj)

    def barrier(self) -> None:
        self._comm.Barrier()

    def progress(self) -> None:
        """Test the unfinished requests of this communicator and of its splits, at most every 200 us."""
        self._outstanding.progress()

    def abort(self, message: str) -> NoReturn:
        end_job(message)

    def _broadcast(self, array: Array, root: int) -> Work:
        return self._keep(self._comm.Ibcast([as_bytes(array), MPI.BYTE], root), array)

    def _allreduce(self, array: Array, op: ReduceOp) -> Work:
        _check_reducible(array)
        return self._keep(self._comm.Iallreduce(MPI.IN_PLACE, array, _OPS[op]), array)

    def _reduce_scatter(self, flat: Array, op: ReduceOp) -> Work:
        _check_reducible(flat)
        n = flat.size // self.size
        own = flat[self.rank * n : (self.rank + 1) * n]
        reduced = np.empty_like(own)  # MPI forbids that the slice itself, part of the input, is the output

        def land(_: MPI.Status) -> None:
            own[:] = reduced

        return self._keep(self._comm.Ireduce_scatter_block(flat, reduced, _OPS[op]), own, land)

    def _allgather(self, array: Array) -> Work:
        gathered = np.empty((self.size, *array.shape), array.dtype)
        request = self._comm.Iallgather([as_bytes(array), MPI.BYTE], [as_bytes(gathered), MPI.BYTE])
        return self._keep(request, gathered)

    def _split(self, color: int, key: int) -> Communicator:
        part = self._comm.Split(color, key)
        child = MPICommunicator(part, synchronous_sends=self._synchronous_sends)
        part.Free()
        child._outstanding = self._outstanding  # one progress() moves the whole family
        return child

    def _isend(self, array: Array, dest: int, tag: int) -> Work:
        isend = self._comm.Issend if self._synchronous_sends else self._comm.Isend
        return self._keep(isend([as_bytes(array), MPI.BYTE], dest, tag), array)

    def _irecv(self, array: Array, source: int, tag: int) -> Work:
        def check_size(status: MPI.Status) -> None:
            truncated = status.Get_error() == MPI.ERR_TRUNCATE
            if truncated or status.Get_count(MPI.BYTE) != array.nbytes:
                raise message_size_error(array, source=source, tag=tag, longer=truncated)

        return self._keep(self._comm.Irecv([as_bytes(array), MPI.BYTE], source, tag), array, check_size)

    def _keep(self, request: MPI.Request, result: Array, land: Callable[[MPI.Status], None] | None = None) -> Work:
        return self._outstanding.add(_MPIWork(self._outstanding, request, result, land))


class _Outstanding:
    """The unfinished requests of a family of communicators.

    MPI goes on writing into the array of a request that Python has dropped, so this set, not the caller, keeps them.
    """

    def __init__(self) -> None:
        self._works: set[_MPIWork] = set()
        self._last_progress = 0.0

    def add(self, work: _MPIWork) -> _MPIWork:
        self._works.add(work)
        self.progress()
        return work

    def remove(self, work: _MPIWork) -> None:
        self._works.discard(work)

    def progress(self) -> None:
        now = time.perf_counter()
        if now - self._last_progress >= _PROGRESS_SECONDS:
            self._last_progress = now
            for work in list(self._works):
                work.poll()


class _MPIWork(Work):
    """An operation that MPI carries out; an error of it is kept for wait() and test(), whoever finds it first."""

    def __init__(
        self, outstanding: _Outstanding, request: MPI.Request, result: Array, land: Callable[[MPI.Status], None] | None
    ) -> None:
        self._outstanding = outstanding
        self._request = request
        self._result = result
        self._land = land
        self._complete = False
        self._error: Exception | None = None

    def wait(self) -> Array:
        if not self._complete:
            self._advance(self._request.Wait)
        self._check()
        return self._result

    def test(self) -> bool:
        self.poll()
        self._check()
        return self._complete

    def poll(self) -> None:
        if not self._complete:
            self._advance(self._request.Test)

    def _advance(self, call: Callable[[MPI.Status], bool]) -> None:
        status = MPI.Status()
        try:
            if not call(status):
                return
        except MPI.Exception as error:
            self._error = error
            status.Set_error(error.Get_error_class())
        self._complete = True
        self._outstanding.remove(self)
        if self._land is not None:
            try:
                self._land(status)
            except ValueError as error:  # for a message too long MPI has one too, that says less
                self._error = error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


def _check_reducible(array: Array) -> None:
    dtype = array.dtype
    if dtype.kind not in "iuf" or not dtype.isnative or dtype == np.float16:
        raise TypeError(f"MPI reduces native integers, float32 and wider floats, got {dtype}")


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
