"""Ranks as MPI processes; the only importer of mpi4py.

Arrays travel by mpi4py's upper-case calls, straight from their memory. MPI moves a non-blocking call only while the
process is inside some MPI call, so `progress()`, called between the ops of a backward, is what makes communication
overlap computation.
"""

from __future__ import annotations

import atexit
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn, cast

import numpy as np
from mpi4py import MPI

from distributed.comm.calls import Call, call_site, describe_array
from distributed.comm.communicator import Communicator
from distributed.comm.failure import Heal, RankFailure
from distributed.comm.mpi.abort import JobEnd
from distributed.comm.mpi.call_check import CallCheck
from distributed.comm.mpi.cuda_aware import is_cuda_aware
from distributed.comm.mpi.family import MPIFamily, check_ulfm, join
from distributed.comm.mpi.progress import Engine, Operation, Steps, until_done, until_sequence_done
from distributed.comm.mpi.rank_order import RankOrderReduction
from distributed.comm.mpi.reduction import MPIReduction
from distributed.comm.mpi.roll_call import RollCall
from distributed.comm.mpi.shared_memory import SharedBuffer, SharedWindow
from distributed.comm.mpi.staging import STAGING_BYTES, Staging
from distributed.comm.mpi.windows import allocate_shared, share_file, shared_buffer
from distributed.comm.reduction import ReduceOp
from distributed.comm.sequence import MessageSteps
from distributed.comm.settings import Settings
from distributed.comm.topology import short_name
from distributed.comm.transfer import as_bytes, message_size_error
from distributed.comm.work import Array, Work
from minigrad.words import counted

_GPU_CALLS = ("broadcast", "allreduce", "isend", "irecv")  # those that work in place, with nothing of ours in between


def mpi_world(settings: Settings) -> MPICommunicator:
    """Return the communicator of all ranks. Collective.

    From now on an uncaught exception on any of them ends the job.
    """
    if settings.survive:
        check_ulfm(MPI)
        newcomers = join(MPI, timeout_seconds=settings.timeout_seconds)
        if newcomers is not None:
            return _world_of(newcomers, settings, Heal.REPLACE)  # as the others do, or it would not have been started
        family = MPIFamily(MPI, MPI.COMM_WORLD.Dup(), timeout_seconds=settings.timeout_seconds)
        return _world_of(family, settings, Heal.SHRINK)
    _job_end(MPI.COMM_WORLD).on_uncaught_exception()
    return MPICommunicator(MPI.COMM_WORLD.Dup, _agreed(settings, MPI.COMM_WORLD))


def _world_of(family: MPIFamily, settings: Settings, how: Heal) -> MPICommunicator:
    """Return a family's world, whoever dies while it is made: then that of the family after it. Collective."""
    while True:
        _job_end(family.world, loses=(RankFailure, TimeoutError, MPI.Exception)).on_uncaught_exception()
        try:
            with family.guarded():
                family.meet()
                world = MPICommunicator(family.world.Dup, _agreed(settings, family.world), family=family)
            whole = True
        except RankFailure:
            whole = False
        if family.vote(whole):
            return world
        family = family.heal(how)


def finalize_at_exit() -> None:
    """Let this process end MPI as if all were well, whatever its exit status. Every rank must call it."""
    # What `python -m mpi4py` sets for a SystemExit; it is looked at after the functions that are registered here.
    atexit.register(MPI._set_abort_status, 0)


def _job_end(world: MPI.Comm, loses: tuple[type[Exception], ...] = ()) -> JobEnd:
    return JobEnd(world.Get_rank(), world.Abort, loses=loses)


def _agreed(settings: Settings, world: MPI.Comm) -> Settings:
    """Return the settings with what ranks find out together. Collective.

    One rank that asks for a check is enough: a launcher need not carry a variable of the environment to other hosts.
    """
    check = any(world.allgather(settings.check_collectives))
    return replace(settings, hosts=_hosts(world), check_collectives=check)


def _hosts(world: MPI.Comm) -> list[str]:
    """Return the name of each world rank's host: its first rank there, since names of hosts may repeat. Collective."""
    part = world.Split_type(MPI.COMM_TYPE_SHARED)
    (first,) = MPI.Group.Translate_ranks(part.Get_group(), [0], world.Get_group())
    part.Free()
    return world.allgather(f"host of rank {first}")


