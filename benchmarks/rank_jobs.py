"""Runs of a job's script: on ranks or in one process, alone or in turns with others. Its result is a line of JSON."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from interleave import Turnstile
from pinned_workers import ONE_THREAD, environment

HERE = Path(__file__).parent
NUM_RANKS = 2

Result = dict[str, Any]  # the JSON that a job prints


@dataclass(frozen=True)
class Job:
    """A run of a script beside this one, which prints its result as a line of JSON.

    Attributes:
        launcher: what starts its ranks, if anything does.
        threads: of each process.
    """

    launcher: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]
    threads: str = "1"

    def result(self) -> Result:
        """Run it alone.

        Raises:
            RuntimeError: it failed.
        """
        return run_alone(self.script, *self.arguments, launcher=self.launcher, threads=self.threads)


def in_turns(*jobs: Job) -> list[Result]:
    """Run jobs on this host that take turns; return the results in their order.

    Raises:
        RuntimeError: one failed; the others are ended.
    """
    with TemporaryDirectory() as folder, ThreadPoolExecutor(len(jobs)) as pool:
        turns, names = Path(folder) / "turns", [str(number) for number in range(len(jobs))]
        Turnstile.write(turns, names)

        def run(job: Job, name: str) -> Result:
            try:
                return replace(job, arguments=(*job.arguments, "--turnstile", str(turns), name)).result()
            except BaseException:
                turns.unlink(missing_ok=True)  # so that the others, who look for their names there, end too
                raise

        return list(pool.map(run, jobs, names))


def run_job(launcher: Sequence[str], script: str, *arguments: str) -> Result:
    """Run a script beside this one on two ranks; return the JSON that it prints.

    Raises:
        RuntimeError: it failed.
    """
    return run_alone(script, *arguments, launcher=[*launcher, "-n", str(NUM_RANKS)])


def run_alone(script: str, *arguments: str, launcher: Sequence[str] = (), threads: str = "1") -> Result:
    """Run a script beside this one; return the JSON that it prints.

    Raises:
        RuntimeError: it failed.
    """
    command = [*launcher, sys.executable, str(HERE / script), *arguments]
    environ = environment() | dict.fromkeys(ONE_THREAD, threads)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stderr}")
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])
