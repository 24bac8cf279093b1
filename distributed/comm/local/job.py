"""One run of a LocalWorld: threads that wait for each other, fail together, or die one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from distributed.comm.failure import Heal, RankFailure
from distributed.comm.wait_clock import WaitClock

_GRACE_SECONDS = 1.0  # for the other ranks to end after a failure, before run raises it


class Ended(BaseException):
    """Unwinds a rank after another one failed; never leaves LocalWorld.run."""


class Killed(BaseException):
    """What a rank's program raises to play a SIGKILL.

    In a world that survives failures that rank is dead then.
    """


class Job:
    """One run of a world.

    It has the lock, the first failure, who waits for what, and who dies.

    Args:
        start: starts a newcomer with this number, in the world of a family.
        deaths: rank -> the number of its call of a communicator, from 0, in which it dies.
        survives: whether a death ends the rank alone, and not the job.
    Attributes:
        changed: guards this job and all that its ranks share.
        wait_clocks: by rank of the first world.
    """

    def __init__(
        self,
        size: int,
        synchronous_sends: bool,
        timeout_seconds: float,
        start: Callable[[int, Family], None],
        deaths: dict[int, int],
        survives: bool = False,
    ) -> None:
        self.size = size
        self.synchronous_sends = synchronous_sends
        self.timeout_seconds = timeout_seconds
        self.survives = survives
        self._start = start
        self._calls_to_live = deaths
        self._families: list[Family] = []
        self.wait_clocks = [WaitClock() for _ in range(size)]  # by world rank
        self.changed = threading.Condition()  # guards this job and all its spaces
        self._failure: BaseException | None = None
        self._waits: dict[int, tuple[int, Callable[[], str]]] = {}  # thread -> its rank and what it waits for
        self._waited_too_long: dict[int, Callable[[], str]] = {}  # rank -> for what, until it waits again
        self._ended: set[int] = set()

    def fail(self, error: BaseException) -> None:
        """Let this error be the failure of the job, unless there is one already.

        Every rank that waits wakes up.
        """
        with self.changed:
            if self._failure is None:
                self._failure = error
                self.changed.notify_all()

    def end(self, rank: int) -> None:
        """Note that a rank's program is over."""
        with self.changed:
            self._ended.add(rank)
            self.changed.notify_all()

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank's program is over."""
        return rank in self._ended

    def add(self, family: Family) -> None:
        """Let a family know of deaths from now on."""
        self._families.append(family)

    def count_call(self, rank: int) -> None:
        """Let a rank die in the call in which it is to."""
        if rank in self._calls_to_live:
            if self._calls_to_live[rank] == 0:
                del self._calls_to_live[rank]
                raise Killed
            self._calls_to_live[rank] -= 1

    def die(self, rank: int) -> None:
        """Let the others know that a rank is dead."""
        with self.changed:
            for family in self._families:
                if rank in family.members:
                    family.dead.add(rank)
            self._ended.add(rank)
            self.changed.notify_all()

    def revive(self, rank: int, family: Family) -> None:
        """Start a newcomer in a dead rank's place."""
        self._ended.discard(rank)
        self._start(rank, family)

    def join(self) -> None:
        """Block until every rank has ended or one has failed, and raise that failure."""
        with self.changed:
            self.changed.wait_for(lambda: self._failure is not None or len(self._ended) == self.size)
            if self._failure is not None:
                # A rank that computes cannot be woken; it meets the failure at its next call, or dies with the process.
                self.changed.wait_for(lambda: len(self._ended) == self.size, _GRACE_SECONDS)
                raise self._failure

    def check(self) -> None:
        """End the calling rank if another one has failed."""
        if self._failure is not None:
            raise Ended

    def wait_until(self, done: Callable[[], bool], rank: int, what: Callable[[], str]) -> None:
        """Block a rank until `done`, which is asked whenever something has changed.

        Raises:
            TimeoutError: it took too long; says what every rank does.
        """
        thread = threading.get_ident()
        with self.wait_clocks[rank], self.changed:
            self._waits[thread] = (rank, what)
            self._waited_too_long.pop(rank, None)
            try:
                if not self.changed.wait_for(done, self.timeout_seconds):
                    self._waited_too_long[rank] = what
                    raise TimeoutError(f"no rank may wait longer than {self.timeout_seconds} s, but {self._report()}")
            finally:
                del self._waits[thread]

    def _report(self) -> str:
        waits = dict(self._waits.values())
        return "; ".join(f"rank {rank} {self._state_of(rank, waits.get(rank))}" for rank in range(self.size))

    def _state_of(self, rank: int, what: Callable[[], str] | None) -> str:
        if what is not None:
            return f"waits for {what()}"
        if rank in self._ended:
            return "has ended"
        if rank in self._waited_too_long:  # at the same time as the one that tells
            return f"has waited too long for {self._waited_too_long[rank]()}"
        return "is computing"


class Family:
    """A world and all that was split off it.

    It knows who is dead, how those who live vote, and what comes after it.

    Args:
        members: numbers that its ranks had in the first world of the job.
    Attributes:
        dead: those of them that are.
        shared: what the ranks of its world have in common; made by the first that asks.
    """

    def __init__(self, job: Job, members: Sequence[int]) -> None:
        self.members = members
        self.dead: set[int] = set()
        self.shared: Any = None
        self._job = job
        self._votes: list[dict[int, bool]] = []
        self._outcomes: dict[int, bool] = {}
        self._healing: set[int] = set()
        self._next: Family | None = None
        job.add(self)

    def begin_call(self, rank: int) -> None:
        """Let a rank begin a call of a communicator.

        It may die in it, or learn that it cannot be completed.
        """
        self._job.count_call(rank)
        self.check()

    def check(self) -> None:
        """End the calling rank if another one has failed.

        Raises:
            RankFailure: a rank of the world is dead.
        """
        self._job.check()
        if self.dead:
            raise RankFailure(self.dead_ranks())

    def dead_ranks(self) -> tuple[int, ...]:
        """Return the ranks of its world that are dead."""
        return tuple(sorted(self.members.index(rank) for rank in self.dead))

    def vote(self, number: int, rank: int, yes: bool) -> bool:
        """Return the outcome of a vote, once all who live have cast theirs."""
        with self._job.changed:
            if number == len(self._votes):
                self._votes.append({})
            votes = self._votes[number]
            votes[rank] = yes
            self._job.changed.notify_all()

        def complete() -> bool:
            if number not in self._outcomes and votes.keys() >= set(self.members) - self.dead:
                self._outcomes[number] = all(votes.values()) and not self.dead
            self._job.check()
            return number in self._outcomes

        self._job.wait_until(complete, rank, lambda: f"vote #{number}")
        return self._outcomes[number]

    def heal(self, how: Heal, rank: int) -> Family:
        """Return the family that comes after this one.

        It is there once all who live have asked for it; newcomers start with it.
        """
        with self._job.changed:
            self._healing.add(rank)
            self._job.changed.notify_all()

        def complete() -> bool:
            if self._next is None and self._healing >= set(self.members) - self.dead:
                members = self.members if how is Heal.REPLACE else [r for r in self.members if r not in self.dead]
                self._next = Family(self._job, members)
                for newcomer in self.dead & set(members):
                    self._job.revive(newcomer, self._next)
            self._job.check()
            return self._next is not None

        self._job.wait_until(complete, rank, lambda: "the others, to heal the world")
        assert self._next is not None
        return self._next
