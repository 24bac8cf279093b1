"""The folder of a run: who may write in it, and what each of its files holds. Rank 0 alone uses it.

    runs/train_gpt-20261128-041500/
        settings.json       what was chosen, and what --resume starts from
        metrics.jsonl       one line a step; `step` counts from 0, as the loop does
        checkpoints/        see distributed/checkpoint/files.py
        pid                 the process of rank 0, while the run goes on
        summary.json        at the end, with loss.png, throughput.png, exposed_communication.png and timeline.*

Nothing in it is replaced before it is known that the run goes on from it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from distributed.checkpoint.files import complete
from distributed.run.command_line import CHECKPOINTS, METRICS, RUNS, SETTINGS_FILE, SUMMARY, script_name
from distributed.run.plots import draw_plots, read_metrics
from minigrad.files import atomic_write
from minigrad.json_files import to_json
from pipeline import Event, perfetto, svg
from pipeline.schedules.drawing.trace import trace_picture
from pipeline.schedules.measured import events as events_of
from pipeline.schedules.measured import is_of_schedule, predict, timeline

PID = "pid"
PATIENCE_SECONDS = 5.0
POLL_SECONDS = 0.02
# What flock says where there are no locks: Lustre mounted without them, NFS without its daemon (524 is Linux's own).
NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, 524}


class RunFolder:
    """A folder that one process at a time runs in.

    Others are kept out until `close`, or until the process ends.

    Args:
        path: None makes a new folder in runs/.
        patient: wait a moment for a process that is dying to let go of it.
    Attributes:
        path: of the folder.
        close: lets other processes in; a folder in which no run has begun goes.
        warning: what whoever runs should know; None where there is nothing.
    Raises:
        ValueError: another process runs there, or it cannot be made or written to.
    """

    def __init__(self, path: str | None, *, patient: bool = False) -> None:
        self.warning: str | None = None
        self.path = Path(path) if path is not None else RUNS / f"{script_name()}-{datetime.now():%Y%m%d-%H%M%S}"
        try:
            made = path is None or not self.path.exists()
            if path is None:
                self.path = _make_new(self.path)
            lock = self._locked(PATIENCE_SECONDS if patient else 0.0)
            (self.path / PID).write_text(f"{os.getpid()}\n")
            self.close = weakref.finalize(self, _leave, self.path, lock, made)
        except OSError as error:
            raise ValueError(
                f"--run must be a folder that can be written to, got {self.path}: {error.strerror}"
            ) from error

    def _locked(self, seconds: float) -> int:
        """Return the open `pid` file, locked: the one that is there, not one that its last owner has removed."""
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / PID, os.O_RDWR | os.O_CREAT, 0o666)
            self._take_lock(lock, seconds)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(self.path / PID)):
                    return lock
            os.close(lock)

    def _take_lock(self, lock: int, seconds: float) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with the process, however that ends
        except BlockingIOError:
            if seconds > 0:
                time.sleep(POLL_SECONDS)
                return self._take_lock(lock, seconds - POLL_SECONDS)
            os.close(lock)
            pid = (self.path / PID).read_text().strip()
            raise ValueError(f"{self.path} is being run by process {pid}: end that first") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            self.warning = (
                f"the file system of {self.path} has no locks ({error.strerror}): nothing keeps a second process out"
            )

    def keep(self, path: Path) -> None:
        """Copy a file into the folder, whole or not at all."""
        with atomic_write(self.path / path.name) as unfinished:
            unfinished.write_bytes(path.read_bytes())

    def is_finished(self) -> bool:
        """Return whether the run was summed up after its last step."""
        return (self.path / SUMMARY).exists()

    def last_checkpoint(self) -> Path | None:
        """Return the checkpoint that would be gone on from."""
        return next(iter(complete(self.path / CHECKPOINTS)), None)

    def begin(
        self,
        settings: dict[str, Any],
        metrics_before: Path,
        first: int,
        *,
        goes_on: bool,
        last: dict[str, Any] | None = None,
    ) -> None:
        """Write the settings, and the metrics of the steps before `first`.

        From there on `write_metrics` adds to them.

        Args:
            last: the line of the step before, for the case that who was to write it has died over it.
        Raises:
            OSError, ValueError: a file cannot be written, or the metrics from before not be read.
        """
        known = first > 0 and metrics_before.exists()
        kept = [line for line in read_metrics(metrics_before) if line["step"] < first] if known else []
        if last is not None and last["step"] == first - 1 and not (kept and kept[-1]["step"] == first - 1):
            kept.append(last)
        with atomic_write(self.path / METRICS) as unfinished:
            unfinished.write_text("".join(to_json(line) + "\n" for line in kept))
        with atomic_write(self.path / SETTINGS_FILE) as unfinished:
            unfinished.write_text(to_json(settings, indent=2) + "\n")
        if goes_on:  # what it says of the end does not hold any more
            (self.path / SUMMARY).unlink(missing_ok=True)

    def write_metrics(self, line: Mapping[str, Any]) -> None:
        """Write what a step did.

        A kill leaves at least the lines of the checkpoint that it leaves.

        Raises:
            OSError: the disk is full, or the folder was removed.
        """
        file = os.open(self.path / METRICS, os.O_WRONLY | os.O_APPEND)  # it is not made anew where it was removed
        with open(file, "w") as metrics:
            metrics.write(to_json(line) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return what all steps did, those before a resume too."""
        return read_metrics(self.path / METRICS)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, by which a run that is done is known."""
        with atomic_write(self.path / SUMMARY) as path:
            path.write_text(to_json(summary, indent=2) + "\n")

    def draw(self, events: Sequence[Event] | None, num_steps: int, *, loss_unit: str) -> list[str]:
        """Draw the metrics, and what ran when in the last step.

        A pipeline's timeline is drawn beside what it should have been. A picture is never worth a run: what goes wrong
        with one, whatever it is, comes back as a line.

        Args:
            events: of that step, in order of their start; None or empty where none was recorded.
            num_steps: of the run.
            loss_unit: nats, say.
        """
        faults = []
        for name, draw in {
            "plots": lambda: draw_plots(self.path, loss_unit=loss_unit),
            "timeline": lambda: self._draw_timeline(events or [], num_steps),
        }.items():
            try:
                draw()
            except Exception as error:
                faults.append(f"no {name}: {_one_line(error)}")
        return faults

    def _draw_timeline(self, events: Sequence[Event], num_steps: int) -> None:
        if not events:
            return
        (self.path / "timeline.json").write_text(perfetto(events))
        predicted = events_of(predict(timeline(events)), seconds=1.0) if is_of_schedule(events) else []
        page = trace_picture(events, f"step {num_steps} of {num_steps}", predicted=predicted)
        (self.path / "timeline.svg").write_text(svg(page))


def _make_new(folder: Path, number: int = 1) -> Path:
    """Make a folder of this name, or of the next one that no other run of this second has taken."""
    new = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
    try:
        new.mkdir(parents=True)
    except FileExistsError:
        return _make_new(folder, number + 1)
    return new


def _leave(folder: Path, lock: int, made: bool) -> None:
    """Let other processes in, and leave nothing behind where the run has not begun."""
    (folder / PID).unlink(missing_ok=True)
    for path in (folder / CHECKPOINTS, folder) if made else ():
        with suppress(OSError):  # it holds something
            path.rmdir()
    os.close(lock)


def _one_line(error: Exception) -> str:
    words = " ".join(str(error).split())
    return words if isinstance(error, ModuleNotFoundError) else f"{type(error).__name__}: {words}"
