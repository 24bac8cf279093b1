"""Processes that take turns on one core, so that peers meet the same clock and the same neighbours.

A worker prepares a job and then runs one turn of it each time it is told to; while others have theirs it sleeps:

    worker A   prepare     | turn |      | turn |
    worker B   prepare     |      | turn |      | turn |

What holds for every worker: one thread, one core for its turns, and a clean environment. They prepare at once, on all
cores, which takes half of a benchmark's time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

JOBS = Path(__file__).with_name("engine_jobs.py")
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")
# What `import minigrad` tells glibc too: keep freed memory. A peer should have it as well.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
# These choose a BLAS kernel, or an allocator, that the libraries would not choose by themselves.
DROPPED = (
    *("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "MKL_ENABLE_INSTRUCTIONS", "MINIGRAD_MALLOC"),
    "PYTHONDONTWRITEBYTECODE",  # an import would compile our modules each time, and not those of an installed library
)


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a worker: this process's, with one thread, one malloc, and no choices of kernels."""
    return {name: value for name, value in environ.items() if name not in DROPPED} | ONE_THREAD | KEEP_FREED_MEMORY


class Worker:
    """A process that runs a job of `engine_jobs.py`, turn by turn; it prepares itself from now on.

    Args:
        job: its name and arguments.
    """

    def __init__(self, job: Sequence[str]) -> None:
        self.job = tuple(job)
        self._is_prepared = False
        self._process = subprocess.Popen(
            [sys.executable, str(JOBS), *job],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def prepared(self) -> Self:
        """Block until it is prepared.

        Raises:
            RuntimeError: the process ended; its own words are on stderr.
        """
        if not self._is_prepared:
            self._answer()
            self._is_prepared = True
        return self

    def turn(self) -> Any:
        """Let it run one turn and return what it measured.

        Raises:
            RuntimeError: the process ended; its own words are on stderr.
        """
        self.prepared()
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f"the job {' '.join(self.job)!r} ended with exit code {self._process.returncode}")
        return json.loads(line)


def pin() -> None:
    """Keep this process on the last core that it may use, where the system can do that."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def serve(turn: Callable[[], Any]) -> None:
    """Be a worker: run `turn` for every line on stdin and answer with its result."""
    pin()
    print(json.dumps("prepared"), flush=True)
    for _ in sys.stdin:
        print(json.dumps(turn()), flush=True)


def once(job: Sequence[str]) -> Any:
    """Run one turn of a job in a process of its own."""
    with ExitStack() as stack:
        worker = Worker(job)
        stack.callback(worker.close)
        return worker.turn()


def interleave(jobs: Mapping[str, Sequence[str]], *, num_rounds: int, num_turns: int) -> dict[str, list[float]]:
    """Let all jobs take turns, in new processes each round; return the measurements of each, in the same order."""
    measured: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(num_rounds):
        with ExitStack() as stack:
            workers = {name: Worker(job) for name, job in jobs.items()}
            for worker in workers.values():
                stack.callback(worker.close)
            for worker in workers.values():
                worker.prepared()  # before the first turn: who still prepares would take its memory's time
            for _ in range(num_turns):
                for name, worker in workers.items():
                    measured[name].append(worker.turn())
    return measured
