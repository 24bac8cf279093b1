"""The MPI side of ranks that die: a family of communicators that fails as one, votes, and heals.

It speaks ULFM, MPI's fault tolerance, which Open MPI 5 has in it: `mpirun --with-ft ulfm` turns it on. This file
imports no MPI: it is given mpi4py's module.

    a rank dies                    ->  whoever waits for it gets an MPI error, within milliseconds
    the first to see it            ->  revokes every communicator of the family
    whoever waits for anybody      ->  gets an error too; all of them become RankFailure
    heal: shrink, spawn, merge     ->  a new world, with a family of its own

Source: Bland et al. 2013, Post-failure recovery of MPI communication capability; the ULFM chapter of the MPI Forum.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from distributed.comm.failure import Heal, RankFailure

OUTCOME = "MINIGRAD_OUTCOME"
"""The environment variable that names a file: there once a world that has healed came to its end, on all ranks."""

STUCK_SECONDS = 20.0  # to start new ranks and meet them takes 1 to 2, on a busy machine a few more
_TURN_SECONDS = 5.0  # for an error to reach all ranks, and far more than that
_NEWCOMER = "MINIGRAD_NEWCOMER"
# An error in MPI_Init, whose other side is dead, must not end the whole job.
_NEWCOMERS_ENVIRONMENT = (f"{_NEWCOMER}=1", "OMPI_MCA_mpi_initial_errhandler=mpi_errors_return")
_WELCOME = 1  # the tag of what the old ranks send to a new one when they have agreed on it
_SWITCH = "OMPI_MCA_mpi_ft_enable"  # what --with-ft ulfm sets for every rank


def check_ulfm(mpi: Any) -> None:
    """Check that this MPI can go on when a rank dies, and was started to.

    Raises:
        RuntimeError: it cannot, or was not.
    """
    if os.environ.get(_SWITCH) != "1" or not hasattr(mpi.Comm, "Shrink"):
        library = mpi.Get_library_version().partition(",")[0]
        raise RuntimeError(
            f"a world that survives failures needs Open MPI 5 under `mpirun --with-ft ulfm`, not {library} without it"
        )


class MPIFamily:
    """A world, and all that was split off it.

    Args:
        mpi: mpi4py.MPI.
        world: of all its ranks.
        before: the family that this one comes after: what is under way in it must stay in memory.
        is_newcomer: whether this process took the place of a rank that died.
    """

    def __init__(self, mpi: Any, world: Any, before: MPIFamily | None = None, *, is_newcomer: bool = False) -> None:
        self.is_newcomer = is_newcomer
        self.world = world
        self._mpi = mpi
        self._comms = [world]
        self._failure: RankFailure | None = None
        self._before = before

    def add(self, comm: Any) -> Any:
        """Let a communicator fail with the family; return it."""
        self._comms.append(comm)
        return comm

    def check(self) -> None:
        """Raise RankFailure if a rank is dead; a look at what this rank has been told, no message."""
        if self._failure is None and self.world.Get_failed().Get_size():
            self._fail()
        if self._failure is not None:
            raise self._failure

    def translate(self, error: Exception) -> Exception:
        """Return RankFailure for an MPI error that a death has caused, any other error as it is."""
        if not isinstance(error, self._mpi.Exception):
            return error
        classes = (self._mpi.ERR_PROC_FAILED, self._mpi.ERR_PROC_FAILED_PENDING, self._mpi.ERR_REVOKED)
        if error.Get_error_class() in classes or self._failure is not None or self.world.Get_failed().Get_size():
            self._fail()
            assert self._failure is not None
            return self._failure
        return error

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Let MPI errors inside be those of the family."""
        try:
            yield
        except self._mpi.Exception as error:
            raise self.translate(error) from error

    def vote(self, yes: bool) -> bool:
        """See `Communicator.vote`: ULFM's agreement, which is the same everywhere."""
        try:
            return bool(self.world.Agree(int(yes)))
        except self._mpi.Exception:  # on every rank alike: somebody was dead before it had voted
            self._fail()
            return False

    def heal(self, how: Heal) -> MPIFamily:
        """See `Communicator.heal`."""
        if self._failure is None:
            self._fail()
        while True:
            survivors = self.world.Shrink()
            dead = sorted(set(range(self.world.Get_size())) - set(self._ranks_of(survivors)))
            world = survivors if how is Heal.SHRINK or not dead else self._with_newcomers(survivors, dead)
            if world is not None:
                return MPIFamily(self._mpi, world, self)

    def _with_newcomers(self, survivors: Any, dead: Sequence[int]) -> Any:
        """Start a process for each dead rank, and return the world with them; None if that fails on any rank."""
        made: list[Any] = []  # what the newcomers are in, too
        try:
            with dead_if_stuck(survivors.Get_rank()):
                info = self._mpi.Info.Create({"wdir": os.getcwd(), "mpi_initial_errhandler": "mpi_errors_return"})
                command = [*_NEWCOMERS_ENVIRONMENT, sys.executable, *sys.orig_argv[1:]]
                made.append(survivors.Spawn("/usr/bin/env", command, maxprocs=len(dead), info=info))
                made.append(made[-1].Merge(high=False))
                made[-1].bcast(list(dead), 0)
                made.append(made[-1].Split(0, self.world.Get_rank()))
            done = True
        except self._mpi.Exception:
            done = False
            survivors.Revoke()  # whoever waits inside for this rank stops waiting
        try:
            done = bool(survivors.Agree(int(done)))
        except self._mpi.Exception:
            done = False
        if done:
            world = made[-1]
            if survivors.Get_rank() == 0:
                with suppress(self._mpi.Exception):  # one that is dead already is seen by the next call
                    for rank in dead:
                        world.send(None, rank, _WELCOME)
            leave_at_exit(world)
            return world
        for comm in made[1:]:
            comm.Revoke()  # whoever was started sees that it is not wanted, and ends
        return None

    def _ranks_of(self, comm: Any) -> list[int]:
        group = comm.Get_group()
        return list(self._mpi.Group.Translate_ranks(group, None, self.world.Get_group()))

    def _fail(self) -> None:
        if self._failure is None:
            group = self.world.Get_failed()
            ranks = self._mpi.Group.Translate_ranks(group, None, self.world.Get_group())
            self._failure = RankFailure(ranks)
            for comm in self._comms:
                comm.Revoke()


