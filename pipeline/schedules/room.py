"""Which forwards a rank has room for, so that what has begun can always end; and how many micro-batches at a time.

The oldest micro-batch under way must be able to go on. On its rank it finds what younger ones hold at earlier stages,
and nothing that only its own end would free. So a forward may start where, of all stages of its rank, each later one
keeps room for a forward of the oldest micro-batch that is still to come to it:

    held by the micro-batches that have passed an earlier stage of the rank, and not this one  +  one more  <= limit

What a backward's weight half waits for takes room too; where that is more than it frees, so much is kept besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import NamedTuple

from pipeline.schedules.problem import ROUNDING, Problem


class Room:
    """What the ranks of a problem have room for.

    Attributes:
        limit: memory that a rank may hold, a rank, with a little for rounding.
        change: memory that F, B and W of a stage take, or give back where it is negative; a stage.
        is_ample: whether a rank can hold all micro-batches at all its stages, a rank.
    """

    def __init__(self, problem: Problem) -> None:
        self._kept = problem.activations
        self.limit = [limit * (1 + ROUNDING) for limit in problem.limit]
        pairs = list(zip(problem.activations, problem.deferred, strict=True))
        self.change = (list(problem.activations), [d - a for a, d in pairs], [-d for d in problem.deferred])
        self.is_ample: list[bool] = []
        self._needs = [0.0] * problem.num_stages  # of a forward, beside what is held
        # Of a stage, the later ones of its rank, and which of the rank are before those.
        self._later: list[list[tuple[int, list[int]]]] = [[] for _ in pairs]
        for rank, own in enumerate(problem.stages_of_rank):
            growth = max(0.0, *(self.change[1][s] for s in own))
            all_at_once = problem.num_microbatches * sum(max(pairs[s]) for s in own)
            self.is_ample.append(all_at_once <= self.limit[rank])
            for at, s in enumerate(own):
                self._needs[s] = problem.activations[s] + growth
                self._later[s] = [(own[i], own[:i]) for i in range(at + 1, len(own))]

    def allows(self, rank: int, stage: int, held: float, forwards: Sequence[int]) -> bool:
        """Tell whether a rank may start the next forward of one of its stages.

        Args:
            held: what the rank holds.
            forwards: how many were started, a stage.
        """
        limit = self.limit[rank]
        if held + self._needs[stage] > limit:
            return False
        for later, earlier in self._later[stage]:
            passed = forwards[later]
            taken = self._needs[later]
            for s in earlier:
                between = forwards[s] + (s == stage) - passed
                if between > 0:
                    taken += between * self._kept[s]
            if taken > limit:
                return False
        return True


class Window(NamedTuple):
    """A part of every micro-batch's way in which only a few can be at a time.

    Attributes:
        first, last: stages of one rank; it lasts from the start of F on the first to the end of B on the last.
        most: how many micro-batches can be in it; at least 1.
        length: how long each of them is in it at least.
    """

    first: int
    last: int
    most: int
    length: float


def windows(problem: Problem) -> list[Window]:
    """List, for any two stages `first <= last` of a rank, how many micro-batches can be between F there and B here.

    Proof. Let c of them be, and let k and k' be what one holds on the rank once it has come to `first` and to `last`,
    of all stages up to there. Each holds k. Look at the one that is first to end F of `last`, now or, if none has yet,
    when it does: until then the others can leave only by ending it too, so all c are still there, and
    c k + (k' - k) <= limit.
    """
    found = []
    for rank, own in enumerate(problem.stages_of_rank):
        held = list(accumulate(problem.activations[s] for s in own))
        for at, first in enumerate(own):
            for to in range(at, len(own)):
                room = problem.limit[rank] * (1 + ROUNDING) - (held[to] - held[at])
                if held[at] * problem.num_microbatches > room:
                    length = problem.round_trip(first, own[to]) + problem.backward_input[own[to]]
                    found.append(Window(first, own[to], max(1, int(room / held[at])), length))
    return found


def end_of(free: list[float], length: float, count: int) -> float:
    """Return when the last of some equal jobs ends at the earliest, one after another in each of some slots.

    Args:
        free: from when each slot can take one, in order; there is at least one.
        count: of jobs, at least 1.
    """
    if free[-1] - free[0] <= length:  # then no slot takes two more than another
        each, more = divmod(count, len(free))
        return free[more - 1] + (each + 1) * length if more else free[-1] + each * length
    slots = list(free)
    heapify(slots)
    last = 0.0
    for _ in range(count):  # the next one goes where it ends first
        last = slots[0] + length
        heapreplace(slots, last)
    return last
