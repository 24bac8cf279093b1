"""What ranks leave on their host before they heal, for the job that comes after theirs if healing fails.

The launcher (`python -m distributed.recovery`) gives a job a folder in memory. A rank that sees a death writes what it
has there, and what it keeps for its buddy; once the world is whole again the files go. Where MPI cannot heal, because a
rank dies in the midst of it, the launcher starts all ranks again, and these find the state as it was: no step is lost.
Costs nothing where nobody dies, and then one copy of the state in the memory of the host.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from distributed.comm.outcome import job_folder
from distributed.comm.world import launched_by_mpi
from distributed.recovery.state import Snapshot
from minigrad.backend import to_host

LOST_AT = "MINIGRAD_LOST_AT"
"""The environment variable that says when the job before this one was lost: seconds since the epoch."""

_STATES = "states"
_STEPS = "steps"


class Rescue:
    """The folder of a job, as one rank uses it.

    Args:
        folder: made by the launcher, on every host by the first rank that needs it.
    Attributes:
        lost_at: when the job before this one was lost; None where there was none.
        num_steps_before: steps that were done by then.
    """

    def __init__(self, folder: Path) -> None:
        self._states = folder / _STATES
        self._states.mkdir(exist_ok=True)
        self._steps = folder / _STEPS
        lost_at = os.environ.get(LOST_AT)
        self.lost_at = None if lost_at is None else float(lost_at)
        self.num_steps_before = read_steps(folder)
        self._counter = None if not self._steps.exists() else np.memmap(self._steps, np.int64, "r+", shape=(1,))

    @staticmethod
    def of_job() -> Rescue | None:
        """Return that of this job, None where its launcher has no folder for it, or a rank started this process."""
        folder = job_folder() if launched_by_mpi() else None
        return None if folder is None else Rescue(folder)

    def count(self, num_steps: int) -> None:
        """Tell the launcher how many steps are done, by a write into memory."""
        if self._counter is not None:
            self._counter[0] = num_steps

    def keep(self, snapshots: Iterable[Snapshot]) -> None:
        """Write what this process has; nothing where there is no room for it."""
        here = [s._replace(arrays={name: to_host(array) for name, array in s.arrays.items()}) for s in snapshots]
        num_bytes = sum(array.nbytes for snapshot in here for array in snapshot.arrays.values())
        if shutil.disk_usage(self._states).free < 2 * num_bytes:
            return
        unfinished = self._states / f".{os.getpid()}"
        with open(unfinished, "wb") as file:
            pickle.dump(here, file, protocol=5)
        unfinished.replace(self._states / str(os.getpid()))

    def read(self, place: int, num_places: int) -> list[Snapshot]:
        """Return this rank's share of what is there.

        Args:
            place, num_places: of this rank among those of its host, who read one file each, or every so many.
        """
        files = sorted(path for path in self._states.iterdir() if not path.name.startswith("."))
        return [snapshot for path in files[place::num_places] for snapshot in pickle.loads(path.read_bytes())]

    def clear(self, before: float) -> None:
        """Remove what was written before a moment, in seconds since the epoch: the world was whole again after it."""
        for path in self._states.iterdir():
            with suppress(FileNotFoundError):  # by another rank
                if path.stat().st_mtime < before:
                    path.unlink()


def read_steps(folder: Path) -> int:
    """Return how many steps a job says that it has done."""
    try:
        return int(np.fromfile(folder / _STEPS, np.int64, 1)[0])
    except (FileNotFoundError, IndexError):
        return 0


def begin_steps(folder: Path) -> None:
    """Make the file that a job counts its steps in."""
    np.zeros(1, np.int64).tofile(folder / _STEPS)
