"""Orders that are begun, against all that can become of them: small problems, every order of which is looked at."""

from collections import defaultdict

import pytest

from pipeline.schedules.beam import beam
from pipeline.schedules.partial import Partial, Partials
from pipeline.schedules.problem import Problem
from pipeline.schedules.schedule import round_robin, v_shape

ONE, V = {"rank_of": round_robin, "num_stages": 2}, {"rank_of": v_shape, "num_stages": 4}
PROBLEMS = {
    "slow messages": {**ONE, "num_microbatches": 2, "forward": [1, 2], "latency": 0.5},
    "unequal times": {**ONE, "num_microbatches": 2, "forward": [2, 1], "backward_input": [1, 2], "latency": 0.5},
    "little memory": {**ONE, "num_microbatches": 3, "forward": [2, 1], "backward_weight": [1, 3], "limit": 2},
    "two stages a rank": {**V, "num_microbatches": 1, "forward": [1, 2, 1, 3], "latency": 1},
}


def looked_at(problem: Problem) -> tuple[Partials, list[tuple[Partial, float]]]:
    """Return every order that is begun, each with the shortest time that comes of it."""
    partials = Partials(problem, span=False)
    found = []

    def shortest(partial: Partial) -> float:
        time = min(map(shortest, partials.next(partial)), default=float("inf"))
        if sum(partial.started) == partials.size:
            time = max(partial.free)
        found.append((partial, time))
        return time

    shortest(partials.begin())
    return partials, found


@pytest.mark.parametrize("name", PROBLEMS)
def test_orders_of_one_key_become_equally_short(name: str) -> None:
    partials, found = looked_at(Problem.of(num_ranks=2, **PROBLEMS[name]))
    times = defaultdict(set)
    for partial, time in found:
        times[partials.key(partial)].add(time)
    assert len(times) < len(found)
    assert {len(each) for each in times.values()} == {1}


def test_orders_that_can_go_on_in_the_same_ways_are_gone_on_with_once() -> None:
    """16,211 starts with arrivals told apart that a rank is not free for, 13,479 with those that it has passed over."""
    problem = Problem.of(num_ranks=2, num_microbatches=3, **V, limit=2)
    assert beam(problem, span=False, width=10_000)[1:] == (True, 12_981)


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_order_becomes_shorter_than_its_outlook(name: str) -> None:
    partials, found = looked_at(Problem.of(num_ranks=2, **PROBLEMS[name]))
    assert all(partials.outlook(partial)[0] <= time + 1e-9 for partial, time in found)
