"""Where a run is that goes on when ranks die, and how it gets back there.

Every rank goes through the same calls: those that train, spares that wait, and newcomers that begin with a rebuild.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from distributed.comm.communicator import Array, Communicator
from distributed.comm.failure import Heal, RankFailure
from distributed.recovery.buddies import Buddies
from distributed.recovery.places import deal
from distributed.recovery.rescue import Rescue
from distributed.recovery.sources import fetch
from distributed.recovery.state import Extent, Snapshot, Training, changing_of, memories_of, state_of
from minigrad.words import counted

T = TypeVar("T", bound=Training)


@dataclass(frozen=True)
class Recovery:
    """One recovery, for a log.

    Attributes:
        step: the next to be done.
        source: where the state came from: "a living rank", "a buddy's copy", "the job before" (which was lost),
            RESTORED, "the beginning".
        num_redone: steps that were done before and are done again.
        num_ranks: that train now.
        dead: ranks that died, by their numbers in the world that lost them; none where a whole job was lost.
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
    dead: tuple[int, ...] = ()

    def __str__(self) -> str:
        died = f"{_ranks(self.dead)} died, " if self.dead else ""
        steps = f"{counted(self.num_redone, 'step')} {'is' if self.num_redone == 1 else 'are'}"
        redone = f", {steps} done again" if self.num_redone else ""
        goes_on = f"{counted(self.num_ranks, 'rank')} {'goes' if self.num_ranks == 1 else 'go'}"
        return f"{died}healed in {self.seconds:.1f} s: {goes_on} on after step {self.step}, from {self.source}{redone}"


def _ranks(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


_WHAT_FOLLOWS = {  # a death: one place is taken, or several are
    Heal.REPLACE: ("a new rank takes its place", "new ranks take their places"),
    Heal.SHRINK: ("the others go on without it", "the others go on without them"),
    Heal.SPARES: ("a spare takes its place if one is left", "spares take their places as far as they are left"),
}


class Loop(Generic[T]):
    """Where a run is, and how it gets back there.

    Attributes:
        world: all ranks, healed after each failure.
        comm: those that train; None on a spare.
        step: number of steps that are done.
        training: what `build` made for those that train; None on a spare.
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
        say: Callable[[str], object] | None,
    ) -> None:
        for name, value in {"buddy_every": buddy_every, "num_spares": num_spares}.items():
            if value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        self.world = comm
        self.comm: Communicator | None = None
        self.step = 0
        self.training: T | None = None
        self.ended = False
        self._build = build
        self._heal = heal
        self._restore = restore
        self._buddy_every = buddy_every
        self._usable = usable
        self._say = say
        self._most = comm.size - num_spares
        self._place: int | None = None  # among those that trained last
        self._rescue = Rescue.of_job()
        self._buddies: Buddies | None = None
        self._data: dict[str, Any] = {}  # its position at the beginning of the step
        self._changing: dict[Extent, Array] = {}  # buffers and memories, as they were then
        self._memories: frozenset[Extent] = frozenset()  # of comm hooks, on all ranks
        self._recovery: Recovery | None = None
        self._dead: tuple[int, ...] = ()  # since the last recovery

    def new_recovery(self) -> Recovery | None:
        """Return what went before the next attempt, if that was a recovery; once."""
        recovery, self._recovery = self._recovery, None
        return recovery

    def before_vote(self) -> None:
        """Complete all that ranks need each other for, so that the optimizer's step needs nobody."""
        assert self.training is not None
        self.training.optimizer.finish()
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
        self._heal_world()
        self._rebuild(start, is_recovery=True)

    def _heal_world(self) -> None:
        """Say who died, and get the world back."""
        world, dead = self.world, self.world.dead
        if self._say is not None and world.rank == min(set(range(world.size)) - set(dead)):
            one, several = _WHAT_FOLLOWS[self._heal]
            who = f"{_ranks(dead)} died: {several if len(dead) > 1 else one}" if dead else f"a rank died: {one}"
            self._say(who)
        self.world = world.heal(self._heal)
        self._dead += world.dead

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
                self.comm = deal(self.world, self._place, self._most, self._usable)
                if self.comm is not None:
                    training = self._build(self.comm)
                    self._check_step(training)
                own_memories = [] if training is None else memories_of(training)
                memories = frozenset().union(*self.world.gather_objects(own_memories))
                found = fetch(
                    self.world,
                    training,
                    memories,
                    mine=self._mine(),
                    copied=self._copied(),
                    rescue=self._rescue,
                    restore=self._restore,
                )
                if training is not None:
                    buddies = self._new_buddies(training)
                reached = max(self.step, 0 if self._rescue is None else self._rescue.num_steps_before)
                rows = self.world.gather_objects((found, reached, time.perf_counter() - start, self._dead))
                whole = True
            except RankFailure:
                whole = False
            now = time.time()
            if self.world.vote(whole):
                break
            self._heal_world()
            is_recovery = True
        found = next(row[0] for row in rows if row[0] is not None)
        reached, seconds = max(row[1] for row in rows), max(row[2] for row in rows)
        dead, self._dead = max((row[3] for row in rows), key=len), ()  # newcomers know of none before them
        if self._rescue is not None:
            self._rescue.clear(now)
        self._memories = memories
        self._take(training, buddies, found.step)
        if is_recovery and self.comm is not None:
            num_redone = reached - found.step
            num_ranks = self.comm.size
            self._recovery = Recovery(found.step, found.source, num_redone, num_ranks, found.forgets, seconds, dead)

    def _check_step(self, training: T) -> None:
        """Refuse an optimizer whose step needs other ranks: one that dies then would leave it undone on some."""
        if self.world.survives and training.optimizer.norm_over is not None:
            raise ValueError(
                "an optimizer that clips by the norm of several ranks needs them in its step, after they have agreed "
                "on it: make it without max_norm, and call ddp.clip_by_global_norm before attempt.commit()"
            )

    def _has_spares(self) -> bool:
        return self.comm is None or self.comm.size < self.world.size

    def _mine(self) -> Snapshot | None:
        """Return what this rank has of the beginning of the step."""
        old = self.training
        if old is None:
            return None
        arrays = state_of(old) | self._changing
        return Snapshot(self.step, old.optimizer.num_steps, self._data, self._memories, arrays)

    def _copied(self) -> Snapshot | None:
        return None if self._buddies is None else self._buddies.complete

    def _take(self, training: T | None, buddies: Buddies | None, step: int) -> None:
        """Go on with a training that all ranks have whole."""
        if buddies is not None and self._buddies is not None:
            buddies.complete = self._buddies.complete  # what the ranks that live kept still counts
        self.training, self._buddies = training, buddies
        self._place = None if self.comm is None else self.comm.rank
        self._note(step)
        self._copy()

    def _note(self, step: int) -> None:
        """Remember what a failed attempt would change: all but parameters and optimizer, which wait for the vote."""
        self.step = step
        if self.training is None:
            return
        if self._rescue is not None and self._place == 0:
            self._rescue.count(step)
        self._data = self.training.data.state_dict()
        self._changing = {extent: array.copy() for extent, array in changing_of(self.training).items()}

    def _copy(self) -> None:
        """Begin a round of copies."""
        if self._buddies is not None and self.training is not None:
            with suppress(RankFailure):  # the next attempt meets it
                self.training.optimizer.finish()
                snapshot = self._mine()
                assert snapshot is not None
                self._buddies.begin(snapshot)

    def _new_buddies(self, training: T) -> Buddies | None:
        assert self.comm is not None
        return Buddies(self.comm, state_of(training)) if self._buddy_every else None
