"""`Run.attempts`: a run whose ranks may die, see `distributed.recovery`; in any other world it is `Run.steps`.

    for attempt in run.attempts(build):
        with attempt as training:
            ...
            attempt.commit(loss, grad_norm=norm)

What a run keeps between its steps must outlive its ranks as the weights do. Its checkpoints, its request to stop and
its progress bar are made anew for each layout. Its metrics have one line a step: the line of the last step travels with
the position in the data, so whoever is rank 0 then adds it where the rank 0 before died over it; lines of steps that
are done again go. The last save is an attempt of its own: a death in it is healed, and it is done again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from distributed.checkpoint.checkpointer import Checkpointer
from distributed.comm.communicator import Communicator
from distributed.comm.failure import Heal, RankFailure
from distributed.protocols import HasState, HasTensors
from distributed.recovery.attempts import Attempt, recovering
from distributed.recovery.loop import Recovery
from distributed.recovery.sources import RESTORED
from distributed.recovery.state import Training
from distributed.run.command_line import CHECKPOINTS, to_save, warn
from distributed.run.progress import Progress
from distributed.run.resume import FORGETS
from distributed.stop import StopRequest
from minigrad.optim import Optimizer

if TYPE_CHECKING:
    from distributed.run.run import Run

T = TypeVar("T", bound=Training)


class _Position:
    """The position in the data, and the line of metrics of the step that led to it."""

    def __init__(self, data: HasState) -> None:
        self.data = data
        self.line: dict[str, Any] | None = None
        self.finish: Callable[[], dict[str, Any]] | None = None  # the line of the step that is just committed

    def state_dict(self) -> dict[str, Any]:
        if self.finish is not None:
            self.line, self.finish = self.finish(), None
        return {"data": self.data.state_dict(), "line": self.line}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.load_state_dict(state["data"])
        self.line = state["line"]


class _Parts(Generic[T]):
    """What is made for a layout: the caller's training, and what the run has of its own."""

    def __init__(self, training: T, checkpoints: Checkpointer) -> None:
        self.training = training
        self.checkpoints = checkpoints
        self.data = _Position(training.data)

    @property
    def model(self) -> HasTensors:
        return self.training.model

    @property
    def optimizer(self) -> Optimizer:
        return self.training.optimizer


class RunAttempt(Generic[T]):
    """One try at a step of a run; a context, whose `as` is the training.

    Attributes:
        step: from 0.
    """

    def __init__(self, run: Run, attempt: Attempt[_Parts[T]]) -> None:
        self.step = attempt.step
        self._run = run
        self._attempt = attempt
        self._start = time.perf_counter()
        self._waited = attempt.comm.waited_seconds

    def commit(self, loss: float, *, take: bool = True, **more: float) -> None:
        """Log what the step did, and step once all ranks have come so far. Collective.

        Args:
            loss: of all ranks, the same on each.
            take: False leaves the parameters as they are; the same on every rank.
            more: goes into the step's line of metrics.
        Raises:
            RankFailure: the step is not done, and will be done again.
        """
        run, attempt = self._run, self._attempt
        run.log(loss, **more)
        waited = run.line.mean_wait(attempt.comm, attempt.comm.waited_seconds - self._waited)
        attempt.training.data.finish = lambda: run.line.end(time.perf_counter() - self._start, waited)
        attempt.commit(take=take)

    def __enter__(self) -> T:
        self._attempt.__enter__()
        return self._attempt.training.training

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        return self._attempt.__exit__(kind, error, at)


