"""Ranks as threads of one process: the whole of `Communicator` without MPI, for tests and notebooks.

`LocalWorld(4).run(program)` calls `program(comm)` on four threads. It is stricter than MPI where that finds mistakes:
collectives that do not match are named, a wait that lasts too long says what every rank waits for, results land in an
array only at wait() or test(), and with `synchronous_sends=True` no send completes before its receive is posted. It is
no way to go faster: one lock guards everything.
"""

from __future__ import annotations

import contextvars
import itertools
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from distributed.comm.calls import Call, call_site, describe_mismatch
from distributed.comm.communicator import MAX_MESSAGE_ELEMENTS, PORTABLE_MAX_TAG, Communicator
from distributed.comm.failure import Heal, RankFailure
from distributed.comm.reduction import ReduceOp, reduce_in_rank_order
from distributed.comm.transfer import as_bytes, unpack
from distributed.comm.wait_clock import WaitClock
from distributed.comm.work import Array, Work

_GRACE_SECONDS = 1.0  # for the other ranks to end after a failure, before run raises it


class LocalWorld:
    """A world of `size` ranks, each a thread of this process.

    Args:
        size: number of ranks.
        synchronous_sends: a send completes only once its receive is posted, like MPI's Ssend; else at once.
        timeout_seconds: longest single wait before TimeoutError tells what each rank waits for.
        max_message_elements: see `Communicator`.
        survive: a rank that raises `Killed` is dead to the others, who go on: see `failure.py`.
        deaths: rank -> the number of its call of a communicator, from 0, in which it dies; for tests.
    Raises:
        ValueError: size < 1.
    """

    def __init__(
        self,
        size: int,
        *,
        synchronous_sends: bool = False,
        timeout_seconds: float = 60.0,
        max_message_elements: int = MAX_MESSAGE_ELEMENTS,
        survive: bool = False,
        deaths: Mapping[int, int] | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"a LocalWorld needs at least 1 rank, got {size}")
        self.size = size
        self.synchronous_sends = synchronous_sends
        self.timeout_seconds = timeout_seconds
        self.max_message_elements = max_message_elements
        self.survive = survive
        self.deaths = dict(deaths or {})

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """Call program(comm, *args) on every rank and return the results by rank.

        Each rank starts in its own copy of the caller's context variables.

        Raises:
            BaseException: what any rank raised first, with a note of the rank; ranks that wait for others end silently.
        """
        results: list[Any] = [None] * self.size
        caller = contextvars.copy_context()

        def start(comm: LocalCommunicator, rank: int) -> None:
            context = caller.copy()
            thread = threading.Thread(target=context.run, args=(run_rank, comm, rank), name=f"rank {rank}", daemon=True)
            thread.start()

        def run_rank(comm: LocalCommunicator, rank: int) -> None:
            try:
                results[rank] = program(comm, *args)
            except _Ended:
                pass
            except Killed as error:
                if not self.survive:
                    job.fail(error)
                job.die(rank)
                return  # a newcomer may be in its place already
            except BaseException as error:
                error.add_note(f"[rank {rank}]")
                job.fail(error)
            job.end(rank)

        job = _Job(self.size, self.synchronous_sends, self.timeout_seconds, start, self.deaths)
        space = _Space(job, _Family(job, range(self.size)), range(self.size))
        try:
            for rank in range(self.size):
                start(LocalCommunicator(space, rank, max_message_elements=self.max_message_elements), rank)
            job.join()
        except BaseException as error:  # Ctrl-C too takes the ranks down
            job.fail(error)
            raise
        return results


class _Ended(BaseException):
    """Unwinds a rank after another one failed; never leaves LocalWorld.run."""


class Killed(BaseException):
    """Raised in a rank's program it plays a SIGKILL: in a world that survives failures that rank is dead."""


