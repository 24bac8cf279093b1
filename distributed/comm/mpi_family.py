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
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from distributed.comm.failure import Heal, RankFailure

OUTCOME = "MINIGRAD_OUTCOME"
"""The environment variable that names a file: there once a world that has healed came to its end, on all ranks."""

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
        made: list[Any] = []
        try:
            command = sys.orig_argv[1:]
            info = self._mpi.Info.Create({"wdir": os.getcwd()})
            made.append(survivors.Spawn(sys.executable, command, maxprocs=len(dead), info=info))
            made.append(made[-1].Merge(high=False))
            made[-1].bcast(list(dead), 0)
            made.append(made[-1].Split(0, self.world.Get_rank()))
            done = True
        except self._mpi.Exception:
            done = False
        try:
            done = bool(survivors.Agree(int(done)))
        except self._mpi.Exception:
            done = False
        if done:
            leave_at_exit(made[-1])
            return made[-1]
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
        merged = parents.Merge(high=True)
        dead = merged.bcast(None, 0)
        world = merged.Split(0, dead[mpi.COMM_WORLD.Get_rank()])
    except mpi.Exception:  # the others could not agree on this one
        _end_without_farewell()
    leave_at_exit(world)
    return MPIFamily(mpi, world, is_newcomer=True)


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
