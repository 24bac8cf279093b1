"""Jobs of their own: a Python command on ranks that mpirun starts, or as a plain process, with a limit of time."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MPIRUN = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
LIGHTLY = str(ROOT / "tests" / "support" / "lightly.py")  # runs an example, whose name follows, without its pictures
HELD = str(ROOT / "tests" / "support" / "held.py")  # holds a run, whose script follows, until somebody has killed
LIMIT_SECONDS = 180  # several times what the longest takes on a busy machine
_FOLDERS = tempfile.TemporaryDirectory(prefix="jobs-")  # a short name: sockets lie in it, whose paths must be short

needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="no mpirun beside this Python or on the PATH")


def run_job(
    arguments: Sequence[str], *, ranks: int | None, cwd: Path = ROOT, limit_seconds: float = LIMIT_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments` on so many ranks, or without a launcher where ranks is None; it may fail."""
    command = [sys.executable, *arguments]
    if ranks is not None:
        assert MPIRUN is not None
        command = [MPIRUN, "-n", str(ranks), *command]
    with start(command, cwd) as job:
        try:
            stdout, stderr = job.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            job.terminate()  # the launcher ends its ranks; killed, it would leave them running
            try:
                job.wait(5)
            finally:
                job.kill()
            raise
    return subprocess.CompletedProcess(command, job.returncode, stdout, stderr)


def run_lines(
    script: str, lines: Sequence[str], cwd: Path, *, sample_tokens: int = 40, limit_seconds: float = LIMIT_SECONDS
) -> list[tuple[str, str]]:
    """Run an example with many command lines, each after the number of its ranks, in one job; none may fail.

    Args:
        sample_tokens: how many the example writes at its end, if it writes any.
    Returns:
        What each run said on stdout and on stderr.
    """
    (cwd / "lines").write_text("".join(f"{line}\n" for line in lines))
    many_runs = str(ROOT / "tests" / "support" / "many_runs.py")
    arguments = ["-m", "mpi4py", many_runs, script, str(sample_tokens), "lines"]
    ranks = max(int(line.split()[0]) for line in lines)
    result = run_job(arguments, ranks=ranks, cwd=cwd, limit_seconds=limit_seconds)
    (cwd / "lines").unlink()
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return list(zip(*(_parts(said, lines) for said in (result.stdout, result.stderr)), strict=True))


def _parts(said: str, lines: Sequence[str]) -> list[str]:
    """Cut what a job said where its command lines stand."""
    parts = []
    for line in reversed(lines):
        said, _, part = said.rpartition(f"{line}\n")
        parts.append(part)
    assert said == "", said
    return parts[::-1]


def start(command: Sequence[str], cwd: Path, *, new_session: bool = False) -> subprocess.Popen[str]:
    """Start a command that says what it says to whoever started it; a session of its own can be killed as a whole."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=cwd, env=environ(), stdout=pipe, stderr=pipe, text=True, start_new_session=new_session
    )


@contextmanager
def killed_after(seconds: float, job: subprocess.Popen[Any]) -> Iterator[None]:
    """Kill a job that has a session of its own where what is inside takes longer or fails; else it would go on."""

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # ranks that may die end with their launcher

    limit = threading.Timer(seconds, kill)
    limit.start()
    try:
        yield
    except BaseException:
        kill()
        raise
    finally:
        limit.cancel()


def environ() -> dict[str, str]:
    """Return the environment of a job, whichever MPI starts it."""
    unless_given = {
        "MINIGRAD_KERNELS": "numpy",  # to load numba and its kernels takes each process two seconds of CPU
    }
    always = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",  # what Open MPI wants; as variables, because MPICH refuses its flags
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",  # or the ranks of two jobs at once would share a core
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "",  # with it a line is written in two parts, and a rank may die between them
        # A folder of its own: what an mpirun that is killed leaves there stops a later one that has its process number.
        "TMPDIR": tempfile.mkdtemp(dir=_FOLDERS.name),
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "support"))),
    }
    return unless_given | os.environ | always


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Return what a run has noted of its steps."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def write_text(folder: Path) -> Path:
    """Write a text that is soon learned and soon validated, for jobs that would take Python's of 470,000 bytes."""
    path = folder / "squares.txt"
    path.write_text(" ".join(str(i * i) for i in range(900)))
    return path


@functools.cache
def survives_deaths() -> bool:
    """Return whether the MPI at hand can go on when a rank dies: Open MPI with ULFM."""
    info = MPIRUN and shutil.which("ompi_info", path=str(Path(MPIRUN).parent))
    if not info:
        return False
    return "FT MPI support: yes" in subprocess.run([info], capture_output=True, text=True, timeout=60).stdout
