"""The shortest order that there is, by a solver: for small problems, to check the search and its bounds by.

Micro-batches are alike, so each stage may take those of a kind in order: sorted by their times, they still find their
inputs done. What is left to choose is how the rows of F, B and W of a rank's stages interleave:

    before[a, b] = 1    a ends before b starts      for a, b of one rank that do not wait for each other anyway
    start[a]            after what a waits for; after all that is before it on its rank, one after another
    memory              what has run before a forward, and what of it was freed, leaves room for it

The solver is HiGHS, from the optional package `highspy`. Nothing here uses the bounds of `bound`, nor what a search
found, except as an order to start from; so the answer checks both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from itertools import combinations
from typing import Any

from pipeline.schedules.action import Action, B, F, Kind, W
from pipeline.schedules.problem import ROUNDING, Problem
from pipeline.schedules.search import MEASURES
from pipeline.schedules.timeline import Timeline

MOST_ACTIONS = 400
"""How many actions a problem may have in all: more than a solver can order in minutes."""

_SMALLEST_GAP = 1e-7  # relative, between what was found and what was ruled out


@dataclass(frozen=True)
class Exact:
    """What the solver says.

    Attributes:
        orders: the shortest that it found.
        timeline: of these orders.
        time: its makespan or longest span.
        least: no order is shorter; below `time` where the solver ran out of seconds.
    """

    orders: list[list[Action]]
    timeline: Timeline
    time: float
    least: float

    @property
    def proved(self) -> bool:
        """Whether no order is shorter than the one that was found."""
        return self.least >= self.time * (1 - 10 * _SMALLEST_GAP)

    def report(self) -> str:
        """Say what it is, on one line."""
        if self.proved:
            return f"exact                       {self.time:.6g}  (by a solver: no order is shorter)"
        return f"exact                       from {self.least:.6g} to {self.time:.6g}  (the solver ran out of seconds)"


def check_solvable(problem: Problem, measure: str) -> None:
    """Refuse what `shortest` cannot answer.

    Raises:
        ValueError: the problem is too large, keeps more from B to W than from F to B, or, for a span, does not begin
            on each rank with a stage that all others wait for in turn.
        RuntimeError: there is no highspy.
    """
    count = 3 * problem.num_stages * problem.num_microbatches
    if count > MOST_ACTIONS:
        raise ValueError(
            f"an exact answer is for small problems, of at most {MOST_ACTIONS} actions, got {count}: "
            f"F, B and W of {problem.num_microbatches} micro-batches on {problem.num_stages} stages"
        )
    for stage, (kept, later) in enumerate(zip(problem.activations, problem.deferred, strict=True)):
        if later > kept:
            raise ValueError(
                "an exact answer needs at most as much memory from B to W as from F to B, "
                f"got {later:g} and {kept:g} on stage {stage}"
            )
    if measure not in MEASURES:
        raise ValueError(f"measure must be one of {', '.join(MEASURES)}, got {measure!r}")
    first = [own[0] for own in problem.stages_of_rank]
    if measure == "span" and first != list(range(problem.num_ranks)):
        raise ValueError(f"an exact span needs the first stages on one rank after another, got {first} by rank")
    _solver()


def shortest(
    problem: Problem, orders: Sequence[Sequence[Action]], *, measure: str = "makespan", seconds: float = 60.0
) -> Exact:
    """Return the shortest order of a problem.

    Orders here have their backwards in halves. A full backward is both in a row: where no more is kept from B to W
    than from F to B, that takes no more memory.

    Args:
        orders: some that fit; the solver looks for what is shorter, and where there is none, they are the answer.
        measure: what is to be short, as in `search`.
        seconds: that the solver may take.
    Raises:
        ValueError, RuntimeError: as `check_solvable`.
    """
    check_solvable(problem, measure)
    known = MEASURES[measure](problem.simulate(orders))
    most = min(problem.shorter_than(known), known * (1 - 5 * _SMALLEST_GAP))
    solved, least = _solve(_Model(problem, span=measure == "span", most=most), seconds)
    best = [list(order) for order in orders] if solved is None else solved
    timeline = problem.simulate(best)
    return Exact(best, timeline, MEASURES[measure](timeline), min(known, problem.rounded_up(max(least, 0.0))))


def _solver() -> Any:
    """Return the module of the solver."""
    try:
        return import_module("highspy")
    except ImportError as error:
        raise RuntimeError(  # in the words of `minigrad.extras.needs`, which is not for plain Python: it brings NumPy
            "an exact answer needs highspy: pip install highspy, or pip install '.[exact]' in the project's folder"
        ) from error


Terms = dict[int, float]
"""A sum of variables, by their numbers, with what each is multiplied by."""


@dataclass
class _Model:
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


def _solve(model: _Model, seconds: float) -> tuple[list[list[Action]] | None, float]:
    """Return the best orders that the solver found in time, if any, and the time that none is below; inf: no orders."""
    highspy = _solver()

    class Silent(highspy.Highs):  # type: ignore[name-defined]
        def enableCallbacks(self) -> None:  # the first that is called: it would print name, version and license
            self.silent()
            super().enableCallbacks()

    solver = Silent()
    solver.silent()
    for option, value in (
        ("time_limit", float(seconds)),
        ("threads", 1),
        ("mip_rel_gap", _SMALLEST_GAP),
        ("mip_feasibility_tolerance", _SMALLEST_GAP * 1e-2),
    ):
        solver.setOptionValue(option, value)
    for low, high in model.ranges:
        solver.addVar(low, high)
    for variable in model.whole:
        solver.changeColIntegrality(variable, highspy.HighsVarType.kInteger)
    solver.changeColCost(0, 1.0)
    for low, terms, high in model.rows:
        solver.addRow(low, high, len(terms), list(terms), list(terms.values()))
    solver.run()
    values = solver.getSolution().col_value
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return None, math.inf
    is_optimal = status == highspy.HighsModelStatus.kOptimal
    least = solver.getInfo().objective_function_value if is_optimal else solver.getInfo().mip_dual_bound
    if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None, least

    def place(a: Action, own: Sequence[Action]) -> float:
        """Count what is before an action."""
        return sum(
            constant + sum(c * round(values[v]) for v, c in terms.items())
            for terms, constant in (model.is_before(b, a) for b in own if b is not a)
        )

    orders = []
    for stages in model.problem.stages_of_rank:
        own = [a for a in model.start if a.stage in stages]
        orders.append(sorted(own, key=lambda a: place(a, own)))
    return orders, least
