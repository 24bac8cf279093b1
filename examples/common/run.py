"""A run: its folder, what it prints, its checkpoints, and when it ends.

runs/train_gpt-20261128-041500/
    settings.json       what was chosen, and what --resume starts from
    metrics.jsonl       one line a step
    checkpoints/        see distributed/checkpoint/files.py
    pid                 rank 0's process: `kill -TERM $(cat .../pid)` saves and ends the run
    summary.json        at the end, with loss.png, throughput.png, exposed_communication.png and timeline.*
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from common.command_line import CHECKPOINTS, RUNS, SETTINGS_FILE, fail, flag_of, script_name, to_save
from common.plots import draw_plots, read_metrics
from common.progress import Progress
from common.settings import RunSettings
from distributed import Communicator, ReduceOp, describe
from distributed.checkpoint.checkpointer import Checkpointer, CheckpointError, HasTensors
from distributed.stop import StopRequest
from minigrad.files import atomic_write
from minigrad.optim import Optimizer
from pipeline import PipelineExecutor, perfetto, picture, svg
from pipeline.schedules.measured import predict, timeline

METRICS = "metrics.jsonl"
PID = "pid"
SUMMARY = "summary.json"
TIMELINE_WIDTH = 900.0  # points


class HasState(Protocol):
    """Data with a position in it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


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
        stopped: whether a signal ended it before its last step.
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
        self._start_line = describe(comm, device=device)
        self.folder, fault = comm.broadcast_object(self._open_folder())
        if fault is not None:
            fail(fault)
        self.say(self._start_line)
        self.say(f"{self.folder}: Ctrl-C, or kill -TERM {os.getpid()}, saves and ends this run")

    def say(self, words: str) -> None:
        """Print on rank 0, unless the run is quiet."""
        if self._comm.rank == 0 and not self.settings.quiet:
            print(words, flush=True)

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
            yield from self._steps(first, checkpoints, optimizer, batches)
        except (CheckpointError, ValueError) as error:  # the same on every rank
            fail(str(error))

    def _steps(self, first: int, checkpoints: Checkpointer, optimizer: Optimizer, batches: HasState) -> Iterator[int]:
        settings = self.settings
        fault = self._comm.broadcast_object(self._begin_files(first))
        if fault is not None:
            fail(fault)
        look = settings.progress if self._comm.rank == 0 and not settings.quiet else "none"
        with (
            (self.folder / METRICS).open("a") if self._comm.rank == 0 else open(os.devnull, "w") as metrics,
            StopRequest(self._comm) as stop,
            Progress(first, settings.steps, look=look) as progress,
        ):
            seconds = 0.0
            for step in range(first, settings.steps):
                start, waited = time.perf_counter(), self._comm.waited_seconds
                self._line = {"step": step, "learning_rate": optimizer.lr}
                yield step
                line = self._measure(time.perf_counter() - start, self._comm.waited_seconds - waited)
                if not math.isfinite(line["loss"]):
                    checkpoints.wait()
                    raise ValueError(
                        f"the loss of step {step} is {line['loss']}, and what follows would be too: go on from a "
                        f"checkpoint in {checkpoints.folder} with a lower --lr"
                    )
                metrics.write(json.dumps(line) + "\n")
                metrics.flush()  # what a kill leaves must reach the checkpoint that it leaves
                done = step + 1
                seconds += line["seconds"]
                speed = (done - first) * self._samples_per_step / seconds
                progress.update(f"loss {line['loss']:.3f}, {speed:,.0f} {self._samples}/s")
                self.stopped = stop.agreed() and done < settings.steps
                if self.stopped or done == settings.steps or done % settings.save_every == 0:
                    checkpoints.save(done, {"data": batches.state_dict()} | to_save(settings))
                if self.stopped:
                    break
            checkpoints.wait()
        if self.stopped:
            self._leave()
            self.say(f"stopped after step {done} as asked; to go on: --resume auto --run {self.folder}")

    def log(self, loss: float, **more: float) -> None:
        """Note what this step did. Every step logs a loss; `more` goes into its line of metrics as it is."""
        self._line |= {"loss": loss} | more

    @contextmanager
    def recorded(self, pipe: PipelineExecutor, step: int) -> Iterator[None]:
        """Write down when each action of the last step ran, beside when it should have: `timeline.*`."""
        if step < self.settings.steps - 1:
            yield
            return
        with pipe.recorder:
            yield
        events = pipe.recorder.gather(self._comm)
        if self._comm.rank == 0:
            measured = timeline(events)
            predicted = predict(measured)
            scale = TIMELINE_WIDTH / max(measured.makespan, predicted.makespan)
            (self.folder / "timeline.json").write_text(perfetto(events))
            for name, shown in {"measured": measured, "predicted": predicted}.items():
                page = svg(picture(shown, f"step {step}, {name}: {1e3 * shown.makespan:.1f} ms", scale=scale))
                (self.folder / f"timeline_{name}.svg").write_text(page)

    def end(self, **figures: float) -> None:
        """Sum the run up on the screen and in `summary.json`, with `figures` of your own, unless it was stopped."""
        if self.stopped or self._comm.rank != 0:
            return
        steps = read_metrics(self.folder / METRICS)  # those before a resume too
        if not steps:
            return  # all were done elsewhere, and nobody knows how
        seconds = sum(step["seconds"] for step in steps)
        samples = sum(step[self._speed] * step["seconds"] for step in steps)
        waited = sum(step.get("exposed_comm_seconds", 0.0) for step in steps)
        summary = {"steps": len(steps), "seconds": seconds, "loss": steps[-1]["loss"], self._speed: samples / seconds}
        time_taken = f"{seconds:.0f} s" if seconds > 10 else f"{seconds:.1f} s"
        words = f"{len(steps)} steps in {time_taken}, {samples / seconds:,.0f} {self._samples}/s"
        if self._comm.size > 1:
            summary["exposed_comm_share"] = waited / seconds
            words += f", {waited / seconds:.0%} of it in waits for other ranks"
        with atomic_write(self.folder / SUMMARY) as path:
            path.write_text(json.dumps(summary | figures, indent=2) + "\n")
        self._leave()
        self.say(f"{words}\nplots, metrics and checkpoints are in {self.folder}")

    @property
    def _speed(self) -> str:
        return f"{self._samples}_per_second"

    def _open_folder(self) -> tuple[Path, str | None]:
        """Make the folder on rank 0, and keep other processes out of it; return what is wrong with it there."""
        given = self.settings.run
        folder = Path(given) if given is not None else RUNS / f"{script_name()}-{datetime.now():%Y%m%d-%H%M%S}"
        if self._comm.rank != 0:
            return folder, None
        try:
            if given is None:
                folder = _make_new(folder)
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / PID, os.O_RDWR | os.O_CREAT)
            weakref.finalize(self, os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with the process, however that ends
            (folder / PID).write_text(f"{os.getpid()}\n")
        except BlockingIOError:
            return folder, f"{folder} is being run by process {(folder / PID).read_text().strip()}: end that first"
        except OSError as error:
            return folder, f"--run must be a folder that can be written to, got {folder}: {error.strerror}"
        return folder, None

    def _go_on(self, checkpoints: Checkpointer, batches: HasState, optimizer: Optimizer) -> int:
        """Load what is to be resumed; return the first step to do."""
        resume = self.settings.resume
        if resume is None:
            return 0
        loaded = checkpoints.load(None if resume == "auto" else resume)
        if loaded is None:
            self.say("nothing to resume yet: starts at step 0")
            return 0
        for reason in loaded.refused:
            self.warn(f"passed over {reason}")
        if loaded.step > self.settings.steps:
            raise CheckpointError(
                f"--steps must be at least the {loaded.step} that are done, got {self.settings.steps}"
            )
        try:
            batches.load_state_dict(loaded.state["data"])
            before = dict(loaded.state["settings"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{loaded.path} is of no such run: {error}") from error
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

    def _begin_files(self, first: int) -> str | None:
        """Write the settings, and the metrics up to where the run goes on; return what is wrong with that."""
        if self._comm.rank != 0:
            return None
        resume = self.settings.resume
        before = (self.folder if resume in (None, "auto") else Path(resume).parent.parent) / METRICS
        try:
            kept = [line for line in read_metrics(before) if line["step"] < first] if first and before.exists() else []
            with atomic_write(self.folder / METRICS) as unfinished:
                unfinished.write_text("".join(json.dumps(line) + "\n" for line in kept))
            with atomic_write(self.folder / SETTINGS_FILE) as unfinished:
                settings = to_save(self.settings) | {"start": self._start_line}
                unfinished.write_text(json.dumps(settings, indent=2) + "\n")
            if first < self.settings.steps:
                (self.folder / SUMMARY).unlink(missing_ok=True)
        except (OSError, ValueError) as error:
            return str(error)
        return None

    def _measure(self, seconds: float, waited: float) -> dict[str, Any]:
        """Return the line of the step that has ended."""
        if "loss" not in self._line:
            raise RuntimeError("every step logs its loss: call run.log(loss) before the end of the loop's body")
        line = self._line | {"seconds": seconds, self._speed: self._samples_per_step / seconds}
        if self._comm.size > 1:
            mean = self._comm.allreduce(np.array([waited]), op=ReduceOp.MEAN).wait()
            line["exposed_comm_seconds"] = float(mean[0])
        return line

    def _leave(self) -> None:
        """Draw the plots, and take the sign off the door."""
        if self._comm.rank != 0:
            return
        try:
            draw_plots(self.folder, loss_unit=self._loss_unit)
        except ModuleNotFoundError as error:
            self.say(f"no plots: {error}")
        (self.folder / PID).unlink(missing_ok=True)  # last: from now on another process may run here


def _make_new(folder: Path, number: int = 1) -> Path:
    """Make a folder of this name, or of the next one that no other run of this second has taken."""
    new = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
    try:
        new.mkdir(parents=True)
    except FileExistsError:
        return _make_new(folder, number + 1)
    return new
