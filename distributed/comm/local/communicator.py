"""One thread's end of a LocalWorld's communicator, and what its ranks share: collectives and messages under way."""

from __future__ import annotations

import itertools
import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from distributed.comm.calls import Call, join_call
from distributed.comm.communicator import PORTABLE_MAX_TAG, Communicator
from distributed.comm.failure import Heal
from distributed.comm.local.job import Family, Job
from distributed.comm.reduction import ReduceOp, reduce_in_rank_order
from distributed.comm.transfer import as_bytes, unpack
from distributed.comm.work import Array, Work


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


class _Space:
    """What the ranks of one communicator share: what is under way, keyed by number."""

    def __init__(self, job: Job, family: Family, members: Sequence[int]) -> None:
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
                    self._family.check()
            return self._complete

    def wait(self) -> Any:
        if not self.test():
            self._job.wait_until(self.test, self._rank, self._what)
        return self._result


class LocalCommunicator(Communicator):
    """One thread's end of a communicator.

    LocalWorld.run makes it, and so do split and heal. Reductions combine in rank order and read the arrays when the
    last rank has joined, not before: whoever writes into an array in flight sees a wrong sum.
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

    @classmethod
    def of_world(
        cls, job: Job, family: Family, rank: int, *, max_message_elements: int, is_newcomer: bool = False
    ) -> LocalCommunicator:
        """Return a rank's end of the communicator of all ranks of a family.

        Args:
            rank: of the first world.
            is_newcomer: whether it takes the place of a rank that died.
        """
        with job.changed:
            if family.shared is None:
                family.shared = _Space(job, family, family.members)
            space: _Space = family.shared
        return cls(space, space.members.index(rank), max_message_elements=max_message_elements, is_newcomer=is_newcomer)

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
    def survives(self) -> bool:
        return self._job.survives

    @property
    def is_newcomer(self) -> bool:
        return self._is_newcomer

    @property
    def dead(self) -> tuple[int, ...]:
        return self._space.family.dead_ranks()

    def vote(self, yes: bool, *, idle: bool = False) -> bool:
        rank = self._space.members[self.rank]
        self._job.count_call(rank)
        return self._space.family.vote(next(self._num_votes), rank, yes)

    def heal(self, how: Heal) -> Communicator:
        rank = self._space.members[self.rank]
        self._job.count_call(rank)
        family = self._space.family.heal(how, rank)
        return LocalCommunicator.of_world(self._job, family, rank, max_message_elements=self.max_message_elements)

    def abort(self, message: str) -> NoReturn:
        error = SystemExit(f"[rank {self._space.members[self.rank]}] {message}")
        self._job.fail(error)
        raise error

    def _broadcast(self, array: Array, root: int) -> Work:
        call = Call("broadcast", array, root=root)
        return self._collective(call, array, lambda arrays: arrays[root].copy(), lambda result: _fill(array, result))

    def _allreduce(self, array: Array, op: ReduceOp) -> Work:
        call = Call("allreduce", array, op=op)
        return self._collective(call, array, _reduction(op), lambda result: _fill(array, result))

    def _reduce_scatter(self, flat: Array, op: ReduceOp) -> Work:
        call = Call("reduce_scatter", flat, op=op)
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
        number = next(self._num_collectives)
        call = call._replace(subject=self._subject)
        with self._job.changed:
            self._space.family.begin_call(self._space.members[self.rank])
            collective = self._space.collectives.setdefault(number, _Collective())
            mismatch = join_call(collective.calls, number, self.rank, call, self._space.label)
            if collective.mismatch is None and mismatch is not None:
                collective.mismatch = mismatch
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
        with self._job.changed:
            self._space.family.begin_call(self._space.members[self.rank])
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
