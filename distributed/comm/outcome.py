"""What the ranks of a job tell the launcher that started it, `python -m distributed.recovery`, of how it ends.

    begun    a file: there is a world that survives deaths
    left     a file: a rank of it came to its end, without which exit code 0 means nothing: mpirun's is 0 where all die
    ended    a file: all ranks came to their end; what is in it is the exit status of those that ended in an error
    lost     a line on stderr: this world cannot be healed from inside, so start the job again
    run      a file: the folder in which a training run keeps what it leaves, where the job that follows goes on
    steps    a file: how many steps are done, as 8 bytes, which tells a job that gets on from one that does not

Under any other launcher there is no such folder, and nothing is told. This file knows no MPI.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

FOLDER = "MINIGRAD_JOB_FOLDER"
"""The environment variable that names the folder of a job, in memory, which the launcher makes and removes."""

RUN = "MINIGRAD_RUN"
"""The environment variable that names the folder of the run of the job before, which was lost."""

LOST = "minigrad-job-lost: "
"""What a line of stderr begins with that tells the launcher to start the job again, and why."""

_BEGUN, _LEFT, _ENDED, _RUN = "begun", "left", "ended", "run"
NEWCOMERS = "newcomers"
"""A folder with a file for each process that is being started, whose name is its number."""
_GIVEN_UP_SECONDS = 5.0  # for the launcher to end a job that it was told is lost
_PR_SET_PDEATHSIG = 1
# Linux alone has it. Here, as nothing may be loaded between a fork and what follows it.
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def job_folder() -> Path | None:
    """Return the folder of this job, None where nobody made one."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)  # this may be another host than the launcher's
    return path


def note_begin() -> None:
    """Note that the job has a world, of which somebody must come to an end."""
    folder = job_folder()
    if folder is not None:
        (folder / _BEGUN).touch()


def note_leaving() -> None:
    """Note that this rank came to its end; of the others nothing is known."""
    folder = job_folder()
    if folder is not None:
        (folder / _LEFT).touch()


def note_run(path: Path) -> None:
    """Note the folder that a training run has of its own."""
    folder = job_folder()
    if folder is not None:
        _write_whole(folder / _RUN, str(path))


def read_run(folder: Path | None) -> str | None:
    """Return the folder of the run that was noted; None where there was none."""
    if folder is None:
        return None
    try:
        return (folder / _RUN).read_text()
    except FileNotFoundError:
        return None


def has_begun(folder: Path) -> bool:
    """Return whether there has been a world, which sees by itself who dies."""
    return (folder / _BEGUN).exists()


def somebody_left(folder: Path) -> bool:
    """Return whether a rank of a world came to its end."""
    return (folder / _LEFT).exists()


def forget(folder: Path) -> None:
    """Remove what the ranks of a job noted that was lost."""
    for name in (_BEGUN, _LEFT, _ENDED):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / NEWCOMERS, ignore_errors=True)


def note_end(status: int = 0) -> None:
    """Note that the job came to its end.

    It came there on all ranks, or with an error that all of them have.

    Args:
        status: exit status of the job, 0 if all is well.
    """
    folder = job_folder()
    if folder is not None and (status or not (folder / _ENDED).exists()):
        _write_whole(folder / _ENDED, str(status))


def _write_whole(path: Path, text: str) -> None:
    """Write a file that others write too, or begin to read, at any moment: `atomic_write` is for one writer."""
    unfinished = path.with_name(f".{path.name}-{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)


def read_end(folder: Path) -> int | None:
    """Return the exit status that ranks noted in a folder.

    None where they came to no end.
    """
    try:
        return int((folder / _ENDED).read_text() or 0)
    except FileNotFoundError:
        return None


def lose(why: str) -> NoReturn:
    """Let the launcher start the job again.

    Without one, end this process, which ends the job.
    """
    has_launcher = job_folder() is not None
    words = f"\n{LOST}{why}" if has_launcher else f"{why}: `python -m distributed.recovery` would start the job again"
    last_words(f"{words}\n")
    if has_launcher:
        time.sleep(_GIVEN_UP_SECONDS)
    end_now()


def last_words(words: str) -> None:
    """Write out what this process has printed, and `words` to stderr, before it ends.

    What cannot be written, as the reader is gone or the disk is full, is lost: other ranks must not wait for that.
    """
    for stream, text in ((sys.stdout, ""), (sys.stderr, words)):
        with suppress(Exception):
            stream.write(text)
            stream.flush()


def end_now() -> NoReturn:
    """End this process without anybody's farewell."""
    last_words("")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that started it dies.

    So no rank outlives its launcher. Only Linux does; elsewhere a launcher that is killed leaves its ranks.
    """
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Return whether a process of this host lives.

    One that is dead and not yet buried does not.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
