"""Finds an mpirun that all its ranks have left, and that does not end.

Open MPI's has been seen to wait for a lock of its own while several ranks died at once: no rank is left to say that the
job is lost, and whoever waits for mpirun waits for ever.
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
        self._next_look = 0.0
        self._last_alive: float | None = None

    def seconds(self) -> float:
        """Return how long ago the last child was seen alive; 0 where one is, or none was ever."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            if any(is_running(child) for child in _children(self._pid)):
                self._last_alive = now
        # Nobody looks more often than that: what was alive then counts as alive until the next look.
        return 0.0 if self._last_alive is None else max(0.0, now - self._last_alive - _LOOK_SECONDS)


def _children(pid: int) -> list[int]:
    """Return the processes that a process has started, dead ones that it has not asked about too."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except OSError:  # that thread, or all of it, is gone
            continue
    return found