def join(mpi: Any) -> MPIFamily | None:
    """Join the world that this process was started for in a dead rank's place; None for any other process."""
    parents = mpi.Comm.Get_parent()
    if parents == mpi.COMM_NULL:
        return None
    try:
        with dead_if_stuck():
            merged = parents.Merge(high=True)
            dead = merged.bcast(None, 0)
            world = merged.Split(0, dead[mpi.COMM_WORLD.Get_rank()])
            world.recv(None, min(set(range(world.Get_size())) - set(dead)), _WELCOME)
    except mpi.Exception:  # the others could not agree on this one
        _end_without_farewell()
    leave_at_exit(world)
    return MPIFamily(mpi, world, is_newcomer=True)


@contextmanager
def dead_if_stuck(turn: int = 0) -> Iterator[None]:
    """Kill this process where what is inside takes far too long.

    Open MPI's calls that start processes and meet them may not return when one that takes part dies meanwhile. Dead,
    the process inside is one more rank to be replaced, and those that wait for it get an error. It is SIGALRM that
    kills, which the kernel sends: mpi4py starts MPI with Python's lock in its hand, so no thread could. For the main
    thread only.

    Args:
        turn: ranks that are stuck together die in this order, so that the first may free the others.
    """
    handler = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    before = signal.setitimer(signal.ITIMER_REAL, STUCK_SECONDS + turn * _TURN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)  # None: not Python's


@contextmanager
def starting() -> Iterator[None]:
    """Let MPI start inside; a newcomer that it fails or hangs in, as those who started it are dead, ends quietly."""
    if os.environ.pop(_NEWCOMER, None) is None:  # not for processes that this one starts
        yield
        return
    try:
        with dead_if_stuck():
            yield
    except Exception:
        _end_without_farewell()


def leave_at_exit(world: Any) -> None:
    """Let this process end as soon as all ranks of a world come to their end, without MPI's own farewell.

    Between processes of which some were started later that farewell (MPI_Finalize) may wait for ever, in Open MPI 5.0.
    The launcher sees killed processes and says so; `python -m distributed.recovery` knows better.
    """
    atexit.register(_leave, world)


def _leave(world: Any) -> None:
    try:
        everybody = bool(world.Agree(1))
    except Exception:  # some rank is dead, or a newer world has left first
        everybody = False
    if everybody and world.Get_rank() == 0 and OUTCOME in os.environ:
        Path(os.environ[OUTCOME]).touch()
    _end_without_farewell()


def _end_without_farewell() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError
