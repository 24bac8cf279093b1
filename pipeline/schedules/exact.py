"""The shortest order that there is, by a solver: for small problems, to check the search and its bounds by.

The solver is HiGHS, from the optional package `highspy`. Nothing here uses the bounds of `bound`, nor what a search
found, except as an order to start from; so the answer checks both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pipeline.schedules.action import Action
from pipeline.schedules.integer_program import IntegerProgram
from pipeline.schedules.problem import Problem
from pipeline.schedules.search import MEASURES
from pipeline.schedules.timeline import Timeline
from pipeline.schedules.words import counted

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
            f"F, B and W of {counted(problem.num_microbatches, 'micro-batch')} "
            f"on {counted(problem.num_stages, 'stage')}"
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
    solved, least = _solve(IntegerProgram(problem, span=measure == "span", most=most), seconds)
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


def _solve(model: IntegerProgram, seconds: float) -> tuple[list[list[Action]] | None, float]:
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
