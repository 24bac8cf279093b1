"""What no order can beat: lower bounds on the time of a step, each with its reason.

    busiest rank    a rank runs one action at a time, from when the first micro-batch is there
    critical path   the first micro-batch must get to a rank, all of them through it, and the last one back; a rank that
                    has run all its forwards waits for its first backward
    memory          what a rank may hold limits the forwards that it can run while the first backward is on its way,
                    and the micro-batches that can be under way at a time (`windows`)

All hold for any order of the same work. The last is often met, and so proves an order to be the best there is. Where
all times are multiples of one number, so is every step, and a bound is the next multiple.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipeline.schedules.problem import ROUNDING, Problem
from pipeline.schedules.room import end_of, windows

_HALVINGS = 60  # of an interval: beyond the precision of a float
_NOTHING = 1e-300  # in place of 0, to divide by


class Bound(NamedTuple):
    """A time that no order is below, and why."""

    time: float
    reason: str


def lower_bounds(problem: Problem, *, span: bool = False) -> list[Bound]:
    """List the three lower bounds on the makespan, or on the longest span of a rank; the largest of them counts."""
    kinds = _busiest(problem, span=span), _critical_path(problem, span=span), _memory(problem, span=span)
    largest = [max(bounds, key=lambda bound: bound.time) for bounds in kinds]
    return [bound._replace(time=problem.rounded_up(bound.time)) for bound in largest]


def _work(problem: Problem, rank: int) -> float:
    return problem.num_microbatches * sum(
        problem.forward[s] + problem.backward_input[s] + problem.backward_weight[s]
        for s in problem.stages_of_rank[rank]
    )


def _start(problem: Problem, rank: int, *, span: bool) -> float:
    """Return when the first micro-batch can be on a rank; a span begins there."""
    return 0.0 if span else problem.down(0, problem.stages_of_rank[rank][0])


def _busiest(problem: Problem, *, span: bool) -> Iterator[Bound]:
    for rank in range(problem.num_ranks):
        start = _start(problem, rank, span=span)
        begun = " once the first micro-batch is there" if start else ""
        yield Bound(start + _work(problem, rank), f"busiest rank: rank {rank} computes for so long{begun}")


def _idle(problem: Problem, rank: int, forwards: float) -> float:
    """Return how long a rank idles before its first backward, which runs forwards for so long."""
    stages = problem.stages_of_rank[rank]
    return max(0.0, problem.round_trip(stages[0], stages[-1]) - forwards)


def _critical_path(problem: Problem, *, span: bool) -> Iterator[Bound]:
    """Yield for every rank: the way to it, all forwards and backwards of its (last) stages, and the way back.

    For a span, the way starts and ends on the rank whose span it is, which must hold an earlier stage.
    """
    m, stages_of_rank = problem.num_microbatches, problem.stages_of_rank
    for rank, own in enumerate(stages_of_rank):
        for stages in (own[first:] for first in range(len(own))):
            through = m * sum(problem.forward[s] + problem.backward_input[s] for s in stages)
            for start, ends in _ways(problem, stages[0], span=span):
                # The last action of these is a backward of some stage; from it to the weight half of an earlier one.
                back = min(max(_back(problem, s, end) for end in ends) for s in stages)
                yield Bound(
                    problem.down(start, stages[0]) + through + back,
                    f"critical path: to rank {rank}, all its forwards and backwards, and back",
                )
        idle = _idle(problem, rank, m * sum(problem.forward[s] for s in own))
        yield Bound(
            _start(problem, rank, span=span) + idle + _work(problem, rank),
            f"critical path: rank {rank} has run all its forwards while its first backward is on its way",
        )
    for start in [own[0] for own in stages_of_rank] if span else [0]:
        there = problem.round_trip(start, start)
        back = problem.backward_input[start] + problem.backward_weight[start]
        yield Bound(there + back, "critical path: one micro-batch to the last stage and back")


def _back(problem: Problem, stage: int, end: int) -> float:
    """Return the time from the end of a backward until the weight half of an earlier stage, or of its own, is done."""
    backwards = problem.up(stage, end) - problem.backward_input[stage] + problem.backward_input[end]
    return backwards + problem.backward_weight[end]


def _memory(problem: Problem, *, span: bool) -> Iterator[Bound]:
    """Yield what memory costs: before a rank's first backward, and in the number of micro-batches under way."""
    m = problem.num_microbatches
    if problem.num_stages == problem.num_ranks:
        yield _first_backwards(problem, span=span)
    for rank, stages in enumerate(problem.stages_of_rank):
        start = _start(problem, rank, span=span)
        yield Bound(
            start + _idle(problem, rank, _most_forward(problem, rank)) + _work(problem, rank),
            f"memory: rank {rank} has no room for more forwards while its first backward is on its way",
        )
        held = m * sum(problem.activations[s] * problem.round_trip(s, s) for s in stages)
        last = min(problem.backward_input[s] + problem.backward_weight[s] for s in stages)
        yield Bound(
            start + held / problem.limit[rank] + last,
            f"memory: rank {rank} has no room for as many micro-batches as are under way at a time",
        )
    for window in windows(problem):
        f = problem.forward[window.first]
        free = [i * f for i in range(window.most)]  # they come one after another
        taken = end_of(free, window.length, m)
        for before, after in _ways(problem, window.first, span=span):
            back = max(_back(problem, window.last, end) for end in after)
            yield Bound(
                problem.down(before, window.first) + taken + back,
                f"memory: at most {window.most} at a time from F on stage {window.first} to B on stage {window.last}",
            )


