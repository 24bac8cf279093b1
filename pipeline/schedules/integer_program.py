"""The orders of a problem as numbers, for a solver: variables with their ranges, and sums of them within limits.

Micro-batches are alike, so each stage may take those of a kind in order: sorted by their times, they still find their
inputs done. What is left to choose is how the rows of F, B and W of a rank's stages interleave:

    before[a, b] = 1    a ends before b starts      for a, b of one rank that do not wait for each other anyway
    start[a]            after what a waits for; after all that is before it on its rank, one after another
    memory              what has run before a forward, and what of it was freed, leaves room for it
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

from pipeline.schedules.action import Action, B, F, Kind, W
from pipeline.schedules.problem import ROUNDING, Problem

Terms = dict[int, float]
"""A sum of variables, by their numbers, with what each is multiplied by."""


@dataclass
class IntegerProgram:
    """The problem as numbers: variables with their ranges, and rows `low <= sum <= high`.

    Attributes:
        span: whether the longest span of a rank is to be short, or the end of everything.
        most: no longer than this.
    """

    problem: Problem
    span: bool
    most: float
    ranges: list[tuple[float, float]] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)  # variables that are 0 or 1
    rows: list[tuple[float, Terms, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._longest = self._variable(0.0, self.most)  # variable 0: what is to be short
        self.start = {a: self._variable(self.head[a], self._latest(a)) for a in self.head}
        self._before: dict[tuple[Action, Action], int] = {}
        for a, waits_for in self._waits_for.items():
            for b, delay in waits_for:
                self._row(self._time(b) + delay, {self.start[a]: 1.0, self.start[b]: -1.0})
            self._row(self._time(a) + self._tail[a], {self._longest: 1.0, self.start[a]: -1.0})
        for rank, stages in enumerate(self.problem.stages_of_rank):
            own = [a for a in self.head if a.stage in stages]
            self._one_at_a_time(own)
            self._in_turn(own)
            self._one_after_another(rank, own)
            self._memory(rank, own)

    # -- what waits for what ------------------------------------------------------------------

    @cached_property
    def _waits_for(self) -> dict[Action, list[tuple[Action, float]]]:
        """What each action waits for, and how long after its end; in an order in which that comes first."""
        problem, m = self.problem, range(self.problem.num_microbatches)
        stages = range(problem.num_stages)
        forwards = [F(s, i) for i in m for s in stages]
        backwards = [B(s, i) for i in m for s in reversed(stages)]
        waits_for = {}
        for a in [*forwards, *backwards, *(W(s, i) for s in stages for i in m)]:
            needs = a.needs(problem.num_stages)
            delays = [0.0 if b.stage == a.stage else problem.transfer[min(a.stage, b.stage)] for b in needs]
            waits_for[a] = list(zip(needs, delays, strict=True))
            if a.microbatch:
                waits_for[a].append((Action(a.kind, a.stage, a.microbatch - 1), 0.0))
        return waits_for

    @cached_property
    def head(self) -> dict[Action, float]:
        """The earliest start of each action."""
        head: dict[Action, float] = {}
        for a, waits_for in self._waits_for.items():
            head[a] = max((head[b] + self._time(b) + delay for b, delay in waits_for), default=0.0)
        return head

    @cached_property
    def _tail(self) -> dict[Action, float]:
        """From the end of each action, the least until what is to be short is over."""
        tail = {a: -self._offset(self._rank(a)) for a in self._waits_for}
        for a in reversed(self._waits_for):
            for b, delay in self._waits_for[a]:
                tail[b] = max(tail[b], delay + self._time(a) + tail[a])
        return tail

    @cached_property
    def _earlier(self) -> dict[Action, set[Action]]:
        """All that must be done before each action, whatever the order."""
        earlier: dict[Action, set[Action]] = {}
        for a, waits_for in self._waits_for.items():
            earlier[a] = {b for b, _ in waits_for}.union(*(earlier[b] for b, _ in waits_for))
        return earlier

    def _offset(self, rank: int) -> float:
        """When the span of a rank begins: its first forward is the first that can be there."""
        return self.head[F(self.problem.stages_of_rank[rank][0], 0)] if self.span else 0.0

    def _rank(self, a: Action) -> int:
        return self.problem.rank_of(a.stage, self.problem.num_ranks)

    def _time(self, a: Action) -> float:
        times = {
            Kind.F: self.problem.forward,
            Kind.B: self.problem.backward_input,
            Kind.W: self.problem.backward_weight,
        }
        return times[a.kind][a.stage]

    def _latest(self, a: Action) -> float:
        return max(self.head[a], self.most - self._tail[a] - self._time(a))

    # -- rows -----------------------------------------------------------------------------------

    def _variable(self, low: float, high: float) -> int:
        self.ranges.append((low, high))
        return len(self.ranges) - 1

    def _row(self, low: float, terms: Terms, high: float = math.inf) -> None:
        self.rows.append((low, terms, high))

    def is_before(self, a: Action, b: Action) -> tuple[Terms, float]:
        """Return what is 1 where a is before b on their rank, and else 0, as terms and a constant."""
        if a in self._earlier[b]:
            return {}, 1.0
        if b in self._earlier[a]:
            return {}, 0.0
        if (a, b) in self._before:
            return {self._before[a, b]: 1.0}, 0.0
        return {self._before[b, a]: -1.0}, 1.0

    def _one_at_a_time(self, own: Sequence[Action]) -> None:
        """Choose, of two actions that do not wait for each other, which is before the other."""
        for a, b in combinations(own, 2):
            if a in self._earlier[b] or b in self._earlier[a]:
                continue
            a_can_be_first = self.head[a] + self._time(a) <= self._latest(b) * (1 + ROUNDING)
            b_can_be_first = self.head[b] + self._time(b) <= self._latest(a) * (1 + ROUNDING)
            chosen = self._variable(float(not b_can_be_first), float(a_can_be_first or not b_can_be_first))
            self._before[a, b] = chosen
            self.whole.append(chosen)
            # Each row says nothing where the other is chosen: the slack is the most that they can be apart.
            slack = max(0.0, self._latest(a) + self._time(a) - self.head[b])
            self._row(self._time(a) - slack, {self.start[b]: 1.0, self.start[a]: -1.0, chosen: -slack})
            slack = max(0.0, self._latest(b) + self._time(b) - self.head[a])
            self._row(self._time(b), {self.start[a]: 1.0, self.start[b]: -1.0, chosen: slack})

    def _in_turn(self, own: Sequence[Action]) -> None:
        """Say that what comes before something comes before what is behind that, and with it all that is earlier."""
        for a in own:
            following = Action(a.kind, a.stage, a.microbatch + 1)
            if following not in self.start:
                continue
            for b in own:
                if b not in (a, following):
                    self._at_least(self.is_before(a, b), self.is_before(following, b))
                    self._at_least(self.is_before(b, following), self.is_before(b, a))

    def _at_least(self, more: tuple[Terms, float], less: tuple[Terms, float]) -> None:
        if more[0] or less[0]:
            self._row(less[1] - more[1], _sum(more[0], {v: -c for v, c in less[0].items()}))

    def _one_after_another(self, rank: int, own: Sequence[Action]) -> None:
        """Say that all that is before an action takes its time before it, and all that is behind it after it."""
        begin = min(self.head[a] for a in own)
        for a in own:
            starts, ends = {self.start[a]: 1.0}, {self._longest: 1.0, self.start[a]: -1.0}
            before, after = begin, self._time(a) - self._offset(rank)
            for b in own:
                if b is a:
                    continue
                terms, constant = self.is_before(b, a)
                before += constant * self._time(b)
                after += (1 - constant) * self._time(b)
                starts = _sum(starts, {v: -c * self._time(b) for v, c in terms.items()})
                ends = _sum(ends, {v: c * self._time(b) for v, c in terms.items()})
            self._row(before, starts)
            self._row(after, ends)

    def _memory(self, rank: int, own: Sequence[Action]) -> None:
        """Say that each forward finds room: nothing else takes memory."""
        problem = self.problem
        if problem.limit[rank] == math.inf:
            return
        for a in own:
            if a.kind is not Kind.F:
                continue
            terms: Terms = {}
            room = problem.limit[rank] * (1 + ROUNDING) - problem.activations[a.stage]
            for b in own:
                if b is a:
                    continue
                kept, later = problem.activations[b.stage], problem.deferred[b.stage]
                change = {Kind.F: kept, Kind.B: later - kept, Kind.W: -later}[b.kind]
                is_before, constant = self.is_before(b, a)
                terms = _sum(terms, {v: c * change for v, c in is_before.items()})
                room -= constant * change
            self._row(-math.inf, terms, room)


def _sum(a: Terms, b: Terms) -> Terms:
    return a | {v: a.get(v, 0.0) + c for v, c in b.items()}
