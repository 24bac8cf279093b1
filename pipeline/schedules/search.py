"""Search: for given times, links and memory, an order whose step is short, and how short one could be at best.

Orders are built by rules (`greedy`): first a few that are often best, then building blocks drawn at random, or close to
the best one so far, or that one with an exception where a rank idled: something else goes first there. Where a problem
is small, all orders are looked at besides, of which ever more are kept (`beam`). The search ends where a lower bound is
met (`bound`) or all orders were looked at, since nothing is left to find, or after so many tries or seconds. What it
returns is never worse than the best named schedule that fits.

    found = search(problem, measure="span")
    print(found.report())
    pipe = PipelineExecutor(stages, comm, found.schedule, num_microbatches=problem.num_microbatches, ...)
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.schedules.action import Action, Placement
from pipeline.schedules.beam import MOST_ACTIONS, beam
from pipeline.schedules.bound import Bound, lower_bounds
from pipeline.schedules.csv_file import dump, from_text
from pipeline.schedules.deadlock import check_deadlock_free
from pipeline.schedules.greedy import Built, Rule, build
from pipeline.schedules.lower import lower
from pipeline.schedules.problem import Problem
from pipeline.schedules.schedule import SCHEDULES, Schedule, round_robin, v_shape
from pipeline.schedules.timeline import Timeline
from pipeline.schedules.words import counted

MEASURES: dict[str, Callable[[Timeline], float]] = {
    "makespan": lambda timeline: timeline.makespan,
    "span": lambda timeline: max(timeline.span(rank) for rank in range(len(timeline.rows))),
}
"""What is to be short: from the start to the end of everything, or the longest span of a rank."""

PLACEMENTS: dict[str, tuple[int, Placement]] = {"one": (1, round_robin), "loop": (2, round_robin), "v": (2, v_shape)}
"""Where stages may be: how many a rank has, and which."""

_EXACT = 1e-9  # relative: what is called equal
_NARROWEST = 4  # beam


@dataclass(frozen=True)
class Found:
    """The shortest order that was found.

    Attributes:
        schedule: to run, for these ranks and micro-batches; `dump(schedule.orders(...))` is its CSV.
        time: its makespan or longest span.
        bounds: times that no order is below.
        named: the best schedule of SCHEDULES that has these stages on these ranks and fits, and its time.
        num_tries: rules and looks at all orders that were tried.
    """

    problem: Problem
    measure: str
    schedule: Schedule
    timeline: Timeline
    time: float
    bounds: list[Bound]
    named: tuple[str, float] | None
    num_tries: int

    @property
    def bound(self) -> Bound:
        """The largest lower bound."""
        return max(self.bounds, key=lambda bound: bound.time)

    @property
    def gap(self) -> float:
        """How much of the found time could be saved at most, as a share of it."""
        return max(0.0, 1 - self.bound.time / self.time)

    @property
    def orders(self) -> list[list[Action]]:
        """The order of every rank."""
        return self.schedule.orders(self.problem.num_ranks, self.problem.num_microbatches)

    @property
    def values(self) -> dict[str, Any]:
        """What was found, as plain values."""
        return {
            "measure": self.measure,
            "time": self.time,
            "bubble_rate": 1 - self.timeline.ideal / self.time,
            "bound": self.bound.time,
            "reason": self.bound.reason,
            "gap": self.gap,
            "named": None if self.named is None else {"schedule": self.named[0], "time": self.named[1]},
            "memory": self.problem.peaks(self.timeline),
            "num_tries": self.num_tries,
        }

    def report(self, peaks: Sequence[str] = ()) -> str:
        """Say what was found, and what was not ruled out.

        Args:
            peaks: what each rank holds at most, in words, where that is more than the problem counts.
        """
        proved = self.gap <= _EXACT
        held = peaks or [f"{peak:.4g}" for peak in self.problem.peaks(self.timeline)]
        lines = [
            f"{self.measure:28}{self.time:.6g}",
            f"bubble rate ({self.measure}){'':{15 - len(self.measure)}}{1 - self.timeline.ideal / self.time:.5f}",
            f"lower bound                 {self.bound.time:.6g}  ({self.bound.reason})",
            f"gap                         {self.gap:.5f}  {'(proved: no order is shorter)' if proved else ''}".rstrip(),
            f"memory a rank               {' '.join(held)}",
            f"tries                       {self.num_tries}",
        ]
        if self.named is not None:
            lines.insert(2, f"best named that fits        {self.named[1]:.6g}  ({self.named[0]})")
        return "\n".join(lines)


def search(
    problem: Problem,
    *,
    measure: str = "makespan",
    seconds: float = 10.0,
    num_tries: int = 2000,
    seed: int = 0,
    name: str = "found",
) -> Found:
    """Search for an order with a short step.

    The same seed gives the same order wherever the tries, and not the seconds, end the search.

    Args:
        measure: what is to be short, a key of MEASURES.
        seconds: begin no try after so long, and end a look at all orders.
        num_tries: rules, and looks at all orders.
    Returns:
        Orders that are valid, fit, and cannot deadlock.
    Raises:
        ValueError: an argument is out of its range, or no order was found that fits.
    """
    if measure not in MEASURES:
        raise ValueError(f"measure must be one of {', '.join(MEASURES)}, got {measure!r}")
    if not seconds > 0 or num_tries < 1:
        raise ValueError(f"seconds and num_tries must be above 0, got {seconds} and {num_tries}")
    bounds = lower_bounds(problem, span=measure == "span")
    goal = max(bound.time for bound in bounds)
    best: tuple[float, float, list[list[Action]]] | None = None
    named = _best_named(problem, measure)
    if named is not None:
        best = (named[0], problem.simulate(named[1]).makespan, named[1])
    end = time.monotonic() + seconds
    tries = 0
    rules = _Rules(problem, goal, random.Random(seed))
    for attempt in rules:
        if best is not None and best[0] <= goal * (1 + _EXACT):
            break
        if tries and (tries == num_tries or time.monotonic() > end):
            break
        tries += 1
        if isinstance(attempt, Rule):
            built = build(problem, attempt)
            if built is None:
                continue
            value = (built.span if measure == "span" else built.makespan, built.makespan)
            rules.note(attempt, built, value[0])
            if best is None or value < best[:2]:
                best = (*value, built.orders)
            continue
        below = math.inf if best is None else best[0]
        looked = beam(problem, span=measure == "span", width=attempt, below=below, end=end)
        if looked.orders is not None:
            timeline = problem.simulate(looked.orders)
            best = (MEASURES[measure](timeline), timeline.makespan, looked.orders)
        if looked.all and best is not None:
            bounds.append(Bound(best[0], "all orders: none that could be shorter is left"))
            break
    if best is None:
        raise ValueError(f"no order that fits was found in {counted(tries, 'attempt')}")
    schedule = from_text(dump(best[2]), name)  # which validates it
    programs = lower(best[2], rank_of=problem.rank_of, num_stages=problem.num_stages)
    check_deadlock_free(programs, rank_of=problem.rank_of, num_stages=problem.num_stages)
    timeline = problem.simulate(best[2])
    assert problem.fits(timeline)
    name_and_time = None if named is None else (named[2], named[0])
    return Found(problem, measure, schedule, timeline, MEASURES[measure](timeline), bounds, name_and_time, tries)


def search_placements(
    problem_in: Callable[[str], Problem],
    placements: Iterable[str] = tuple(PLACEMENTS),
    *,
    measure: str = "makespan",
    seconds: float = 10.0,
    num_tries: int = 2000,
    seed: int = 0,
    name: str = "found",
) -> dict[str, Found]:
    """Search an order in each placement of stages; return what was found where, the shortest first.

    Args:
        problem_in: the problem in a placement; a ValueError says that it has none there.
        placements: keys of PLACEMENTS; each has its share of the seconds.
    Raises:
        ValueError: there is none in any placement: what is wrong in the first.
    """
    names = list(placements)
    found: dict[str, Found] = {}
    refusals = []
    for placement in names:
        try:
            problem = problem_in(placement)
            share = seconds / len(names)
            found[placement] = search(
                problem, measure=measure, seconds=share, num_tries=num_tries, seed=seed, name=name
            )
        except ValueError as rule:  # this one does not fit, another may
            refusals.append(rule)
    if not found:
        raise refusals[0]
    return dict(sorted(found.items(), key=lambda item: item[1].time))


def _best_named(problem: Problem, measure: str) -> tuple[float, list[list[Action]], str] | None:
    """Return time, orders and name of the best schedule of these stages on these ranks that fits."""
    candidates = []
    for schedule in SCHEDULES.values():
        stages = range(problem.num_stages)
        if schedule.num_chunks * problem.num_ranks != problem.num_stages or any(
            schedule.rank_of(s, problem.num_ranks) != problem.rank_of(s, problem.num_ranks) for s in stages
        ):
            continue
        try:
            orders = schedule.orders(problem.num_ranks, problem.num_microbatches)
        except ValueError:  # one that does not allow these sizes
            continue
        timeline = problem.simulate(orders)
        if problem.fits(timeline):
            candidates.append((MEASURES[measure](timeline), orders, schedule.name))
    return min(candidates, key=lambda candidate: candidate[0], default=None)


class _Rules:
    """Yields rules without end: those that are often best, then random ones; and looks at all orders in between."""

    def __init__(self, problem: Problem, goal: float, rng: random.Random) -> None:
        self._problem = problem
        self._goal = goal
        self._rng = rng
        self._best: tuple[tuple[float, float], Rule, Built] | None = None
        work = [
            sum(problem.forward[s] + problem.backward_input[s] + problem.backward_weight[s] for s in own)
            for own in problem.stages_of_rank
        ]
        self._period = max(work)
        self._idle = goal - problem.num_microbatches * self._period  # that the goal leaves to the busiest rank
        self._tick = self._period / (3 * max(len(own) for own in problem.stages_of_rank))  # one action, about

    def note(self, rule: Rule, built: Built, time: float) -> None:
        """Tell what a rule came to; random ones stay close to the best."""
        value = (time, built.ends)
        if self._best is None or value <= self._best[0]:
            self._best = value, rule, built

    def __iter__(self) -> Iterator[Rule | int]:
        """Yield rules, and, the rarer the larger, how many orders to keep in a beam."""
        num_actions = 3 * self._problem.num_stages * self._problem.num_microbatches
        width = _NARROWEST if num_actions <= MOST_ACTIONS else math.inf
        for count, rule in enumerate(self._endless(), 1):
            yield rule
            if count >= 2 * width:
                yield int(width)
                width *= 4

    def _endless(self) -> Iterator[Rule]:
        yield from self._usual()
        while True:
            if self._best is not None and self._best[2].gaps and self._rng.random() < 0.5:
                yield self._with_exception(self._best[1], self._best[2])
            elif self._best is not None and self._rng.random() < 0.5:
                yield self._near(self._best[1])
            else:
                yield self._random()

    def _usual(self) -> Iterator[Rule]:
        """Yield: backwards first, then forwards, weight halves where there is nothing else."""
        stages = range(self._problem.num_stages)
        for first in (self._idle * (1 + _EXACT) + _EXACT * self._goal, self._idle + self._tick):
            for patience in (0.0, 0.01, 0.1):
                offsets = tuple((2.0 * len(stages) - s, float(len(stages) - 1 - s), 9.0 * len(stages)) for s in stages)
                yield Rule(offsets, 0.0, self._goal * (1 + _EXACT), first, patience * self._tick)

    def _random(self) -> Rule:
        """Return a building block: one micro-batch's way through all stages, stretched by chance."""
        problem, rng = self._problem, self._rng
        num_chunks = -(-problem.num_stages // problem.num_ranks)
        stretch = [[rng.choice((1.0, 1.0, 1.5, 2.0, 3.0, rng.uniform(0, 4))) for _ in range(num_chunks)] for _ in "FB"]
        at, forwards, backwards = 0.0, [], []
        for s in range(problem.num_stages):
            forwards.append(at)
            at += stretch[0][s // problem.num_ranks] * (problem.forward[s] + ([*problem.transfer, 0.0])[s])
        for s in reversed(range(problem.num_stages)):
            backwards.append(at)
            at += stretch[1][s // problem.num_ranks] * (problem.backward_input[s] + problem.transfer[s - 1] * (s > 0))
        put_off = rng.choice((self._tick, 2 * self._tick, self._period, 1e6 * self._period))
        return Rule(
            tuple((f, b, b + put_off) for f, b in zip(forwards, reversed(backwards), strict=True)),
            rng.choice((0.0, self._period, self._period, self._period)),
            self._goal * rng.choice((1 + _EXACT, 1.02, 1e6)),
            rng.choice((0.0, self._idle, self._tick, 2 * self._tick, 3 * self._tick)),
            rng.choice((0.0, 0.0, 0.01, 0.1, 1.0)) * self._tick,
            rng.random() < 0.7,
        )

    def _with_exception(self, rule: Rule, built: Built) -> Rule:
        """Return a rule that before a gap does something else."""
        rng = self._rng
        exceptions = dict(rule.exceptions)
        for _ in range(rng.choice((1, 1, 1, 2))):
            rank, gap = rng.choice(built.gaps)
            place = max(1, gap - rng.choice((0, 0, 1, 1, 2, 3, 5)))
            exceptions[rank, place] = rng.randrange(3), rng.choice(self._problem.stages_of_rank[rank])
        if exceptions and rng.random() < 0.3:
            del exceptions[rng.choice(list(exceptions))]
        return replace(rule, exceptions=exceptions)

    def _near(self, rule: Rule) -> Rule:
        rng, tick = self._rng, self._tick
        size = rng.choice((0.3, 1.0, 3.0)) * tick
        changed = tuple(
            tuple(x + (rng.gauss(0, size) if rng.random() < 0.3 else 0.0) for x in offsets) for offsets in rule.offsets
        )
        return replace(
            rule,
            offsets=changed,  # type: ignore[arg-type]
            first_patience=rng.choice((rule.first_patience, rng.uniform(0, 3 * tick))),
            patience=rng.choice((rule.patience, rng.uniform(0, tick))),
        )