def _ways(problem: Problem, stage: int, *, span: bool) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield where a way to a stage may begin, and where the way back may end, for what is to be short."""
    if not span:
        yield 0, range(stage + 1)
        return
    for own in problem.stages_of_rank:
        if own[0] <= stage:
            yield own[0], [own[0]]


def _most_forward(problem: Problem, rank: int) -> float:
    """Return the time of the forwards for which a rank has room at a time, as if forwards were divisible."""
    room, time = problem.limit[rank] * (1 + ROUNDING), 0.0
    for s in sorted(problem.stages_of_rank[rank], key=lambda s: problem.activations[s] / problem.forward[s]):
        kept, count = problem.activations[s], float(problem.num_microbatches)
        if kept > 0:
            count = min(count, room / kept)
            room -= count * kept
        time += count * problem.forward[s]
    return time


def _first_backwards(problem: Problem, *, span: bool) -> Bound:
    """Return the bound that the waits of all ranks for their first backwards give together; one stage a rank.

    Until its first backward a rank can only run forwards: whole ones, and as many as fit. Between the starts of two
    neighbours and between their first backwards lie a forward, a backward and two messages. So a rank that fills
    its wait with one forward more makes all ranks before it wait longer. For a step of a given time, each rank, from
    the last to the first, takes its first backward as early as the idle time that it has left allows, which is best
    for all before it; where a rank has no room for the forwards that its wait takes, no order has this time. The least
    time that is not ruled out is found by halving.
    """
    stage_of = [own[0] for own in problem.stages_of_rank]
    rank_of = {stage: rank for rank, stage in enumerate(stage_of)}
    most = []  # forwards that a stage's rank has room for
    for s in range(problem.num_stages):
        room = problem.limit[rank_of[s]] * (1 + ROUNDING) / max(problem.activations[s], _NOTHING)
        most.append(int(min(problem.num_microbatches, room)))

    def allows(time: float) -> bool:
        wait = 0.0  # from a rank's start to its first backward
        for s in reversed(range(problem.num_stages)):
            f, rank = problem.forward[s], rank_of[s]
            is_last = s + 1 == problem.num_stages
            wait += f if is_last else f + problem.backward_input[s + 1] + 2 * problem.transfer[s]
            idle = time - _work(problem, rank) - (0.0 if span else problem.down(0, s))
            forwards = min(int(wait / f * (1 + ROUNDING)), most[s])
            if wait - forwards * f > idle:
                if forwards == most[s] or idle < 0:
                    return False
                wait = (forwards + 1) * f
        return True

    low = max(_work(problem, rank) for rank in range(problem.num_ranks))
    high = low + 2 * problem.round_trip(0, 0)
    while not allows(high):
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if allows(middle) else (middle, high)
    kind = "memory" if min(most) < problem.num_microbatches else "critical path"
    return Bound(low, f"{kind}: forwards that fill the wait for a first backward")