class _Job:
    """One run of a world: its lock, its first failure, and who waits for what."""

    def __init__(
        self,
        size: int,
        synchronous_sends: bool,
        timeout_seconds: float,
        start: Callable[[LocalCommunicator, int], None],
        deaths: dict[int, int],
    ) -> None:
        self.size = size
        self.synchronous_sends = synchronous_sends
        self.timeout_seconds = timeout_seconds
        self.start = start
        self._calls_to_live = deaths
        self._families: list[_Family] = []
        self.wait_clocks = [WaitClock() for _ in range(size)]  # by world rank
        self.changed = threading.Condition()  # guards this job and all its spaces
        self._failure: BaseException | None = None
        self._waits: dict[int, tuple[int, Callable[[], str]]] = {}  # thread -> its rank and what it waits for
        self._ended: set[int] = set()

    def fail(self, error: BaseException) -> None:
        """Let this error be the failure of the job, unless there is one already, and wake every rank that waits."""
        with self.changed:
            if self._failure is None:
                self._failure = error
                self.changed.notify_all()

    def end(self, rank: int) -> None:
        with self.changed:
            self._ended.add(rank)
            self.changed.notify_all()

    def add(self, family: _Family) -> None:
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

    def revive(self, comm: LocalCommunicator, rank: int) -> None:
        """Start a newcomer in a dead rank's place."""
        self._ended.discard(rank)
        self.start(comm, rank)

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
            raise _Ended

    def wait_until(self, done: Callable[[], bool], rank: int, what: Callable[[], str]) -> None:
        thread = threading.get_ident()
        with self.wait_clocks[rank], self.changed:
            self._waits[thread] = (rank, what)
            try:
                if not self.changed.wait_for(done, self.timeout_seconds):
                    raise TimeoutError(f"no rank may wait longer than {self.timeout_seconds} s, but {self._report()}")
            finally:
                del self._waits[thread]

    def _report(self) -> str:
        waits = dict(self._waits.values())
        states = (
            f"waits for {waits[rank]()}" if rank in waits else "has ended" if rank in self._ended else "is computing"
            for rank in range(self.size)
        )
        return "; ".join(f"rank {rank} {state}" for rank, state in enumerate(states))


