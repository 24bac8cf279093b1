"""A run: what it prints, what it saves and when, how it goes on, and when it ends. `run_folder.py` has its files."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from distributed import Communicator, ReduceOp, describe, launched_by_mpi
from distributed.checkpoint.checkpointer import Checkpointer, CheckpointError
from distributed.protocols import HasState, HasTensors
from distributed.run.command_line import CHECKPOINTS, METRICS, Saved, fail, to_save
from distributed.run.flags import flag_of
from distributed.run.folder import RunFolder
from distributed.run.plots import speed_text, totals
from distributed.run.progress import Progress
from distributed.run.settings import RunSettings
from distributed.run.trackers import Trackers
from distributed.stop import StopRequest
from distributed.trace.perfetto import Event
from distributed.trace.recorder import Recorder
from minigrad.json_files import as_kind
from minigrad.optim import Optimizer


class HasRecorder(Protocol):
    """A PipelineExecutor, a DistributedDataParallel."""

    @property
    def recorder(self) -> Recorder: ...


class Run:
    """One training run. Its methods are collective; rank 0 alone prints and writes, but for checkpoints.

        run = Run(settings, comm)
        for step in run.steps(model, optimizer, batches):
            ...
            run.log(loss)
        run.end()

    Args:
        settings: say where it is, how long it is, and whether it goes on from a checkpoint.
        comm: all ranks.
        samples, size: what speed is counted in, and how many of them one sample of the batch is.
        device: for the start line.
        loss_unit: for its plot.
    Attributes:
        folder: of this run.
        stopped: whether there is nothing to sum up: a signal ended it before its last step, or it was done before.
    """

    def __init__(
        self,
        settings: RunSettings,
        comm: Communicator,
        *,
        samples: str = "samples",
        size: int = 1,
        device: str = "cpu",
        loss_unit: str = "nats",
    ) -> None:
        self.settings = settings
        self.stopped = False
        self._comm = comm
        self._samples = samples
        self._samples_per_step = settings.batch * size
        self._loss_unit = loss_unit
        self._line: dict[str, Any] = {}  # of the step under way
        self._aside = (0.0, 0.0)  # seconds that are not of this step, and of these in waits
        self._events: list[Event] = []  # of the step that was recorded
        self._start_line = describe(comm, device=device)
        self._files: RunFolder  # on rank 0 alone
        self._trackers: Trackers | None = None  # likewise
        self.folder = self._on_rank_0(self._open)
        self.say(self._start_line)

    def say(self, words: str) -> None:
        """Print on rank 0, unless the run is quiet."""
        if self._comm.rank == 0 and not self.settings.quiet:
            print(words, flush=True)

    def keep(self, path: str | Path) -> None:
        """Copy a small file into the run's folder: what whoever reads its checkpoints needs, such as a tokenizer."""
        self._on_rank_0(lambda: self._files.keep(Path(path)))

    def warn(self, words: str) -> None:
        """Print on rank 0's stderr, also where the run is quiet."""
        if self._comm.rank == 0:
            print(words, file=sys.stderr, flush=True)

    def steps(self, model: HasTensors, optimizer: Optimizer, batches: HasState) -> Iterator[int]:
        """Yield the number of each step that is still to be done; between them save, and end early if asked to."""
        settings = self.settings
        try:
            folder = self.folder / CHECKPOINTS
            checkpoints = Checkpointer(folder, self._comm, model, optimizer, keep_last=settings.keep)
            first = self._go_on(checkpoints, batches, optimizer)
            if first == settings.steps and self._on_rank_0(lambda: self._files.is_finished()):
                self.stopped = True
                self._close()
                return
            self._on_rank_0(lambda: self._begin(first))
        except (CheckpointError, ValueError) as error:  # the same on every rank
            self._close()
            fail(str(error))
        try:
            yield from self._steps(first, checkpoints, optimizer, batches)
        except (CheckpointError, ValueError) as error:  # the same on every rank
            with suppress(CheckpointError):
                checkpoints.wait()
            last = self._on_rank_0(lambda: self._files.last_checkpoint())
            self._close()
            fail(f"{error}; " + ("nothing was saved" if last is None else f"the last checkpoint is {last}"))

    def _steps(self, first: int, checkpoints: Checkpointer, optimizer: Optimizer, batches: HasState) -> Iterator[int]:
        settings = self.settings
        kill = f"kill -TERM {os.getpid()}"
        # Open MPI's mpirun kills its ranks a moment after a Ctrl-C.
        way = kill if launched_by_mpi() else f"Ctrl-C, or {kill},"
        self.say(f"{self.folder}: {way} saves and ends this run")
        look = settings.progress if self._comm.rank == 0 and not settings.quiet else "none"
        with StopRequest(self._comm) as stop, Progress(first, settings.steps, look=look) as progress:
            seconds = 0.0
            for step in range(first, settings.steps):
                start, waited = time.perf_counter(), self._comm.waited_seconds
                self._line, self._aside = {"step": step, "learning_rate": optimizer.lr}, (0.0, 0.0)
                if step == first:
                    self._line |= self._layout()
                yield step
                seconds_of_step = time.perf_counter() - start - self._aside[0]
                line = self._measure(seconds_of_step, self._comm.waited_seconds - waited - self._aside[1])
                if not math.isfinite(line["loss"]):
                    raise ValueError(f"the loss of step {step} is {line['loss']}, and what follows would be too")
                fault = self._write(line)
                if fault is not None:
                    stop.request()
                done = step + 1
                seconds += line["seconds"]
                speed = (done - first) * self._samples_per_step / seconds
                progress.update(f"loss {line['loss']:.3f}, {speed:,.0f} {self._samples}/s")
                asked = stop.agreed()
                if asked and (fault := self._comm.broadcast_object(fault)) is not None:
                    raise ValueError(fault)
                self.stopped = asked and done < settings.steps
                if self.stopped or done == settings.steps or done % settings.save_every == 0:
                    checkpoints.save(done, {"data": batches.state_dict()} | to_save(settings))
                if self.stopped:
                    break
            checkpoints.wait()
        if self.stopped:
            self._draw()
            self._close()
            self.say(f"stopped after step {done} as asked; to go on: --resume auto --run {self.folder}")

    def log(self, loss: float, **more: float) -> None:
        """Note what this step did. Every step logs a loss; `more` goes into its line of metrics as it is.

        A `grad_norm` that is not finite says that no rank took this step, see `StepGuard`; the summary counts them.
        """
        self.note(loss=loss, **more)

    def note(self, **values: float) -> None:
        """Add to this step's line of metrics; a `validation_loss` is a point in loss.png."""
        self._line |= {name: float(value) for name, value in values.items()}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave what runs inside out of this step's time, such as an evaluation."""
        start, waited = time.perf_counter(), self._comm.waited_seconds
        yield
        self._aside = (
            self._aside[0] + time.perf_counter() - start,
            self._aside[1] + self._comm.waited_seconds - waited,
        )

    @contextmanager
    def recorded(self, whose: HasRecorder, step: int) -> Iterator[None]:
        """Note what runs when in the last step; `end` draws it as `timeline.*`, a pipeline beside what it should do.

        Args:
            whose: the pipeline, or the DistributedDataParallel of a model that is in none.
        """
        if step < self.settings.steps - 1:
            yield
            return
        with whose.recorder:
            yield
        self._events = whose.recorder.gather(self._comm)

    def end(self, **figures: float) -> None:
        """Sum the run up on the screen and in `summary.json`, with `figures` of your own, unless it was stopped."""
        if self.stopped:
            return
        words = self._on_rank_0(lambda: self._sum_up(figures))
        self._draw()
        self._close()
        if words:
            self.say(f"{words}\nplots, metrics and checkpoints are in {self.folder}")

    def _sum_up(self, figures: dict[str, float]) -> str:
        """Write the summary; return what to say."""
        lines = self._files.read_metrics()
        if not lines:
            return ""  # all steps were done elsewhere, and nobody knows how
        seconds, speed, waited = totals(lines)
        summary = {"steps": len(lines), "seconds": seconds, "loss": lines[-1]["loss"], self._speed: speed}
        time_taken = f"{seconds:.0f} s" if seconds > 10 else f"{seconds:.1f} s"
        words = f"{len(lines)} steps in {time_taken}, {speed_text(speed or 0.0)} {self._samples}/s"
        if waited is not None:
            summary["exposed_comm_share"] = waited
            words += f", {waited:.0%} of it in waits for other ranks"
        num_skipped = sum(_was_skipped(line) for line in lines)
        if num_skipped:
            summary["skipped_steps"] = num_skipped
            words += f"; {num_skipped} skipped, as their gradients were not finite"
        self._files.write_summary(summary | figures)
        self._track({"step": lines[-1]["step"]} | figures)
        return words

    def _layout(self) -> dict[str, int]:
        """Return what a picture says of the processes that go on with a run."""
        parts = {name: getattr(self.settings, name) for name in ("dp", "pp") if hasattr(self.settings, name)}
        return {"ranks": self._comm.size} | parts

    @property
    def _speed(self) -> str:
        return f"{self._samples}_per_second"

    def _open(self) -> Path:
        self._files = RunFolder(self.settings.run)
        if self._files.warning is not None:
            self.warn(f"warning: {self._files.warning}")
        return self._files.path

    def _go_on(self, checkpoints: Checkpointer, batches: HasState, optimizer: Optimizer) -> int:
        """Load what is to be resumed; return the first step to do."""
        resume = self.settings.resume
        if resume is None:
            return 0
        loaded = checkpoints.load(None if resume == "auto" else resume)
        if loaded is None:
            self.warn(f"--resume auto finds nothing to go on with in {self.folder}: a new run starts there at step 0")
            return 0
        for reason in loaded.refused:
            self.warn(f"passed over {reason}")
        if loaded.step > self.settings.steps:
            raise ValueError(f"--steps must be at least the {loaded.step} that are done, got {self.settings.steps}")
        try:
            before = as_kind(loaded.state, Saved, "its state").settings
            batches.load_state_dict(loaded.state["data"])
        except (ValueError, KeyError) as error:
            raise ValueError(f"{loaded.path} is of no such run: {error}") from error
        changed = [
            f"{flag_of(f.name)} {before.get(f.name)} -> {getattr(self.settings, f.name)}"
            for f in fields(self.settings)
            if not f.metadata["once"] and before.get(f.name) != getattr(self.settings, f.name)
        ]
        self.say(f"goes on after step {loaded.step} of {loaded.path}, learning rate {optimizer.lr:.3g}")
        if changed:
            self.say(f"with {', '.join(changed)}")
        if loaded.step == self.settings.steps:
            self.say(f"all {loaded.step} steps are done: --steps {2 * loaded.step} would do more")
        return loaded.step

    def _begin(self, first: int) -> None:
        resume = self.settings.resume
        before = self.folder if resume in (None, "auto") else Path(resume).parent.parent
        settings = to_save(self.settings) | {"start": self._start_line}
        self._files.begin(settings, before / METRICS, first, goes_on=first < self.settings.steps)
        self._trackers = Trackers(self.settings, self.folder, first, settings)

    def _measure(self, seconds: float, waited: float) -> dict[str, Any]:
        """Return the line of the step that has ended."""
        if "loss" not in self._line:
            raise RuntimeError("every step logs its loss: call run.log(loss) before the end of the loop's body")
        line = self._line | {"seconds": seconds, self._speed: self._samples_per_step / seconds}
        if self._comm.size > 1:
            mean = self._comm.allreduce(np.array([waited]), op=ReduceOp.MEAN).wait()
            line["exposed_comm_seconds"] = float(mean[0])
        return line

    def _write(self, line: dict[str, Any]) -> str | None:
        """Write a line of metrics on rank 0; return what is wrong with that."""
        if self._comm.rank != 0:
            return None
        try:
            self._files.write_metrics(line)
        except OSError as error:
            return _said(error)
        self._track(line)
        return None

    def _track(self, line: dict[str, Any]) -> None:
        for fault in self._trackers.write(line) if self._trackers is not None else []:
            self.warn(fault)

    def _draw(self) -> None:
        if self._comm.rank == 0:
            for fault in self._files.draw(self._events, self.settings.steps - 1, loss_unit=self._loss_unit):
                self.warn(fault)

    def _close(self) -> None:
        if self._comm.rank == 0:
            for fault in self._trackers.close() if self._trackers is not None else []:
                self.warn(fault)
            self._files.close()

    def _on_rank_0(self, make: Callable[[], Any]) -> Any:
        """Return what rank 0 makes, on every rank; if that fails, all of them end with its one line."""
        made, fault = None, None
        if self._comm.rank == 0:
            try:
                made = make()
            except (OSError, ValueError) as error:
                fault = _said(error)
        made, fault = self._comm.broadcast_object((made, fault))
        if fault is not None:
            if hasattr(self, "_files"):
                self._close()
            fail(fault)
        return made


def _was_skipped(line: dict[str, Any]) -> bool:
    """Return whether no rank took this step; in a line that was read, null is a number that is not finite."""
    norm = line.get("grad_norm", 0.0)
    return norm is None or not math.isfinite(norm)


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror is not None:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
