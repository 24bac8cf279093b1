"""A run: what it prints, what it saves and when, how it goes on, and when it ends.

`record.py` has what rank 0 writes, `step_line.py` what is measured of a step, `recorded_step.py` what was noted of the
last, `resume.py` what goes on from a checkpoint, `attempts.py` the loop where ranks may die.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from distributed import Communicator, SoloCommunicator, describe, launched_by_mpi
from distributed.checkpoint.checkpointer import Checkpointer, CheckpointError
from distributed.comm.failure import Heal
from distributed.comm.outcome import note_run
from distributed.data_parallel.ddp import DistributedDataParallel
from distributed.protocols import HasState, HasTensors
from distributed.recovery.state import Training
from distributed.run.attempts import AttemptLoop, RunAttempt
from distributed.run.command_line import CHECKPOINTS, METRICS, fail, to_save, warn
from distributed.run.folder import RunFolder
from distributed.run.progress import Progress
from distributed.run.rank_0 import RankZeroError, in_one_line, on_rank_0
from distributed.run.record import Record
from distributed.run.recorded_step import HasRecorder, RecordedStep
from distributed.run.resume import take_state, warnings_of
from distributed.run.settings import RunSettings
from distributed.run.step_line import StepLine
from distributed.stop import StopRequest
from minigrad.optim import Optimizer
from minigrad.words import counted

T = TypeVar("T")
Trains = TypeVar("Trains", bound=Training)


class Run:
    """One training run.

    Its methods are collective; rank 0 alone prints and writes, but for checkpoints.

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
        comm: all ranks, or of a run that loses some those that train.
        folder: of this run.
        line: of metrics, of the step under way.
        training: what the last attempt was made for; None before there was one.
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
        self.comm = comm
        self.training: Any = None  # of the last attempt
        self._device = device
        self._loss_unit = loss_unit
        self.line = StepLine(samples, settings.batch * size)
        self._recorded = RecordedStep()
        self._start_line = ""
        self._has_said_how_to_end = False
        self._record: Record  # on rank 0 alone
        self.folder = Path()
        if not comm.is_newcomer:  # the others are in the midst of the run
            self._start_line = describe(comm, device=device)
            self.folder = self._on_rank_0(self._open)
            self.say(self._start_line)

    def say(self, words: str) -> None:
        """Print on rank 0, unless the run is quiet."""
        if self.comm.rank == 0 and not self.settings.quiet:
            print(words, flush=True)

    def keep(self, path: str | Path) -> None:
        """Copy a small file into the run's folder.

        Whoever reads its checkpoints may need it, such as a tokenizer.
        """
        if self._start_line:  # a newcomer finds it there
            self._on_rank_0(lambda: self._record.folder.keep(Path(path)))

    def warn(self, words: str) -> None:
        """Print on rank 0's stderr, also where the run is quiet."""
        if self.comm.rank == 0:
            warn(words)

    def steps(self, model: HasTensors, optimizer: Optimizer, batches: HasState) -> Iterator[int]:
        """Yield the number of each step that is still to be done.

        Between them it saves, and ends early if asked to.
        """
        settings = self.settings
        try:
            folder = self.folder / CHECKPOINTS
            checkpoints = Checkpointer(folder, self.comm, model, optimizer, keep_last=settings.keep)
            first = self._go_on(checkpoints, batches, optimizer, self.settings.resume)
            if first == settings.steps and self._on_rank_0(lambda: self._record.folder.is_finished()):
                self.stopped = True
                self._close()
                return
            self._on_rank_0(lambda: self._begin(first))
        except (CheckpointError, ValueError) as error:  # the same on every rank
            self._fail(error, None)
        try:
            yield from self._steps(first, checkpoints, optimizer, batches)
        except (CheckpointError, ValueError) as error:  # the same on every rank
            self._fail(error, checkpoints)

    def attempts(
        self,
        build: Callable[[Communicator], Trains],
        *,
        heal: Heal | None = Heal.REPLACE,
        num_spares: int = 0,
        buddy_every: int = 0,
        usable: Callable[[int], int] | None = None,
        rehearse: Callable[[], object] | None = None,
    ) -> Iterator[RunAttempt[Trains]]:
        """Yield attempts at the steps that are still to be done, whoever dies.

        They are those of `recovering`; see `attempts.py`.

        Args:
            build: makes model, optimizer, data and whatever a step needs, for the ranks that train.
            heal: None where the first death is to end the run.
            num_spares, buddy_every, usable, rehearse: see `recovering`.
        """
        with StopRequest(SoloCommunicator()) as stop:
            loop = AttemptLoop(self, build, stop)
            how = {"num_spares": num_spares, "buddy_every": buddy_every, "usable": usable, "rehearse": rehearse}
            try:
                with closing(loop):
                    yield from loop.attempts(heal, **how)
            except (CheckpointError, ValueError) as error:  # the same on every rank
                self._fail(error, None if loop.parts is None else loop.parts.checkpoints)
        if self.stopped:
            self._end_early(loop.num_done)
        self.stopped |= self.training is None  # a spare, or a run that was done before

    def enter(self, comm: Communicator) -> None:
        """Go on with these ranks, of which some may be new. Collective."""
        if comm is self.comm and self._start_line:
            return
        known = comm.gather_objects(self.folder if self._start_line else None)
        self.comm = comm
        self._start_line = describe(comm, device=self._device)
        self.folder = next(path for path in known if path is not None)
        if comm.rank == 0 and not hasattr(self, "_record"):
            self._record = Record(RunFolder(str(self.folder), patient=True), self.settings)

    def load(self, checkpoints: Checkpointer, batches: HasState, optimizer: Optimizer, *, again: bool) -> int:
        """Load what is to be resumed; return the first step to do.

        Args:
            checkpoints, batches, optimizer: what is loaded into.
            again: this run was under way already; then its newest checkpoint is loaded, if it has one.
        """
        resume = self.settings.resume
        if again and self._on_rank_0(lambda: self._record.folder.last_checkpoint() is not None):
            resume = "auto"
        return self._go_on(checkpoints, batches, optimizer, resume)

    def is_done(self, first: int) -> bool:
        """Return whether there is nothing to do, and end then. Collective."""
        if first < self.settings.steps or not self._on_rank_0(lambda: self._record.folder.is_finished()):
            return False
        self.stopped, self.training = False, None
        self._close()
        return True

    def begin_metrics(self, first: int, line: dict[str, Any] | None, *, at_start: bool) -> None:
        """Let the metrics go on at a step.

        Args:
            first: the step.
            line: of the step before, if there was one: it may be missing in the file.
            at_start: nothing of this run is there yet.
        """
        if at_start:
            self._on_rank_0(lambda: self._begin(first))
            self._say_how_to_end()
        elif self.comm.rank == 0:  # which may have been another process before
            self._record.begin(self._start_line, self.folder / METRICS, first, last=line)
            if not self._has_said_how_to_end:
                self._say_how_to_end()

    def begin_line(self, step: int, learning_rate: float, *, is_first: bool) -> None:
        """Begin the line of a step.

        Args:
            step: from 0.
            learning_rate: that it will be taken with.
            is_first: it is this process's first; then the line says on how many ranks.
        """
        self.line.begin(step, learning_rate, self._layout() if is_first else {})

    def _fail(self, error: Exception, checkpoints: Checkpointer | None) -> NoReturn:
        """End the run with one line; the error is the same on every rank."""
        if checkpoints is None:
            self._close()
            fail(str(error))
        with suppress(CheckpointError):
            checkpoints.wait()
        last = self._on_rank_0(lambda: self._record.folder.last_checkpoint())
        self._close()
        fail(f"{error}; " + ("nothing was saved" if last is None else f"the last checkpoint is {last}"))

    def _end_early(self, done: int) -> None:
        self._draw()
        self._close()
        self.say(f"stopped after step {done} as asked; to go on: --resume auto --run {self.folder}")

    def _say_how_to_end(self) -> None:
        kill = f"kill -TERM {os.getpid()}"
        # Open MPI's mpirun kills its ranks a moment after a Ctrl-C.
        way = kill if launched_by_mpi() else f"Ctrl-C, or {kill},"
        self.say(f"{self.folder}: {way} saves and ends this run")
        self._has_said_how_to_end = self.comm.rank == 0

    def _steps(self, first: int, checkpoints: Checkpointer, optimizer: Optimizer, batches: HasState) -> Iterator[int]:
        settings = self.settings
        self._say_how_to_end()
        look = settings.progress if self.comm.rank == 0 and not settings.quiet else "none"
        with StopRequest(self.comm) as stop, Progress(first, settings.steps, look=look) as progress:
            seconds = 0.0
            for step in range(first, settings.steps):
                start, waited = time.perf_counter(), self.comm.waited_seconds
                self.begin_line(step, optimizer.lr, is_first=step == first)
                yield step
                seconds_of_step = time.perf_counter() - start
                mean_wait = self.line.mean_wait(self.comm, self.comm.waited_seconds - waited)
                line = self.line.end(seconds_of_step, mean_wait)
                self.line.check_loss()
                fault = self.write_line()
                if fault is not None:
                    stop.request()
                done = step + 1
                seconds += line["seconds"]
                progress.update(self.line.words(done - first, seconds))
                asked = stop.agreed()
                if asked and (fault := self.comm.broadcast_object(fault)) is not None:
                    raise ValueError(fault)
                self.stopped = asked and done < settings.steps
                if self.stopped or done == settings.steps or done % settings.save_every == 0:
                    checkpoints.save(done, {"data": batches.state_dict()} | to_save(settings))
                if self.stopped:
                    break
            checkpoints.wait()
        if self.stopped:
            self._end_early(done)

    def log(self, loss: float, **more: float) -> None:
        """Note what this step did.

        Every step logs a loss; `more` goes into its line of metrics as it is. A `grad_norm` that is not finite says
        that no rank took this step, see `StepGuard`; the summary counts them.
        """
        self.note(loss=loss, **more)

    def note(self, **values: float) -> None:
        """Add to this step's line of metrics; a `validation_loss` is a point in loss.png."""
        self.line.note(**values)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave what runs inside out of this step's time, such as an evaluation."""
        with self.line.aside(self.comm):
            yield

    @contextmanager
    def recorded(self, whose: HasRecorder, step: int, ddp: DistributedDataParallel | None = None) -> Iterator[None]:
        """Note what runs when in the last step.

        `end` draws it as `timeline.*`, a pipeline beside what it should do, and says which buckets of gradients were
        late, and why: see `overlap_report`.

        Args:
            whose: the pipeline, or the DistributedDataParallel of a model that is in none.
            ddp: of the pipeline, where it has replicas.
        """
        if step < self.settings.steps - 1:
            yield
            return
        with whose.recorder:
            yield
        self._recorded = RecordedStep.of(whose, ddp, self.comm)

    def end(self, **figures: float) -> None:
        """Sum the run up on the screen and in `summary.json`, unless it was stopped."""
        if self.stopped:
            return
        words = self._on_rank_0(lambda: self._record.sum_up(self.line, figures))
        self._draw()
        self._close()
        if words:
            self.say("\n".join([words, *self._recorded.overlap]))
            self.say(f"plots, metrics and checkpoints are in {self.folder}")

    def _layout(self) -> dict[str, int]:
        """Return what a picture says of the processes that go on with a run."""
        parts = {name: getattr(self.settings, name) for name in ("dp", "pp") if hasattr(self.settings, name)}
        return {"ranks": self.comm.size} | parts

    def _open(self) -> Path:
        folder = RunFolder(self.settings.run)
        self._record = Record(folder, self.settings)
        if folder.warning is not None:
            self.warn(f"warning: {folder.warning}")
        note_run(folder.path)
        return folder.path

    def _go_on(self, checkpoints: Checkpointer, batches: HasState, optimizer: Optimizer, resume: str | None) -> int:
        """Load what is to be resumed; return the first step to do."""
        if resume is None:
            return 0
        loaded = checkpoints.load(None if resume == "auto" else resume)
        if loaded is None:
            self.warn(f"--resume auto finds nothing to go on with in {self.folder}: a new run starts there")
            return 0
        for warning in warnings_of(loaded):
            self.warn(warning)
        changed = take_state(loaded, batches, self.settings)
        self.say(f"goes on after step {loaded.step} of {loaded.path}, learning rate {optimizer.lr:.3g}")
        if changed:
            self.say(f"with {', '.join(changed)}")
        if loaded.step == self.settings.steps:
            self.say(f"nothing is left of {counted(loaded.step, 'step')}: --steps {2 * loaded.step} would do more")
        return loaded.step

    def _begin(self, first: int) -> None:
        resume = self.settings.resume
        before = self.folder if resume in (None, "auto") else Path(resume).parent.parent
        goes_on = first < self.settings.steps
        self._record.begin(self._start_line, before / METRICS, first, goes_on=goes_on)

    def write_line(self) -> str | None:
        """Write this step's line of metrics on rank 0; return what is wrong with that."""
        if self.comm.rank != 0:
            return None
        try:
            self._record.write(self.line.values)
        except OSError as error:
            return in_one_line(error)
        return None

    def _draw(self) -> None:
        if self.comm.rank == 0:
            self._record.draw(self._recorded.events, self._loss_unit)

    def _close(self) -> None:
        if self.comm.rank == 0:
            self._record.close()

    def _on_rank_0(self, make: Callable[[], T]) -> T:
        """Return what rank 0 makes, on every rank; if that fails, all of them end with its one line."""
        try:
            return on_rank_0(self.comm, make)
        except RankZeroError as error:
            if hasattr(self, "_record"):
                self._close()
            fail(str(error))
