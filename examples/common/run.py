"""A run: its folder, what it prints, its checkpoints, and when it ends.

runs/train_gpt-20261128-041500/
    settings.json       what was chosen, and what --resume starts from
    metrics.jsonl       one line a step
    checkpoints/        see distributed/checkpoint_files.py
    pid                 of rank 0: `kill -TERM $(cat .../pid)` saves and ends the run
    summary.json        at the end, with loss.png, throughput.png, exposed_communication.png and timeline.*
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from common.command_line import CHECKPOINTS, RUNS, SETTINGS_FILE, fail, settings_json
from common.plots import draw_plots, read_metrics
from common.progress import Progress
from common.settings import RunSettings
from distributed import Communicator, ReduceOp, describe
from distributed.checkpoint import Checkpointer, CheckpointError, HasTensors
from distributed.stop import StopRequest
from minigrad.files import whole
from minigrad.optim import Optimizer
from pipeline import PipelineExecutor, perfetto, picture, svg
from pipeline.measured import predict, timeline

METRICS = "metrics.jsonl"
PID = "pid"
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
        new = RUNS / f"{Path(sys.argv[0]).stem}-{datetime.now():%Y%m%d-%H%M%S}"
        self.folder: Path = comm.gather_objects(Path(settings.run) if settings.run else new)[0]
        fault = comm.gather_objects(self._open_folder())[0]
        if fault is not None:
            fail(fault)
        self.say(describe(comm, device=device))
        self.say(f"{self.folder}: to save and end this run early, kill -TERM {os.getpid()}")

    def say(self, words: str) -> None:
        """Print on rank 0, unless the run is quiet."""
        if self._comm.rank == 0 and not self.settings.quiet:
            print(words, flush=True)

    def steps(self, model: HasTensors, optimizer: Optimizer, batches: HasState) -> Iterator[int]:
        """Yield the number of each step that is still to be done; between them save, and end early if asked to."""
        settings = self.settings
        try:
            folder = self.folder / CHECKPOINTS
            checkpoints = Checkpointer(folder, self._comm, model, optimizer, keep_last=settings.keep)
            first = self._go_on(checkpoints, batches, optimizer)
        except (CheckpointError, ValueError) as error:  # the same on every rank
            fail(str(error))
        look = settings.progress if self._comm.rank == 0 and not settings.quiet else "none"
        with (
            self._metrics(first) as metrics,
            StopRequest(self._comm) as stop,
            Progress(first, settings.steps, look=look) as progress,
        ):
            seconds = 0.0
            for step in range(first, settings.steps):
                start, waited = time.perf_counter(), self._comm.waited_seconds
                self._line = {"step": step, "learning_rate": optimizer.lr}
                yield step
                line = self._measure(time.perf_counter() - start, self._comm.waited_seconds - waited)
                metrics.write(json.dumps(line) + "\n")
                metrics.flush()  # what a kill leaves must reach the checkpoint that it leaves
                done = step + 1
                seconds += line["seconds"]
                speed = (done - first) * self._samples_per_step / seconds
                progress.update(f"loss {line['loss']:.3f}, {speed:,.0f} {self._samples}/s")
                self.stopped = stop.agreed() and done < settings.steps
                if self.stopped or done == settings.steps or done % settings.save_every == 0:
                    checkpoints.save(done, {"data": batches.state_dict(), "settings": asdict(settings)})
                if self.stopped:
                    break
            checkpoints.wait()
        if self.stopped:
            if self._comm.rank == 0:
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
        """Draw the plots, and sum the run up on the screen and in `summary.json`, with `figures` of your own."""
        if self._comm.rank != 0:
            return
        steps = read_metrics(self.folder / METRICS)  # those before a resume too
        seconds = sum(step["seconds"] for step in steps)
        summary = {
            "steps": len(steps),
            "seconds": seconds,
            "loss": steps[-1]["loss"],
            self._speed: sum(step[self._speed] * step["seconds"] for step in steps) / seconds,
            "exposed_comm_share": sum(step["exposed_comm_seconds"] for step in steps) / seconds,
        } | figures
        with whole(self.folder / "summary.json") as path:
            path.write_text(json.dumps(summary, indent=2) + "\n")
        self._leave()
        self.say(
            f"{len(steps)} steps in {seconds:.0f} s, {summary[self._speed]:,.0f} {self._samples}/s, "
            f"{summary['exposed_comm_share']:.0%} of it in waits for other ranks"
        )

    @property
    def _speed(self) -> str:
        return f"{self._samples}_per_second"

    def _open_folder(self) -> str | None:
        """Make the folder on rank 0, and say there what is wrong with it."""
        if self._comm.rank != 0:
            return None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole(self.folder / SETTINGS_FILE) as path:
                path.write_text(settings_json(self.settings))
            (self.folder / PID).write_text(f"{os.getpid()}\n")
        except OSError as error:
            return f"--run must be a folder that can be written to, got {self.folder}: {error.strerror}"
        return None

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
            self.say(f"passed over {reason}")
        batches.load_state_dict(loaded.state["data"])
        if loaded.step > self.settings.steps:
            raise ValueError(f"--steps must be at least the {loaded.step} that are done, got {self.settings.steps}")
        self.say(f"goes on after step {loaded.step} of {loaded.path}, learning rate {optimizer.lr:.3g}")
        return loaded.step

    @contextmanager
    def _metrics(self, first: int) -> Iterator[IO[str]]:
        """Open the metrics, which keep the lines of the steps that are not done again."""
        if self._comm.rank != 0:
            with open(os.devnull, "w") as nowhere:
                yield nowhere
            return
        path = self.folder / METRICS
        kept = [line for line in read_metrics(path) if line["step"] < first] if path.exists() and first else []
        with whole(path) as unfinished:
            unfinished.write_text("".join(json.dumps(line) + "\n" for line in kept))
        with path.open("a") as file:
            yield file

    def _measure(self, seconds: float, waited: float) -> dict[str, Any]:
        """Return the line of the step that has ended."""
        if "loss" not in self._line:
            raise RuntimeError("every step logs its loss: call run.log(loss) before the end of the loop's body")
        waited = float(self._comm.allreduce(np.array([waited]), op=ReduceOp.MEAN).wait()[0])
        speed = self._samples_per_step / seconds
        return self._line | {"seconds": seconds, self._speed: speed, "exposed_comm_seconds": waited}

    def _leave(self) -> None:
        """Draw the plots, and take the sign off the door. For rank 0."""
        (self.folder / PID).unlink(missing_ok=True)
        try:
            draw_plots(self.folder, loss_unit=self._loss_unit)
        except ModuleNotFoundError as error:
            self.say(f"no plots: {error}")
