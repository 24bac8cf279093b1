"""Finds an mpirun that ranks have left, and that does not end: all of them, or one before there was a world.

Open MPI's has been seen to wait for a lock of its own while several ranks died at once: no rank is left to say that the
job is lost, and whoever waits for mpirun waits for ever. And where a rank dies before it has started MPI, the others
wait for it in MPI's start, for ever too.
"""

from __future__ import annotations

import time
from pathlib import Path

from distributed.comm.outcome import is_running

_LOOK_SECONDS = 0.5


class Bereaved:
    """Watches a process for how long its children, of which there were some, have been dead.

    Where ranks run on other hosts, its children are what reaches these; where the system does not list a process's
    children, only Linux does, it seems to have none, ever.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._last_look = float("-inf")
        self._last_alive: float | None = None
        self._alive: set[int] = set()  # children, when somebody last looked
        self._ranks: set[int] = set()  # children that have been seen to run a rank's program
        self._first_loss: float | None = None

    def seconds(self) -> float:
        """Return how long ago the last child was seen alive; 0 where one is, or none was ever."""
        now = self._look()
        # Nobody looks more often than that: what was alive then counts as alive until the next look.
        return 0.0 if self._last_alive is None else max(0.0, now - self._last_alive - _LOOK_SECONDS)

    def seconds_without_a_rank(self) -> float:
        """Return how long ago a rank was first seen dead; 0 where none was, or where nobody waits for it.

        Of ranks on this host. Only one that has loaded MPI waits: ranks of a script that never asks for a world come to
        their ends when they like. It looks at each call: a rank that was never seen alive is not missed.
        """
        now = self._look(every=0.0)
        if self._first_loss is None or not any(map(_has_loaded_mpi, self._alive & self._ranks)):
            return 0.0
        return now - self._first_loss

    def _look(self, every: float = _LOOK_SECONDS) -> float:
        """Look at the children, if nobody has for so many seconds; return the time."""
        now = time.monotonic()
        if now >= self._last_look + every:
            self._last_look = now
            self._alive = alive = {child for child in _children(self._pid) if is_running(child)}
            if alive:
                self._last_alive = now
            if self._first_loss is None and self._ranks - alive:
                self._first_loss = now
            self._ranks |= {child for child in alive if _runs_a_rank(child)}
        return now


def _children(pid: int) -> list[int]:
    """Return the processes that a process has started, dead ones that it has not asked about too."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except OSError:  # that thread, or all of it, is gone
            continue
    return found


def _runs_a_rank(pid: int) -> bool:
    """Return whether a process is a rank: mpirun has other children too, such as those that reach other hosts."""
    try:
        return b"mpi4py" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _has_loaded_mpi(pid: int) -> bool:
    try:
        return b"/libmpi" in Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:  # it is gone
        return False