class AttemptLoop(Generic[T]):
    """The loop of `Run.attempts` on one rank."""

    def __init__(self, run: Run, build: Callable[[Communicator], T], stop: StopRequest) -> None:
        self.run = run
        self.parts: _Parts[T] | None = None  # those that the last attempt was made with
        self.num_done = 0
        self._build = build
        self._stop = stop
        self._saved = -1  # the step of the last save
        self._progress: Progress | None = None
        self._first = 0  # of what the progress bar counts
        self._seconds = 0.0

    def build(self, comm: Communicator) -> _Parts[T]:
        """Make everything for the ranks that there are. Collective."""
        run = self.run
        run.enter(comm)
        if self.parts is not None:
            self.parts.checkpoints.abandon()
        training = self._build(comm)
        self._stop.rebind(comm)
        folder = run.folder / CHECKPOINTS
        checkpoints = Checkpointer(folder, comm, training.model, training.optimizer, keep_last=run.settings.keep)
        return _Parts(training, checkpoints)

    def restore(self, parts: _Parts[T]) -> int:
        """Load what the run goes on from. Collective.

        Returns the number of steps that are done.
        """
        again = any(self.run.comm.gather_objects(self.parts is not None))  # a rank that is new knows of no time before
        self._saved = self.run.load(parts.checkpoints, parts.training.data, parts.optimizer, again=again)
        return self._saved

    def attempts(self, heal: Heal | None, **how: Any) -> Iterator[RunAttempt[T]]:
        run, num_steps = self.run, self.run.settings.steps
        is_over = False
        how |= {"restore": self.restore}
        if heal is not None:
            how |= {"heal": heal, "say": self._say}
        for attempt in recovering(run.comm, self.build, num_steps=num_steps + 1, **how):
            parts = attempt.training
            if parts is not self.parts:
                is_first, self.parts = attempt.recovery is None, parts
                run.training = parts.training
                if is_first and run.is_done(attempt.step):
                    attempt.end()
                    return
                run.begin_metrics(attempt.step, parts.data.line, at_start=is_first)
                self._show(attempt.step)
                if attempt.recovery is not None:
                    parts.checkpoints.own_folder()  # the state may have come from ranks that live
                    for line in words_of(attempt.recovery):
                        run.warn(line)
            if attempt.step == num_steps:
                with attempt:
                    if self._saved != num_steps:
                        self._save(num_steps)
                    parts.checkpoints.wait()
                    attempt.commit(take=False)
                is_over = attempt.committed
                continue
            run.begin_line(attempt.step, parts.optimizer.lr, is_first=attempt.step == self._first)
            if attempt.recovery is not None:
                run.note(redone_steps=attempt.recovery.num_redone, recovery_seconds=attempt.recovery.seconds)
            yield RunAttempt(run, attempt)
            self.num_done = attempt.step + attempt.committed
            if attempt.committed and self._end_step(attempt.step):
                run.stopped = True
                attempt.end()
        if not is_over and not run.stopped:  # the others ended it, for whom this rank waits as a spare
            run.training = None

    def _end_step(self, step: int) -> bool:
        """Write, show and save what a step has led to; return whether the run ends here, as it was asked to."""
        run, settings = self.run, self.run.settings
        run.line.check_loss()
        fault = run.write_line()
        if fault is not None:
            self._stop.request()
        self._seconds += run.line.values["seconds"]
        if self._progress is not None:
            self._progress.update(run.line.words(step + 1 - self._first, self._seconds))
        try:
            asked = self._stop.agreed()
            if asked and (fault := run.comm.broadcast_object(fault)) is not None:
                raise ValueError(fault)
            ends = asked and step + 1 < settings.steps
            if ends or ((step + 1) % settings.save_every == 0 and step + 1 < settings.steps):
                self._save(step + 1)
            if ends:
                assert self.parts is not None
                self.parts.checkpoints.wait()
        except RankFailure:
            return False  # the next attempt meets it, and the stop is asked for again after it
        return ends

    def _save(self, step: int) -> None:
        assert self.parts is not None
        self.parts.checkpoints.save(step, {"data": self.parts.training.data.state_dict()} | to_save(self.run.settings))
        self._saved = step

    def _show(self, first: int) -> None:
        self.close()
        self._first, self._seconds = first, 0.0
        settings = self.run.settings
        if self.run.comm.rank == 0:
            self._progress = Progress(first, settings.steps, look="none" if settings.quiet else settings.progress)

    def _say(self, words: str) -> None:
        """Tell of a death, on whatever rank is left to."""
        self.close()
        warn(words)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.__exit__(None, None, None)
            self._progress = None


def words_of(recovery: Recovery) -> list[str]:
    """Say, in a line or two, how ranks were lost and what became of it."""
    if recovery.source == RESTORED:
        recovery = replace(recovery, source="the last checkpoint" if recovery.step else "the beginning")
    return [str(recovery), FORGETS] if recovery.forgets else [str(recovery)]
