"""Every order that there is of a small problem, and the shortest of them."""

import random
from collections.abc import Iterator
from functools import cache
from itertools import product

from pipeline import Action, B, F, ScheduleError, W
from pipeline.schedules.action import Placement
from pipeline.schedules.problem import Problem
from pipeline.schedules.schedule import round_robin, v_shape
from pipeline.schedules.search import MEASURES

SMALL = [  # ranks, micro-batches, stages, where they are
    (2, 2, 2, round_robin),
    (3, 1, 3, round_robin),
    (2, 1, 4, v_shape),
    (2, 1, 4, round_robin),
    (1, 2, 1, round_robin),
]


def random_problem(
    num_ranks: int,
    num_microbatches: int,
    num_stages: int,
    rank_of: Placement,
    rng: random.Random,
    *,
    deferred: tuple[int, int] = (1, 3),
) -> Problem:
    """Return a problem with times, links, memory and a limit drawn by chance.

    Args:
        deferred: the least and the most of it.
    """
    times = {
        name: [rng.randint(1, 5) for _ in range(num_stages)]
        for name in ("forward", "backward_input", "backward_weight")
    }
    ranges = {"activations": (1, 3), "deferred": deferred}
    held = {name: [rng.randint(*limits) for _ in range(num_stages)] for name, limits in ranges.items()}
    least = max(
        sum(max(held["activations"][s], held["deferred"][s]) for s in range(num_stages) if rank_of(s, num_ranks) == r)
        for r in range(num_ranks)
    )
    return Problem.of(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        rank_of=rank_of,
        num_stages=num_stages,
        latency=[rng.choice([0, 1, 2]) for _ in range(num_stages - 1)],
        limit=[least + rng.randint(0, 4) for _ in range(num_ranks)],
        **times,
        **held,
    )


def shortest_times(problem: Problem) -> dict[str, float]:
    """Return the shortest makespan and span of all orders that fit and do not hang."""
    shortest = dict.fromkeys(MEASURES, float("inf"))
    for orders in _all_orders(problem):
        try:
            timeline = problem.simulate(orders)
        except ScheduleError:  # the ranks wait for each other
            continue
        if problem.fits(timeline):
            shortest = {name: min(time, MEASURES[name](timeline)) for name, time in shortest.items()}
    return shortest


def _all_orders(problem: Problem) -> Iterator[tuple[tuple[Action, ...], ...]]:
    """Yield every way in which ranks can do their work: per micro-batch and stage, F before B before W."""

    @cache
    def interleaved(chains: tuple[tuple[Action, ...], ...]) -> list[tuple[Action, ...]]:
        if not any(chains):
            return [()]
        return [
            (chain[0], *rest)
            for i, chain in enumerate(chains)
            if chain
            for rest in interleaved((*chains[:i], chain[1:], *chains[i + 1 :]))
        ]

    per_rank = [
        interleaved(tuple((F(s, i), B(s, i), W(s, i)) for s in own for i in range(problem.num_microbatches)))
        for own in problem.stages_of_rank
    ]
    yield from product(*per_rank)
