"""How a process begins and ends in a job whose ranks may die, where MPI's own calls may never return.

    starting         MPI starts; a newcomer whose parents died meanwhile ends quietly
    dead_if_stuck    the kernel kills this process where a call takes far too long
    lost_if          the launcher starts the job again where a call takes too long, or one that takes part in it dies
    leave_at_exit    this process ends with all others, without MPI's own farewell

This file imports no MPI: it is given communicators.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from distributed.comm.failure import RankFailure
from distributed.comm.outcome import (
    NEWCOMERS,
    die_with_parent,
    end_now,
    is_running,
    job_folder,
    lose,
    note_end,
    note_leaving,
)

NEWCOMER = "MINIGRAD_NEWCOMER"
"""The environment variable that tells a process that it takes the place of a rank that died."""

STUCK_SECONDS = 20.0  # to start new ranks and meet them takes 1 to 2, on a busy machine a few more
_LOOK_SECONDS = 0.05
_NAP_SECONDS = 1e-3
_LEAVE_SECONDS = 1.0  # for the last to hear that all have come


@contextmanager
def lost_if(what: str, *, seconds: float, dies: Iterable[int] = ()) -> Iterator[None]:
    """Lose the job where what is inside takes too long.

    Or, if `dies` says so, where a process that takes part in it dies. Open MPI's calls that start processes and meet
    them may not return when one that takes part dies meanwhile. A thread watches, since mpi4py lets Python go on in
    these calls.

    Args:
        what: would be the fault.
        dies: processes of this host; newcomers that note themselves in the job's folder meanwhile are watched too.
    """
    done = threading.Event()
    watched = [*dies]
    before = {pid for pid in _newcomers() if not is_running(pid)}  # they died as they joined an earlier world

    def watch() -> None:
        end = time.monotonic() + seconds
        while not done.wait(_LOOK_SECONDS):
            if time.monotonic() > end:
                lose(f"{what} within {seconds:g} s")
            if not watched:
                continue
            gone = [pid for pid in [*watched, *(_newcomers() - before)] if not is_running(pid)]
            if gone and not done.is_set():
                lose(f"{what}: process {gone[0]} died meanwhile")

    thread = threading.Thread(target=watch, name="lost_if", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _newcomers() -> set[int]:
    """Return the processes of this host that have noted that they are being started."""
    folder = job_folder()
    return set() if folder is None else {int(path.name) for path in (folder / NEWCOMERS).glob("*")}


@contextmanager
def dead_if_stuck() -> Iterator[None]:
    """Kill this process where what is inside takes far too long.

    That is the start of MPI in a newcomer whose parents died. It is SIGALRM that kills, which the kernel sends: mpi4py
    starts MPI with Python's lock in its hand, so no thread could. For the main thread only.
    """
    handler = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    before = signal.setitimer(signal.ITIMER_REAL, STUCK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)  # None: not Python's


@contextmanager
def starting() -> Iterator[None]:
    """Let MPI start inside.

    A newcomer that it fails or hangs in, as those who started it are dead, ends quietly.
    """
    folder = job_folder()
    if folder is not None:
        die_with_parent()
    if os.environ.pop(NEWCOMER, None) is None:  # not for processes that this one starts
        yield
        return
    if folder is not None:
        (folder / NEWCOMERS).mkdir(exist_ok=True)
        (folder / NEWCOMERS / str(os.getpid())).touch()
    try:
        with dead_if_stuck():
            yield
    except Exception:
        end_now()


def leave_at_exit(world: Any) -> None:
    """Let this process end as soon as all ranks of a world come to their end.

    Without MPI's own farewell. Between processes of which some were started later or have died that farewell
    (MPI_Finalize) may wait for ever, in Open MPI 5.0. The launcher sees killed processes and says so; `python -m
    distributed.recovery` knows better.
    """
    atexit.unregister(_leave)  # for the world before
    atexit.register(_leave, world)


def _leave(world: Any) -> None:
    """Wait until all ranks are here, and then until all know it: whoever leaves is dead to those that still wait."""
    note_leaving()
    with suppress(Exception):  # a rank is dead, so it did not come; or has left, so all had come
        _pass_barrier(world)
        note_end()
        _pass_barrier(world, seconds=_LEAVE_SECONDS)
    end_now()


def _pass_barrier(world: Any, seconds: float = float("inf")) -> None:
    request, end = world.Ibarrier(), time.monotonic() + seconds
    while not request.Test() and not world.Get_failed().Get_size() and time.monotonic() < end:
        time.sleep(_NAP_SECONDS)
    if not request.Test():
        raise RankFailure
