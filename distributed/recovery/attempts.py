"""The loop of a run that goes on when ranks die.

    for attempt in recovering(comm, build, num_steps=300):
        with attempt as training:                   # what `build(comm)` made for the ranks that there are
            x, y = training.data.next()
            training.optimizer.zero_grad()
            loss = ...                              # forward, backward, reductions, clipping
            attempt.commit()                        # all ranks have come this far, or the step is done again
        log(attempt.step, loss)

Parameters change only after all ranks agreed that everything a step needs of others is done: `commit` asks, and then
lets the optimizer step, which needs nobody. So a death leaves every living rank at the beginning of the same step, or
at its end. Each living rank votes once an attempt, whatever happens to it, which keeps the votes matched.

After a death the ranks heal their world, `build` makes everything anew for it, and the state comes, in this order, from
whoever lives and has it; from a buddy's copy, with the steps since done again; or from `restore`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

from distributed.comm.communicator import Array, Communicator
from distributed.comm.failure import Heal, RankFailure
from distributed.recovery.buddies import Buddies
from distributed.recovery.state import MissingError, Training, arrays_of, hand_over

T = TypeVar("T", bound=Training)


@dataclass(frozen=True)
class Recovery:
    """One recovery, for a log.

    Attributes:
        step: the next to be done.
        source: where the state came from: "a living rank", "a buddy's copy", "the restore function", "the beginning".
        num_redone: steps that were done before and are done again.
        num_ranks: of the healed world.
        seconds: from the moment that a rank saw the failure until all had the state again.
    """

    step: int
    source: str
    num_redone: int
    num_ranks: int
    seconds: float


class Attempt(Generic[T]):
    """One try at a step; a context, whose `as` is the training. An attempt that meets a death ends without an error.

    Attributes:
        step: from 0.
        comm: all ranks that there are.
        training: what `build` made for them.
        recovery: what went before this attempt, if that was a recovery.
        committed: whether the step is done.
    """

    def __init__(self, loop: _Loop[T], step: int, training: T, recovery: Recovery | None) -> None:
        self.step = step
        self.training = training
        self.comm = loop.comm
        self.recovery = recovery
        self.committed = False
        self._loop = loop
        self._voted = False

    def commit(self, *, take: bool = True) -> None:
        """Agree that the step is done everywhere, and let the optimizer step. Collective.

        Args:
            take: False leaves the parameters as they are, say because the gradients are not finite; the same on every
                rank.
        Raises:
            RankFailure: it is not, and will be done again.
        """
        if self._voted:
            raise RuntimeError(f"step {self.step} was committed already")
        self._loop.before_vote()
        self._voted = True
        if not self.comm.vote(True):
            raise RankFailure
        if take:
            self.training.optimizer.step()
        self.committed = True
        self._loop.done(self.step + 1)

    def __enter__(self) -> T:
        return self.training

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if error is None:
            if not self._voted:
                raise RuntimeError(f"step {self.step} ended without attempt.commit(), which lets the optimizer step")
            return False
        if not isinstance(error, RankFailure):
            return False
        if not self._voted:
            self._voted = True
            self.comm.vote(False)
        return True  # a committed step is done: the next attempt meets the failure


def recovering(
    comm: Communicator,
    build: Callable[[Communicator], T],
    *,
    num_steps: int,
    heal: Heal = Heal.REPLACE,
    restore: Callable[[T], int] | None = None,
    buddy_every: int = 0,
) -> Iterator[Attempt[T]]:
    """Yield attempts at the steps of a run until all are done, whoever dies. Collective.

    Args:
        comm: all ranks, of a world that survives failures; any other raises what it always does.
        build: makes model, optimizer, data and whatever a step needs, for the ranks of a communicator; called again
            after each failure. What it builds must depend on nothing else.
        num_steps: of the whole run.
        heal: whether the dead are replaced, or the others go on without them.
        restore: loads a saved state, say from a checkpoint, into a training; returns the number of steps that are done,
            the same on every rank. Called at the beginning, and where nobody living has all of the state.
        buddy_every: steps between two rounds of copies in a buddy's memory; 0 for none.
    """
    loop = _Loop(comm, build, heal, restore, buddy_every)
    loop.begin()
    while loop.step < num_steps:
        attempt = loop.attempt()
        yield attempt
        if not attempt.committed:
            loop.recover()


class _Loop(Generic[T]):
    """Where a run is, and how it gets back there.

    Attributes:
        comm: the world, healed after each failure.
        step: number of steps that are done.
    """

    def __init__(
        self,
        comm: Communicator,
        build: Callable[[Communicator], T],
        heal: Heal,
        restore: Callable[[T], int] | None,
        buddy_every: int,
    ) -> None:
        if buddy_every < 0:
            raise ValueError(f"buddy_every must be at least 0, got {buddy_every}")
        self.comm = comm
        self.step = 0
        self._build = build
        self._heal = heal
        self._restore = restore
        self._buddy_every = buddy_every
        self._training: T | None = None
        self._buddies: Buddies | None = None
        self._data: dict[str, Any] = {}  # its position at the beginning of the step
        self._buffers: dict[str, Array] = {}  # as they were then
        self._recovery: Recovery | None = None

    def attempt(self) -> Attempt[T]:
        assert self._training is not None
        recovery, self._recovery = self._recovery, None
        return Attempt(self, self.step, self._training, recovery)

    def before_vote(self) -> None:
        if self._buddies is not None:
            self._buddies.wait()

    def done(self, step: int) -> None:
        """Note that a step was committed; copy everything now and then."""
        assert self._training is not None
        self._note(step)
        if self._buddies is not None:
            self._buddies.agreed()
            if step % self._buddy_every == 0:
                self._copy()

    def begin(self) -> None:
        """Build for the first time, or join a run as a replacement."""
        if self.comm.is_newcomer:
            self._rebuild(time.perf_counter())
            return
        try:
            training = self._build(self.comm)
            step = 0 if self._restore is None else self._restore(training)
            buddies = self._new_buddies(training)
            whole = True
        except RankFailure:
            whole = False
        if self.comm.vote(whole):
            self._take(training, buddies, step)
        else:
            self.recover()

    def recover(self) -> None:
        start = time.perf_counter()
        self.comm = self.comm.heal(self._heal)
        self._rebuild(start)

    def _rebuild(self, start: float) -> None:
        """Build for the ranks that there are, and get the state; again, if a rank dies over it."""
        while True:
            try:
                training = self._build(self.comm)
                step, source = self._fetch(training)
                reached, seconds = map(
                    max, *self.comm.gather_objects((self.step, time.perf_counter() - start)), (0, 0.0)
                )
                buddies = self._new_buddies(training)
                whole = True
            except RankFailure:
                whole = False
            if self.comm.vote(whole):
                break
            self.comm = self.comm.heal(self._heal)
        self._take(training, buddies, step)
        self._recovery = Recovery(step, source, reached - step, self.comm.size, seconds)

    def _fetch(self, training: T) -> tuple[int, str]:
        """Fill a new training with the run's state; return its step and where it came from."""
        wanted = arrays_of(training)
        old = self._training
        mine = None if old is None else (self.step, old.optimizer.num_steps, self._data, arrays_of(old) | self._buffers)
        copied = None if self._buddies is None else self._buddies.complete
        for source, state in (("a living rank", mine), ("a buddy's copy", copied)):
            heads = [
                head for head in self.comm.gather_objects(None if state is None else state[:3]) if head is not None
            ]
            if not heads:
                continue
            try:
                hand_over(self.comm, {} if state is None else state[3], wanted)
            except MissingError:
                continue
            step, training.optimizer.num_steps, data = heads[0]
            training.data.load_state_dict(data)
            return step, source
        if self._restore is not None:
            return self._restore(training), "the restore function"
        return 0, "the beginning"

    def _take(self, training: T, buddies: Buddies | None, step: int) -> None:
        """Go on with a training that all ranks have whole."""
        if buddies is not None and self._buddies is not None:
            buddies.complete = self._buddies.complete  # what the ranks that live kept still counts
        self._training, self._buddies = training, buddies
        self._note(step)
        self._copy()

    def _note(self, step: int) -> None:
        """Remember what a failed attempt would change: all but parameters and optimizer, which wait for the vote."""
        assert self._training is not None
        self.step = step
        self._data = self._training.data.state_dict()
        self._buffers = {f"buffer/{b.name}": b.data.copy() for b in self._training.model.buffers()}

    def _copy(self) -> None:
        """Begin a round of copies."""
        if self._buddies is not None and self._training is not None:
            with suppress(RankFailure):  # the next attempt meets it
                self._buddies.begin(self.step, self._training.optimizer.num_steps, self._data)

    def _new_buddies(self, training: T) -> Buddies | None:
        return Buddies(self.comm, arrays_of(training)) if self._buddy_every else None
