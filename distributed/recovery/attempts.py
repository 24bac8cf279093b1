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
whoever lives and has it; from a buddy's copy, with the steps since done again; or from `restore`. Before they heal,
they leave what they have for a job that comes after theirs, see `rescue.py`: then it comes from there.

State that one rank alone has (a stage without a replica, a shard of the optimizer's, what a compression keeps) dies
with it. A buddy's copy has it, so all go back to that. What a compression keeps is of one layout: others begin anew.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from distributed.comm.communicator import Array, Communicator
from distributed.comm.failure import Heal, RankFailure
from distributed.recovery.buddies import Buddies
from distributed.recovery.rescue import Rescue
from distributed.recovery.state import (
    Extent,
    MissingError,
    Snapshot,
    Training,
    changing_of,
    fill,
    hand_over,
    memories_of,
    room_for,
    state_of,
)

T = TypeVar("T", bound=Training)

RESTORED = "the restore function"
"""The source of a state that `restore` loaded."""


@dataclass(frozen=True)
class Recovery:
    """One recovery, for a log.

    Attributes:
        step: the next to be done.
        source: where the state came from: "a living rank", "a buddy's copy", "the job before" (which was lost),
            RESTORED, "the beginning".
        num_redone: steps that were done before and are done again.
        num_ranks: that train now.
        forgets: what a comm hook keeps between steps (compression) began anew, as the ranks have another layout.
        seconds: from the moment that a rank saw the failure, or the launcher saw that the job was lost, until all had
            the state again.
    """

    step: int
    source: str
    num_redone: int
    num_ranks: int
    forgets: bool
    seconds: float


class _Found(NamedTuple):
    """Where a training has its state from."""

    step: int
    source: str
    forgets: bool = False


class Attempt(Generic[T]):
    """One try at a step; a context, whose `as` is the training. An attempt that meets a death ends without an error.

    Attributes:
        step: from 0.
        comm: all ranks that train; spares are not among them.
        training: what `build` made for them.
        recovery: what went before this attempt, if that was a recovery.
        committed: whether the step is done.
    """

    def __init__(self, loop: _Loop[T], step: int, training: T, recovery: Recovery | None) -> None:
        self.step = step
        self.training = training
        assert loop.comm is not None
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
        if not self._loop.world.vote(True):
            raise RankFailure
        if take:
            with suppress(RankFailure):  # whoever sends new values on has them; the next attempt meets the death
                self.training.optimizer.step()
        self.committed = True
        self._loop.done(self.step + 1)

    def end(self) -> None:
        """Let this be the last attempt, which spares have to be told: after a `break` they would wait. Collective."""
        self._loop.end()

    def __enter__(self) -> T:
        return self.training

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if error is None:
            if not self._voted:
                raise RuntimeError(f"step {self.step} ended without attempt.commit(), which lets the optimizer step")
            return False
        if isinstance(error, TimeoutError):  # a rank hangs, say: the launcher may start the job again
            self._loop.leave_behind()
        if not isinstance(error, RankFailure):
            return False
        if not self._voted:
            self._voted = True
            self._loop.world.vote(False)
        return True  # a committed step is done: the next attempt meets the failure


def recovering(
    comm: Communicator,
    build: Callable[[Communicator], T],
    *,
    num_steps: int,
    heal: Heal = Heal.REPLACE,
    restore: Callable[[T], int] | None = None,
    buddy_every: int = 0,
    num_spares: int = 0,
    usable: Callable[[int], int] | None = None,
    rehearse: Callable[[], object] | None = None,
) -> Iterator[Attempt[T]]:
    """Yield attempts at the steps of a run until all are done, whoever dies. Collective.

    Args:
        comm: all ranks, of a world that survives failures; any other raises what it always does.
        build: makes model, optimizer, data and whatever a step needs, for the ranks of a communicator; called again
            after each failure. What it builds must depend on nothing else.
        num_steps: of the whole run.
        heal: whether the dead are replaced, or the others go on without them, with spares in their places if there are.
        restore: loads a saved state, say from a checkpoint, into a training; returns the number of steps that are done,
            the same on every rank. Called at the beginning, and where nobody living has all of the state.
        buddy_every: steps between two rounds of copies in a buddy's memory; 0 for none.
        num_spares: ranks that wait, the last ones at first, and step in when others die. To them the loop yields
            nothing before they do.
        usable: how many of so many ranks a layout has a place for; those left over wait as spares. All, by default.
        rehearse: called once on each spare, before it waits, say to take a step of a small model by itself: what steps
            load when they are first taken is there then when the others need this one.
    Raises:
        ValueError: buddy_every or num_spares is negative, or no rank is left that trains.
    """
    loop = _Loop(comm, build, heal, restore, buddy_every, num_spares, usable)
    loop.begin()
    if loop.comm is None and rehearse is not None:
        rehearse()
    while loop.step < num_steps and not loop.ended:
        if loop.comm is None:
            loop.wait_as_spare()
            continue
        attempt = loop.attempt()
        yield attempt
        if not attempt.committed:
            loop.recover()


class _Loop(Generic[T]):
    """Where a run is, and how it gets back there.

    Attributes:
        world: all ranks, healed after each failure.
        comm: those that train; None on a spare.
        step: number of steps that are done.
        ended: whether all ranks leave the loop before its last step.
    """

    def __init__(
        self,
        comm: Communicator,
        build: Callable[[Communicator], T],
        heal: Heal,
        restore: Callable[[T], int] | None,
        buddy_every: int,
        num_spares: int,
        usable: Callable[[int], int] | None,
    ) -> None:
        for name, value in {"buddy_every": buddy_every, "num_spares": num_spares}.items():
            if value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        self.world = comm
        self.comm: Communicator | None = None
        self.step = 0
        self.ended = False
        self._build = build
        self._heal = heal
        self._restore = restore
        self._buddy_every = buddy_every
        self._usable = usable
        self._most = comm.size - num_spares
        self._place: int | None = None  # among those that trained last
        self._rescue = Rescue.of_job()
        self._training: T | None = None
        self._buddies: Buddies | None = None
        self._data: dict[str, Any] = {}  # its position at the beginning of the step
        self._changing: dict[Extent, Array] = {}  # buffers and memories, as they were then
        self._memories: frozenset[Extent] = frozenset()  # of comm hooks, on all ranks
        self._recovery: Recovery | None = None

    def attempt(self) -> Attempt[T]:
        assert self._training is not None
        recovery, self._recovery = self._recovery, None
        return Attempt(self, self.step, self._training, recovery)

    def before_vote(self) -> None:
        """Complete all that ranks need each other for, so that the optimizer's step needs nobody."""
        assert self._training is not None
        self._training.optimizer.finish()
        if self._buddies is not None:
            self._buddies.wait()

    def done(self, step: int) -> None:
        """Note that a step was committed; copy everything now and then."""
        self._note(step)
        if self._buddies is not None:
            self._buddies.agreed()
            if step % self._buddy_every == 0:
                self._copy()

    def begin(self) -> None:
        """Build for the first time, or join a run as a replacement, or go on after a job that was lost."""
        start = time.perf_counter()
        lost_at = None if self._rescue is None else self._rescue.lost_at
        if lost_at is not None:
            start -= time.time() - lost_at
        self._rebuild(start, is_recovery=self.world.is_newcomer or lost_at is not None)

    def recover(self) -> None:
        start = time.perf_counter()
        self.leave_behind()
        self.world = self.world.heal(self._heal)
        self._rebuild(start, is_recovery=True)

    def leave_behind(self) -> None:
        """Leave what this rank has, for the case that this job is lost."""
        if self._rescue is not None:
            self._rescue.keep(snapshot for snapshot in (self._mine(), self._copied()) if snapshot is not None)

    def wait_as_spare(self) -> None:
        """Wait while the others do a step; step in if one of them dies."""
        if self.world.vote(True, idle=True):
            self.step += 1
        elif self._is_over():
            self.ended = True
        else:
            self.recover()

    def end(self) -> None:
        """Leave the loop before its last step, with the spares."""
        self.ended = True
        if self._has_spares() and not self.world.vote(False):
            self._is_over()

    def _is_over(self) -> bool:
        """Return whether a vote failed as the run is over; otherwise a rank is dead, and every message fails."""
        try:
            self.world.barrier()
        except RankFailure:
            return False
        return True

    def _rebuild(self, start: float, *, is_recovery: bool) -> None:
        """Build for the ranks that there are, and get the state; again, if a rank dies over it."""
        while True:
            training, buddies, found, rows, memories = None, None, None, [], frozenset[Extent]()
            try:
                self.comm = self._deal()
                if self.comm is not None:
                    training = self._build(self.comm)
                own_memories = [] if training is None else memories_of(training)
                memories = frozenset().union(*self.world.gather_objects(own_memories))
                found = self._fetch(training, memories)
                if training is not None:
                    buddies = self._new_buddies(training)
                reached = max(self.step, 0 if self._rescue is None else self._rescue.num_steps_before)
                rows = self.world.gather_objects((found, reached, time.perf_counter() - start))
                whole = True
            except RankFailure:
                whole = False
            now = time.time()
            if self.world.vote(whole):
                break
            self.world = self.world.heal(self._heal)
            is_recovery = True
        found = next(row[0] for row in rows if row[0] is not None)
        reached, seconds = (max(column) for column in list(zip(*rows, strict=True))[1:])
        if self._rescue is not None:
            self._rescue.clear(now)
        self._memories = memories
        self._take(training, buddies, found.step)
        if is_recovery and self.comm is not None:
            num_redone = reached - found.step
            self._recovery = Recovery(found.step, found.source, num_redone, self.comm.size, found.forgets, seconds)

    def _deal(self) -> Communicator | None:
        """Choose who trains: whoever did keeps its place, the others fill the gaps; return their communicator."""
        world = self.world
        if self._usable is None and self._most >= world.size:
            return world
        places: list[int | None] = world.gather_objects(self._place)
        num_places = min(self._most, world.size)
        if self._usable is not None:
            num_places = self._usable(num_places)
        if not 1 <= num_places <= world.size:
            raise ValueError(f"{num_places} of {world.size} ranks would train, it must be at least 1 and at most all")
        free = [place for place in range(num_places) if place not in places]
        dealt = []
        for place in places:
            keeps = place is not None and place < num_places
            dealt.append(place if keeps else free.pop(0) if free else None)
        mine = dealt[world.rank]
        part = world.split(int(mine is None), world.rank if mine is None else mine)
        return None if mine is None else part

    def _has_spares(self) -> bool:
        return self.comm is None or self.comm.size < self.world.size

    def _mine(self) -> Snapshot | None:
        """Return what this rank has of the beginning of the step."""
        old = self._training
        if old is None:
            return None
        arrays = state_of(old) | self._changing
        return Snapshot(self.step, old.optimizer.num_steps, self._data, self._memories, arrays)

    def _copied(self) -> Snapshot | None:
        return None if self._buddies is None else self._buddies.complete

    def _fetch(self, training: T | None, memories: frozenset[Extent]) -> _Found | None:
        """Fill a new training, with these memories on all ranks, with the run's state. Collective over all.

        Returns:
            Where it came from; None on a spare that is not told.
        """
        for source, mine in (("a living rank", self._mine()), ("a buddy's copy", self._copied())):
            found = self._take_from(source, mine, training, memories)
            if found is not None:
                return found
        left = self._left_behind()
        steps = {step for row in self.world.gather_objects(list(left)) for step in row}
        for step in sorted(steps, reverse=True):
            found = self._take_from("the job before", left.get(step), training, memories)
            if found is not None:
                return found
        if self._restore is not None:
            return None if training is None else _Found(self._restore(training), RESTORED)
        return _Found(0, "the beginning")

    def _take_from(
        self, source: str, mine: Snapshot | None, training: T | None, memories: frozenset[Extent]
    ) -> _Found | None:
        """Fill a training from snapshots of one moment; return None, and leave it, if they have not all of it."""
        heads = [head for head in self.world.gather_objects(None if mine is None else mine[:4]) if head is not None]
        if not heads:
            return None
        step, num_updates, data, memories_then = heads[0]
        forgets = memories_then != memories
        room = {} if training is None else room_for(training, memories=not forgets)
        try:
            hand_over(self.world, {} if mine is None else mine.arrays, room)
        except MissingError:
            return None
        if training is not None:
            fill(training, room, num_updates, data)
        return _Found(int(step), source, forgets)

    def _left_behind(self) -> dict[int, Snapshot]:
        """Read this rank's share of what ranks left on its host before they were lost; by step. Collective."""
        if self._rescue is None:
            return {}
        hosts = self.world.gather_objects(socket.gethostname())
        here = [rank for rank, host in enumerate(hosts) if host == hosts[self.world.rank]]
        left: dict[int, Snapshot] = {}
        for snapshot in self._rescue.read(here.index(self.world.rank), len(here)):
            arrays = {**left[snapshot.step].arrays} if snapshot.step in left else {}
            left[snapshot.step] = snapshot._replace(arrays=arrays | {**snapshot.arrays})
        return left

    def _take(self, training: T | None, buddies: Buddies | None, step: int) -> None:
        """Go on with a training that all ranks have whole."""
        if buddies is not None and self._buddies is not None:
            buddies.complete = self._buddies.complete  # what the ranks that live kept still counts
        self._training, self._buddies = training, buddies
        self._place = None if self.comm is None else self.comm.rank
        self._note(step)
        self._copy()

    def _note(self, step: int) -> None:
        """Remember what a failed attempt would change: all but parameters and optimizer, which wait for the vote."""
        self.step = step
        if self._training is None:
            return
        if self._rescue is not None and self._place == 0:
            self._rescue.count(step)
        self._data = self._training.data.state_dict()
        self._changing = {extent: array.copy() for extent, array in changing_of(self._training).items()}

    def _copy(self) -> None:
        """Begin a round of copies."""
        if self._buddies is not None and self._training is not None:
            with suppress(RankFailure):  # the next attempt meets it
                self._training.optimizer.finish()
                snapshot = self._mine()
                assert snapshot is not None
                self._buddies.begin(snapshot)

    def _new_buddies(self, training: T) -> Buddies | None:
        assert self.comm is not None
        return Buddies(self.comm, state_of(training)) if self._buddy_every else None