class _Collective:
    """One collective, by its number: what each rank brought, and what came of it."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[str, str]] = {}  # by rank: what it calls, and where
        self.contributions: dict[int, Any] = {}
        self.result: Any = None
        self.complete = False
        self.mismatch: str | None = None

    def check(self) -> None:
        if self.mismatch is not None:
            raise RuntimeError(self.mismatch)


class _Message:
    """One point-to-point message: sent, posted, or both, and then met."""

    def __init__(self) -> None:
        self.data: Array | None = None
        self.posted = False
        self.met = False


class _Family:
    """A world and all that was split off it: who is dead, how those who live vote, and what comes after it."""

    def __init__(self, job: _Job, members: Sequence[int]) -> None:
        self.members = members
        self.dead: set[int] = set()
        self._job = job
        self._votes: list[dict[int, bool]] = []
        self._outcomes: dict[int, bool] = {}
        self._healing: set[int] = set()
        self._next: _Space | None = None
        job.add(self)

    def check(self) -> None:
        if self.dead:
            raise RankFailure(self.members.index(rank) for rank in self.dead)

    def vote(self, number: int, rank: int, yes: bool) -> bool:
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

    def heal(self, how: Heal, rank: int, max_message_elements: int) -> _Space:
        with self._job.changed:
            self._healing.add(rank)
            self._job.changed.notify_all()

        def complete() -> bool:
            if self._next is None and self._healing >= set(self.members) - self.dead:
                members = self.members if how is Heal.REPLACE else [r for r in self.members if r not in self.dead]
                self._next = _Space(self._job, _Family(self._job, members), members)
                for dead in self.dead & set(members):
                    comm = LocalCommunicator(
                        self._next, members.index(dead), max_message_elements=max_message_elements, is_newcomer=True
                    )
                    self._job.revive(comm, dead)
            self._job.check()
            return self._next is not None

        self._job.wait_until(complete, rank, lambda: "the others, to heal the world")
        assert self._next is not None
        return self._next


class _Space:
    """What the ranks of one communicator share: what is under way, keyed by number."""

    def __init__(self, job: _Job, family: _Family, members: Sequence[int]) -> None:
        self.job = job
        self.family = family
        self.members = members  # ranks of the first world
        self.collectives: dict[int, _Collective] = {}
        self.messages: dict[tuple[int, int, int, int], _Message] = {}  # by source, dest, tag, number
        self.label = "" if len(members) == job.size else f" among ranks {list(members)}"


class _LocalWork(Work):
    def __init__(
        self, space: _Space, rank: int, what: Callable[[], str], done: Callable[[], bool], land: Callable[[], Any]
    ) -> None:
        self._job = space.job
        self._family = space.family
        self._rank = rank
        self._what = what
        self._done = done
        self._land = land
        self._complete = False
        self._result: Any = None

    def test(self) -> bool:
        with self._job.changed:
            if not self._complete:
                if self._done():
                    self._result = self._land()
                    self._complete = True
                else:
                    self._job.check()
                    self._family.check()
            return self._complete

    def wait(self) -> Any:
        self._job.wait_until(self.test, self._rank, self._what)
        return self._result


class LocalCommunicator(Communicator):
    """One thread's end of a communicator; made by LocalWorld.run and by split.

    Reductions combine in rank order and read the arrays when the last rank has joined, not before: whoever writes
    into an array in flight sees a wrong sum.
    """

    def __init__(self, space: _Space, rank: int, *, max_message_elements: int, is_newcomer: bool = False) -> None:
        super().__init__(rank, len(space.members), max_message_elements=max_message_elements)
        self._space = space
        self._job = space.job
        self._is_newcomer = is_newcomer
        self._num_votes = itertools.count()
        self._num_collectives = itertools.count()
        self._num_sent: defaultdict[tuple[int, int], itertools.count[int]] = defaultdict(itertools.count)
        self._num_posted: defaultdict[tuple[int, int], itertools.count[int]] = defaultdict(itertools.count)

    @property
    def library(self) -> str:
        return "threads of one process"

    @property
    def max_tag(self) -> int:
        return PORTABLE_MAX_TAG

    @property
    def waited_seconds(self) -> float:
        return self._job.wait_clocks[self._space.members[self.rank]].seconds

    def gather_objects(self, obj: object) -> list[Any]:
        # Pickled as MPI does it, so that no object is shared by accident and what cannot be pickled fails here too.
        parts = self._collective(Call("gather_objects"), pickle.dumps(obj), list, lambda parts: parts).wait()
        return [pickle.loads(part) for part in parts]

    def barrier(self) -> None:
        self._collective(Call("barrier"), None, list, lambda _: None).wait()

    @property
    def is_newcomer(self) -> bool:
        return self._is_newcomer

    def vote(self, yes: bool) -> bool:
        rank = self._space.members[self.rank]
        self._job.count_call(rank)
        return self._space.family.vote(next(self._num_votes), rank, yes)

    def heal(self, how: Heal) -> Communicator:
        rank = self._space.members[self.rank]
        self._job.count_call(rank)
        space = self._space.family.heal(how, rank, self.max_message_elements)
        return LocalCommunicator(space, space.members.index(rank), max_message_elements=self.max_message_elements)

    def abort(self, message: str) -> NoReturn:
        error = SystemExit(f"[rank {self._space.members[self.rank]}] {message}")
        self._job.fail(error)
        raise error

    def _broadcast(self, array: Array, root: int) -> Work:
        call = Call("broadcast", array, f" from {root}")
        return self._collective(call, array, lambda arrays: arrays[root].copy(), lambda result: _fill(array, result))

    def _allreduce(self, array: Array, op: ReduceOp) -> Work:
        call = Call("allreduce", array, f" by {op.name}")
        return self._collective(call, array, _reduction(op), lambda result: _fill(array, result))

    def _reduce_scatter(self, flat: Array, op: ReduceOp) -> Work:
        call = Call("reduce_scatter", flat, f" by {op.name}")
        n = flat.size // self.size
        own = slice(self.rank * n, (self.rank + 1) * n)
        return self._collective(call, flat, _reduction(op), lambda result: _fill(flat[own], result[own]))

    def _allgather(self, array: Array) -> Work:
        return self._collective(Call("allgather", array), array, np.stack, np.copy)

    def _all_to_all(self, array: Array) -> Work:
        def land(arrays: Array) -> Array:
            return arrays[:, self.rank].copy()

        return self._collective(Call("all_to_all", array), array, np.stack, land)

    def _split(self, color: int, key: int) -> Communicator:
        def divide(requests: list[tuple[int, int]]) -> dict[int, _Space]:
            groups: defaultdict[int, list[int]] = defaultdict(list)
            for rank in sorted(range(self.size), key=lambda rank: requests[rank][1]):  # stable: then by rank
                groups[requests[rank][0]].append(self._space.members[rank])
            return {color: _Space(self._job, self._space.family, members) for color, members in groups.items()}

        space = self._collective(Call("split"), (color, key), divide, lambda spaces: spaces[color]).wait()
        rank = space.members.index(self._space.members[self.rank])
        return LocalCommunicator(space, rank, max_message_elements=self.max_message_elements)

    def _collective(
        self, call: Call, contribution: Any, combine: Callable[[list[Any]], Any], land: Callable[[Any], Any]
    ) -> _LocalWork:
        """Join the next collective; the last rank to join combines, each rank lands the result for itself."""
        self._job.count_call(self._space.members[self.rank])
        number, where = next(self._num_collectives), call_site()
        with self._job.changed:
            self._job.check()
            self._space.family.check()
            collective = self._space.collectives.setdefault(number, _Collective())
            collective.calls[self.rank] = str(call), where
            if collective.mismatch is None:
                collective.mismatch = describe_mismatch(number, collective.calls, self._space.label)
                self._job.changed.notify_all()
            collective.check()
            collective.contributions[self.rank] = contribution
            if len(collective.contributions) == self.size:
                collective.result = combine([collective.contributions[rank] for rank in range(self.size)])
                collective.complete = True
                collective.contributions.clear()
                del self._space.collectives[number]
                self._job.changed.notify_all()

        def done() -> bool:
            collective.check()
            return collective.complete

        def describe() -> str:
            missing = [str(member) for rank, member in enumerate(self._space.members) if rank not in collective.calls]
            noun = "rank" if len(missing) == 1 else "ranks"
            return f"{call} #{number}" + (f" (not called by {noun} {', '.join(missing)})" if missing else "")

        return self._work(describe, done, lambda: land(collective.result))

    def _isend(self, array: Array, dest: int, tag: int) -> Work:
        synchronous_sends = self._job.synchronous_sends
        data = as_bytes(array) if synchronous_sends else as_bytes(array).copy()
        message = self._message((self.rank, dest, tag, next(self._num_sent[dest, tag])), data=data)
        what = f"send to {dest} tag {tag}"
        return self._work(lambda: what, lambda: message.met or not synchronous_sends, lambda: array)

    def _irecv(self, array: Array, source: int, tag: int) -> Work:
        message = self._message((source, self.rank, tag, next(self._num_posted[source, tag])), posted=True)

        def land() -> Array:
            assert message.data is not None
            return unpack(message.data, array, source=source, tag=tag)

        return self._work(lambda: f"recv from {source} tag {tag}", lambda: message.met, land)

    def _message(self, key: tuple[int, int, int, int], *, data: Array | None = None, posted: bool = False) -> _Message:
        """Add this rank's half of a message; where both halves are there, the data is taken from the sender."""
        self._job.count_call(self._space.members[self.rank])
        with self._job.changed:
            self._job.check()
            self._space.family.check()
            message = self._space.messages.setdefault(key, _Message())
            message.data = message.data if data is None else data
            message.posted = message.posted or posted
            if message.data is not None and message.posted:
                if self._job.synchronous_sends:  # until now a view of the sender's live array
                    message.data = message.data.copy()
                message.met = True
                del self._space.messages[key]
                self._job.changed.notify_all()
            return message

    def _work(self, what: Callable[[], str], done: Callable[[], bool], land: Callable[[], Any]) -> _LocalWork:
        def describe() -> str:
            return what() + self._space.label + self._describe_context()

        return _LocalWork(self._space, self._space.members[self.rank], describe, done, land)


def _fill(array: Array, values: Array) -> Array:
    array[...] = values
    return array


def _reduction(op: ReduceOp) -> Callable[[list[Array]], Array]:
    def reduce(arrays: list[Array]) -> Array:
        result = np.empty_like(arrays[0])
        reduce_in_rank_order([array.reshape(-1) for array in arrays], op, [result.reshape(-1)])
        return result

    return reduce
