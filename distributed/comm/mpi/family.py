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
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from distributed.comm.failure import Heal, RankFailure
from distributed.comm.mpi.lifetime import NEWCOMER, STUCK_SECONDS, dead_if_stuck, leave_at_exit, lost_if
from distributed.comm.outcome import (
    NEWCOMERS,
    end_now,
    job_folder,
    lose,
    note_begin,
    note_leaving,
)
from distributed.comm.settings import LaunchError

_NAP_SECONDS = 1e-3
# An error in MPI_Init, whose other side is dead, must not end the whole job.
_NEWCOMERS_ENVIRONMENT = (f"{NEWCOMER}=1", "OMPI_MCA_mpi_initial_errhandler=mpi_errors_return")
_WELCOME = 1  # the tag of what the old ranks send to a new one when they have agreed on it
_SWITCH = "OMPI_MCA_mpi_ft_enable"  # what --with-ft ulfm sets for every rank


def check_ulfm(mpi: Any) -> None:
    """Check that this MPI can go on when a rank dies, and was started to.

    Raises:
        LaunchError: it cannot, or was not.
    """
    if os.environ.get(_SWITCH) != "1" or not hasattr(mpi.Comm, "Shrink"):
        library = mpi.Get_library_version().partition(",")[0]
        raise LaunchError(
            "a world that survives failures needs Open MPI 5 under `mpirun --with-ft ulfm`, which "
            f"`python -m distributed.recovery -n RANKS SCRIPT` starts, not {library} without it"
        )