class MPICommunicator(Communicator):
    """A communicator over some of mpi4py's, each for one kind of messages. Making one is collective.

    Args:
        make: makes one, of the ranks of this one, out of one that is in the family: where some ranks fail in that, the
            others wait for them in what is revoked. In a new one, which those that failed do not have, they would wait
            for ever.
        engine: of the world that this one is split off, so that one progress() moves all of it; a new one by default.
        family: that it fails with; None where a death ends the job.
    Raises:
        ValueError: a setting is out of range.
        RuntimeError: settings.progress_thread with an MPI that allows only one thread.
    """

    def __init__(
        self,
        make: Callable[[], MPI.Comm],
        settings: Settings | None = None,
        *,
        engine: Engine | None = None,
        family: MPIFamily | None = None,
    ) -> None:
        settings = settings or Settings()
        handles: list[Any] = []  # what `free` frees, in order: of mpi4py, and such lists of those that were split off

        def new() -> MPI.Comm:
            handles.append(make())
            return handles[-1] if family is None else family.add(handles[-1])

        comm = new()
        super().__init__(comm.Get_rank(), comm.Get_size())
        self._handles = handles
        self._is_world = engine is None
        self._settings = settings
        self._family = family
        world = MPI.COMM_WORLD if family is None else family.world
        self._members = list(MPI.Group.Translate_ranks(comm.Get_group(), None, world.Get_group()))
        self._comm = comm
        self._engine = engine or _new_engine(new(), self._members, settings, family)
        # Below 4 ranks Open MPI's Iallreduce reduces to one rank and broadcasts: twice the bytes of an exchange.
        far_apart = settings.hosts is not None and len({settings.hosts[rank] for rank in self._members}) > 1
        self._in_rank_order = settings.deterministic or (far_apart and self.size < 4)
        # Ranks of a split's other parts make as many, of which only some may lie on several hosts.
        may_be_far = settings.hosts is not None and len(set(settings.hosts)) > 1
        phases = (new(), new()) if settings.deterministic or may_be_far else None
        self._reduction: RankOrderReduction | MPIReduction = (
            RankOrderReduction(*phases) if phases and self._in_rank_order else MPIReduction(MPI, self._comm)
        )
        self._max_tag = cast(int, MPI.COMM_WORLD.Get_attr(MPI.TAG_UB))
        self._label = "" if self.size == world.Get_size() else f" among ranks {self._members}"
        self._check: CallCheck | None = None
        if settings.check_collectives:
            asked = new()
            self._check = CallCheck(lambda row: _allgather(asked, row), self._label)
        self._num_collectives = 0
        self._shared: list[SharedBuffer] = []
        self._staging: Staging | None = None

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
        call = Call("gather_objects")
        sizes = self._collective(call, _allgather(self._comm, np.array([pickled.size]))).wait()[:, 0]
        padded = np.zeros(sizes.max(), np.uint8)
        padded[: pickled.size] = pickled
        rows = self._collective(call, _allgather(self._comm, padded)).wait()
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def barrier(self) -> None:
        self._collective(Call("barrier"), self._pass_barrier()).wait()

    def progress(self) -> None:
        """Move the unfinished operations of this communicator and of its splits.

        It does so every 200 us at most.
        """
        self._engine.progress()

    def abort(self, message: str) -> NoReturn:
        _job_end(MPI.COMM_WORLD if self._family is None else self._family.world)(message)

    # Deaths.

    @property
    def survives(self) -> bool:
        return self._family is not None

    @property
    def is_newcomer(self) -> bool:
        return self._family is not None and self._family.is_newcomer

    @property
    def dead(self) -> tuple[int, ...]:
        return () if self._family is None else self._family.dead()

    def vote(self, yes: bool, *, idle: bool = False) -> bool:
        return yes if self._family is None else self._family.vote(yes, idle=idle)

    def heal(self, how: Heal) -> Communicator:
        if self._family is None:
            return super().heal(how)
        return _world_of(self._family.heal(how), self._settings, how)

    def _guarded(self) -> AbstractContextManager[None]:
        """Let errors of calls that no operation makes be those of the family."""
        return nullcontext() if self._family is None else self._family.guarded()

    # Collectives. Each is launched by its steps, and these run only once the ranks have compared their calls.

    def _pass_barrier(self) -> Steps:
        return (yield from until_done(self._comm.Ibarrier(), np.empty(0)))

    def _broadcast(self, array: Array, root: int) -> Work:
        def steps() -> Steps:
            return (yield from until_done(self._comm.Ibcast([as_bytes(array), MPI.BYTE], root), array))

        return self._collective(Call("broadcast", array, root=root), steps())

    def _allreduce(self, array: Array, op: ReduceOp) -> Work:
        shared = self._shared_buffer_of(array)
        steps = self._reduction.allreduce(array, op) if shared is None else shared.allreduce(array, op)
        return self._collective(Call("allreduce", array, op=op), steps)

    def _reduce_scatter(self, flat: Array, op: ReduceOp) -> Work:
        shared = self._shared_buffer_of(flat, spanning=False)
        if shared is not None:
            steps = shared.reduce_scatter(flat, op)
        elif self._staging is not None:
            steps = self._staging.reduce_scatter(flat, op)
        else:
            steps = self._reduction.reduce_own_slice(flat, op)
        return self._collective(Call("reduce_scatter", flat, op=op), steps)

    def _sum_widely(self, array: Array, wide: Array, is_wide: Array, everywhere: bool) -> Work:
        shared = self._shared_buffer_of(array, spanning=everywhere)
        if shared is None or not all(map(shared.holds, (wide, is_wide))):
            return super()._sum_widely(array, wide, is_wide, everywhere)
        steps = shared.sum_widely(array, wide, is_wide, everywhere=everywhere)
        return self._collective(Call("sum_widely", array, op=ReduceOp.SUM), steps)

    def _allgather(self, array: Array) -> Work:
        return self._collective(Call("allgather", array), _allgather(self._comm, array))

    def _allgather_in_place(self, flats: Sequence[Array]) -> Work:
        shared = self._shared_buffer_of(flats[0], spanning=False)
        if shared is not None and all(map(shared.holds, flats)):
            return self._collective(Call("allgather_in_place", flats[0]), shared.allgather(flats))

        def steps() -> Steps:
            received = [[as_bytes(flat), flat.nbytes // self.size, MPI.BYTE] for flat in flats]
            for request in [self._comm.Iallgather(MPI.IN_PLACE, each) for each in received]:
                yield from until_done(request, flats[0])
            return flats[0]

        return self._collective(Call("allgather_in_place", flats[0]), steps())

    def _all_to_all(self, array: Array) -> Work:
        def steps() -> Steps:
            received = np.empty_like(array)
            request = self._comm.Ialltoall([as_bytes(array), MPI.BYTE], [as_bytes(received), MPI.BYTE])
            return (yield from until_done(request, received))

        return self._collective(Call("all_to_all", array), steps())

    def _split(self, color: int, key: int) -> Communicator:
        # Once all ranks are here the calls of MPI that block are short.
        self._collective(Call("split"), self._pass_barrier()).wait()
        with self._guarded():
            return self._child(lambda: self._comm.Split(color, key))

    def _child(self, make: Callable[[], MPI.Comm]) -> MPICommunicator:
        child = MPICommunicator(make, self._settings, engine=self._engine, family=self._family)
        self._handles.append(child._handles)
        return child

    def free(self) -> None:
        if self._is_world:
            raise RuntimeError("a world is not freed, what was split off it may be")
        if self._family is None:  # whose deaths must reach all that it has ever made
            _free(self._handles)

    # Messages.

    def _isend(self, array: Array, dest: int, tag: int) -> Work:
        isend = self._comm.Issend if self._settings.synchronous_sends else self._comm.Isend
        with self._guarded():
            request = isend([as_bytes(array), MPI.BYTE], dest, tag)
        return self._start(until_done(request, array), lambda: f"send to {dest} tag {tag} of {_spec(array)}")

    def _irecv(self, array: Array, source: int, tag: int) -> Work:
        with self._guarded():
            request = self._comm.Irecv([as_bytes(array), MPI.BYTE], source, tag)
        steps = _receive(request, array, source, tag)
        return self._start(steps, lambda: f"recv from {source} tag {tag} of {_spec(array)}")

    def sequence(self, steps: MessageSteps) -> Work:
        return self._start(until_sequence_done(steps), lambda: "a sequence of messages")

    # Memory that ranks share.

    def _shared_buffer_of(self, array: Array, *, spanning: bool = True) -> SharedBuffer | None:
        """Return the shared memory that an array lies in; one host's alone, unless it may be `spanning` several."""
        return next((b for b in self._shared if b.holds(array) and (spanning or not b.spans_hosts)), None)

    def stage_reductions(self) -> None:
        if self._staging is None:
            buffer = self._shared_buffer(STAGING_BYTES)
            if buffer is not None and not buffer.spans_hosts:
                self._staging = Staging(buffer, self.rank, self.size)

    def _buffer(self, num_elements: int, dtype: np.dtype[Any]) -> Array:
        """See `Communicator.buffer`: shared memory where `shared_buffer` finds some."""
        num_bytes = num_elements * dtype.itemsize
        shared = self._shared_buffer(num_bytes)
        if shared is None:
            return super()._buffer(num_elements, dtype)
        self._shared.append(shared)
        return shared.memory[:num_bytes].view(dtype)

    def _shared_buffer(self, num_bytes: int) -> SharedBuffer | None:
        with self._guarded():
            host, between = self._split_by_host()
        return shared_buffer(
            self, host, between, num_bytes, deterministic=self._settings.deterministic, allocate=host.shared_window
        )

    def _split_by_host(self) -> tuple[MPICommunicator, MPICommunicator | None]:
        """Return the ranks on this host, and those of this rank's place on every host, None for one. Collective.

        On hosts with unequal numbers of ranks some have None, others not; but these share nothing.
        """
        hosts = self._settings.hosts
        if hosts is None:
            host = self._child(lambda: self._comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank))
        else:
            here = hosts.index(hosts[self._members[self.rank]])
            host = self._child(lambda: self._comm.Split(here, self.rank))
        between = self._child(lambda: self._comm.Split(host.rank, self.rank))
        return host, between if between.size > 1 else None

    def shared_window(self, num_bytes: int) -> tuple[SharedWindow | None, str | None]:
        """Allocate memory that the ranks of this communicator share.

        They are all on one host. It lives as long as MPI does, and may be used once every rank is back. Collective.

        Returns:
            The window, or None and what is wrong.
        """
        if self._family is not None:  # MPI's own windows are not made for deaths
            return share_file(self, num_bytes)
        return allocate_shared(MPI, self._comm, num_bytes)

    def _reads_gpu_memory(self, call: str) -> bool:
        return call in _GPU_CALLS and not self._in_rank_order and is_cuda_aware()

    # What starts an operation.

    def _collective(self, call: Call, steps: Steps) -> Operation:
        number = self._num_collectives
        self._num_collectives += 1
        if self._check is not None:
            steps = self._checked(number, call._replace(subject=self._subject), call_site(), steps)
        return self._start(steps, lambda: f"{call} #{number}")

    def _checked(self, number: int, call: Call, where: str, steps: Steps) -> Steps:
        assert self._check is not None
        yield from self._check.compare(number, call, where)
        return (yield from steps)

    def _start(self, steps: Steps, describe: Callable[[], str]) -> Operation:
        return self._engine.start(steps, lambda: describe() + self._label + self._describe_context())


def _free(handles: list[Any]) -> None:
    for each in handles:
        if isinstance(each, list):
            _free(each)
        else:
            each.Free()
    handles.clear()


def _new_engine(comm: MPI.Comm, members: Sequence[int], settings: Settings, family: MPIFamily | None) -> Engine:
    if settings.progress_thread and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            "progress_thread=True needs an MPI that allows calls from several threads, this one does not"
        )
    engine = Engine(
        rank=members[comm.Get_rank()],
        timeout_seconds=settings.timeout_seconds,
        thread=settings.progress_thread,
        roll_call=RollCall(comm, members),
        fault_watch=family,
    )
    atexit.register(engine.stop)  # before mpi4py ends MPI
    return engine


def _allgather(comm: MPI.Comm, array: Array) -> Steps:
    gathered = np.empty((comm.Get_size(), *array.shape), array.dtype)
    request = comm.Iallgather([as_bytes(array), MPI.BYTE], [as_bytes(gathered), MPI.BYTE])
    return (yield from until_done(request, gathered))


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
    return f"{describe_array(array)}, {counted(array.nbytes, 'byte')}"