class MPIFamily:
    """A world, and all that was split off it.

    Args:
        mpi: mpi4py.MPI.
        world: of all its ranks.
        before: the family that this one comes after: what is under way in it must stay in memory.
        timeout_seconds: the longest that a rank waits for the others in a vote, or to heal.
        is_newcomer: whether this process took the place of a rank that died.
    """

    def __init__(
        self,
        mpi: Any,
        world: Any,
        before: MPIFamily | None = None,
        *,
        timeout_seconds: float,
        is_newcomer: bool = False,
    ) -> None:
        self.is_newcomer = is_newcomer
        self.world = world
        self._mpi = mpi
        self._timeout_seconds = timeout_seconds
        self._processes: list[tuple[str, int]] = []
        self._comms = [world]
        self._failure: RankFailure | None = None
        self._dead: tuple[int, ...] = ()  # all of them, once it has been healed
        self._before = before

    def add(self, comm: Any) -> Any:
        """Let a communicator fail with the family; return it."""
        self._comms.append(comm)
        return comm

    def meet(self) -> None:
        """Learn which processes the ranks are. Collective, blocking."""
        note_begin()
        atexit.register(note_leaving)
        self._processes = self.world.allgather((socket.gethostname(), os.getpid()))

    def check(self) -> None:
        """Raise RankFailure if a rank is dead.

        It looks at what this rank has been told, and sends no message.

        Raises:
            RankFailure: a rank is known to be dead.
        """
        if self._failure is None and self.world.Get_failed().Get_size():
            self._fail()
        if self._failure is not None:
            raise self._failure

    def dead(self) -> tuple[int, ...]:
        """Return the ranks of the world that are known to be dead."""
        return self._dead or self._known_dead()

    def translate(self, error: Exception) -> Exception:
        """Return RankFailure for an MPI error that a death has caused.

        Any other error is returned as it is.
        """
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

    def vote(self, yes: bool, *, idle: bool = False) -> bool:
        """Return whether all ranks live and say yes, as `Communicator.vote`.

        It is ULFM's agreement, which is the same everywhere.
        """
        flag = np.array([yes], np.int32)
        end = time.monotonic() + self._timeout_seconds
        try:
            request = self.world.Iagree(flag)
            while not request.Test():
                if time.monotonic() > end:
                    raise TimeoutError(f"no rank may wait longer than {self._timeout_seconds:g} s, but a vote takes so")
                if idle:
                    time.sleep(_NAP_SECONDS)
                else:
                    os.sched_yield()
        except self._mpi.Exception:  # on every rank alike: somebody was dead before it had voted
            self._fail()
            return False
        return bool(flag[0])

    def heal(self, how: Heal) -> MPIFamily:
        """Return the world after this one, as `Communicator.heal`.

        Where MPI cannot, the launcher starts the whole job again.
        """
        if self._failure is None:
            self._fail()
        with lost_if("the ranks that live did not meet", seconds=self._timeout_seconds):
            survivors = self.world.Shrink()
        lived = self._ranks_of(survivors)
        dead = sorted(set(range(self.world.Get_size())) - set(lived))
        self._dead = tuple(dead)
        if how is Heal.REPLACE and dead:
            here = socket.gethostname()
            pids = [self._processes[rank][1] for rank in lived if self._processes[rank][0] == here]
            bereft = {self._processes[rank][0] for rank in dead} - {self._processes[rank][0] for rank in lived}
            if bereft:  # Open MPI 5.0 starts new ranks there, which then cannot meet the others
                lose(f"no rank is left on {', '.join(sorted(bereft))}")
            with lost_if("new ranks did not start", seconds=STUCK_SECONDS, dies=pids):
                world = self._with_newcomers(survivors, dead)
        else:
            world = survivors
        leave_at_exit(world)
        return MPIFamily(self._mpi, world, self, timeout_seconds=self._timeout_seconds)

    def _with_newcomers(self, survivors: Any, dead: Sequence[int]) -> Any:
        """Start a process for each dead rank, and return the world with them.

        One try: after a death in the midst of it Open MPI 5.0 may hang or crash in the next one.
        """
        made: list[Any] = []  # what the newcomers are in, too
        how = {"wdir": os.getcwd(), "mpi_initial_errhandler": "mpi_errors_return"}
        command = [*_NEWCOMERS_ENVIRONMENT, sys.executable, *sys.orig_argv[1:]]
        by_host = by_hosts([host for host, _ in self._processes], dead)
        infos = [self._mpi.Info.Create(how | ({"host": host} if host else {})) for host in by_host]
        counts = [len(ranks) for ranks in by_host.values()]
        try:
            commands = ["/usr/bin/env"] * len(counts)
            made.append(survivors.Spawn_multiple(commands, [command] * len(counts), counts, infos))
            made.append(made[-1].Merge(high=False))
            made[-1].bcast([rank for ranks in by_host.values() for rank in ranks], 0)
            made.append(made[-1].Split(0, self.world.Get_rank()))
            if survivors.Agree(1):
                world = made[-1]
                if survivors.Get_rank() == 0:
                    with suppress(self._mpi.Exception):  # one that is dead already is seen by the next call
                        for rank in dead:
                            world.send(None, rank, _WELCOME)
                return world
        except self._mpi.Exception as error:
            lose(f"new ranks could not be started: {error}")
        lose("new ranks could not be started on every rank")

    def _ranks_of(self, comm: Any) -> list[int]:
        group = comm.Get_group()
        return list(self._mpi.Group.Translate_ranks(group, None, self.world.Get_group()))

    def _fail(self) -> None:
        if self._failure is None:
            self._failure = RankFailure(self._known_dead())
            for comm in self._comms:
                comm.Revoke()

    def _known_dead(self) -> tuple[int, ...]:
        return tuple(sorted(self._mpi.Group.Translate_ranks(self.world.Get_failed(), None, self.world.Get_group())))


def by_hosts(hosts: Sequence[str], ranks: Sequence[int]) -> dict[str, list[int]]:
    """Return some ranks by their hosts; where there is one host for all, it has no name: MPI need not be told.

    Args:
        hosts: of all ranks.
    """
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank] if len(set(hosts)) > 1 else "", []).append(rank)
    return by_host


def join(mpi: Any, *, timeout_seconds: float) -> MPIFamily | None:
    """Join the world that this process was started for, in a dead rank's place.

    Returns None for any process that was not started for that.
    """
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
        end_now()
    folder = job_folder()
    if folder is not None:
        (folder / NEWCOMERS / str(os.getpid())).unlink(missing_ok=True)
    leave_at_exit(world)
    return MPIFamily(mpi, world, timeout_seconds=timeout_seconds, is_newcomer=True)
