"""The search and its bounds, against published values and against all orders there are of small problems."""

import math
import random
from dataclasses import replace
from time import process_time

import pytest
from all_orders import SMALL, random_problem, shortest_times
from test_simulate import PUBLISHED

from pipeline import BW, SCHEDULES, B, F, W, check_deadlock_free, lower, validate
from pipeline.schedules.beam import beam
from pipeline.schedules.bound import lower_bounds
from pipeline.schedules.greedy import Rule, build
from pipeline.schedules.problem import Problem
from pipeline.schedules.room import end_of, windows
from pipeline.schedules.schedule import round_robin, v_shape
from pipeline.schedules.search import search

# ZB-2p of the same tables, and the memory of a deferred weight half as a share of a micro-batch's activations.
ZB_2P = (0.0433, 0.0039, 0.0026, 0.0029, 0.0022, 0.0010, 0.0066, 0.0054, 0.0028, 0.0038, 0.0029, 0.0018)
LONG = pytest.mark.long
DEFERRED = (0.366,) * 3 + (0.432,) * 9


def published(row, deferred):
    num_ranks, num_microbatches, f, b, w, latency = row[:6]
    return Problem.of(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        rank_of=round_robin,
        num_stages=num_ranks,
        forward=f,
        backward_input=b,
        backward_weight=w,
        latency=latency,
        deferred=deferred,
        limit=2 * num_ranks,
    )


def a_v(num_ranks, num_microbatches, limit):
    return Problem.of(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        rank_of=v_shape,
        num_stages=2 * num_ranks,
        limit=limit,
    )


def test_the_way_between_two_stages_is_what_lies_between_them():
    times = {"forward": (1.0, 2, 4, 8), "backward_input": (16.0, 32, 64, 128), "latency": (256.0, 512, 1024)}
    problem = Problem.of(num_ranks=4, num_microbatches=2, rank_of=round_robin, num_stages=4, **times)
    assert [problem.down(1, last) for last in (1, 2, 3)] == [0, 2 + 512, 2 + 512 + 4 + 1024]
    assert [problem.up(2, last) for last in (2, 1, 0)] == [0, 64 + 512, 64 + 512 + 32 + 256]


@pytest.mark.parametrize("span", [False, True])
def test_bounds_of_many_stages_take_no_longer_than_the_stages_are_many(span):
    """Each way between two stages was added up anew, once for each pair of stages: three seconds."""
    start = process_time()
    lower_bounds(a_v(256, 4, math.inf), span=span)
    assert process_time() - start < 1


@pytest.mark.parametrize("span", [False, True])
@pytest.mark.parametrize("size", SMALL, ids=lambda size: f"{size[0]}-{size[1]}-{size[2]}-{size[3].__name__}")
def test_where_ranks_hold_any_amount_no_bound_is_by_memory(size, span):
    """A rank that begins late, or that has run all its forwards, was said to have no room for more."""
    for seed in range(50):
        problem = random_problem(*size, random.Random(seed))
        problem = replace(problem, limit=(math.inf,) * problem.num_ranks)
        bound = max(lower_bounds(problem, span=span), key=lambda bound: bound.time)
        assert not bound.reason.startswith("memory"), (seed, bound)


def test_a_bound_says_what_bounds():
    loop = Problem.of(num_ranks=2, num_microbatches=3, rank_of=round_robin, num_stages=4)
    begun = "busiest rank: rank 1 computes for so long once the first micro-batch is there"
    assert search(loop, num_tries=1).bound == (19, begun)
    few = Problem.of(num_ranks=4, num_microbatches=2, rank_of=round_robin, num_stages=4)
    waits = "critical path: rank 0 has run all its forwards while its first backward is on its way"
    assert search(few, num_tries=1).bound == (11, waits)
    full = "memory: rank 1 has no room for more forwards while its first backward is on its way"
    assert search(a_v(2, 3, 3), num_tries=1).bound == (20, full)


@pytest.mark.parametrize("index", [0, 3, *(pytest.param(index, marks=LONG) for index in (1, 2, 4, 5))])
def test_the_search_is_as_short_as_zb_2p_and_proves_that_nothing_is_shorter(index):
    """All twelve rows: benchmarks/search.py."""
    found = search(published(PUBLISHED[index], DEFERRED[index]), measure="span", num_tries=10, seconds=60)
    assert round(found.timeline.span_bubble_rate, 4) <= ZB_2P[index] < PUBLISHED[index][8]
    assert found.gap < 1e-9
    assert found.num_tries < 10


@pytest.mark.parametrize(
    ("p", "k", "bubble"),
    [(3, 4, 5), (4, 6, 5), (4, 8, 0), *(pytest.param(*row, marks=LONG) for row in [(4, 4, 11), (4, 5, 8), (4, 7, 3)])],
)
def test_a_v_is_as_short_as_the_public_search_with_the_same_memory(p, k, bubble):
    found = search(a_v(p, 2 * p, k), measure="span", num_tries=31, seconds=60)
    assert found.timeline.span_bubble <= bubble
    assert max(found.timeline.peak_microbatches) <= k


def test_an_exception_to_a_rule_before_a_gap_finds_what_no_rule_does():
    """Thousands of rules without exceptions came to a bubble of 6 here, where the public search has 5."""
    found = search(a_v(8, 24, 14), measure="span", num_tries=60, seconds=60)
    assert found.timeline.span_bubble <= 5
    assert max(found.timeline.peak_microbatches) <= 14


def test_a_rank_does_what_an_exception_says_or_waits_for_it():
    problem = Problem.of(num_ranks=2, num_microbatches=3, rank_of=round_robin, num_stages=2)
    rule = Rule(((1.0, 0.0, 2.0),) * 2, 0.0, float("inf"))
    assert build(problem, rule).orders[1][:4] == [F(1, 0), B(1, 0), F(1, 1), B(1, 1)]
    other = build(problem, replace(rule, exceptions={(1, 2): (2, 1), (0, 1): (1, 0)})).orders
    assert other[1][:4] == [F(1, 0), B(1, 0), W(1, 0), F(1, 1)]
    assert other[0][:2] == [F(0, 0), B(0, 0)]
    assert build(problem, replace(rule, exceptions={(0, 0): (1, 0)})) is None  # nothing to do backward


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", SMALL, ids=lambda size: f"{size[0]}-{size[1]}-{size[2]}-{size[3].__name__}")
def test_bounds_and_found_orders_against_all_that_there_are(size, seed):
    problem = random_problem(*size, random.Random(seed))
    for measure, time in shortest_times(problem).items():
        found = search(problem, measure=measure, num_tries=300, seconds=60, seed=seed)
        assert max(bound.time for bound in lower_bounds(problem, span=measure == "span")) <= time + 1e-6
        assert found.time == pytest.approx(time), measure


@pytest.mark.parametrize("rank_of", [round_robin, v_shape])
def test_what_is_found_is_valid_fits_and_is_no_worse_than_a_named_schedule(rank_of):
    problem = Problem.of(
        num_ranks=3,
        num_microbatches=7,
        rank_of=rank_of,
        num_stages=6,
        forward=[1, 2, 1, 1, 3, 1],
        backward_input=[2, 2, 1, 1.5, 3, 1],
        backward_weight=[1, 2, 1, 1, 2, 0.5],
        latency=0.25,
        activations=[2, 1, 1, 1, 1, 1],
        deferred=0.5,
        limit=[12, 9, 7],
    )
    found = search(problem, num_tries=50, seconds=60)
    validate(found.orders, num_stages=6, num_microbatches=7, rank_of=rank_of)
    check_deadlock_free(lower(found.orders, rank_of=rank_of, num_stages=6), rank_of=rank_of, num_stages=6)
    assert problem.fits(found.timeline)
    assert found.bound.time <= found.time
    for schedule in SCHEDULES.values():
        if schedule.num_chunks == 2 and [schedule.rank_of(s, 3) for s in range(6)] == [rank_of(s, 3) for s in range(6)]:
            try:
                timeline = problem.simulate(schedule.orders(3, 7))
            except ValueError:
                continue
            assert not problem.fits(timeline) or found.time <= timeline.makespan
    again = search(problem, num_tries=50, seconds=60)
    assert again.orders == found.orders


def test_memory_is_never_more_than_the_limit_and_less_memory_is_never_shorter():
    times = [search(a_v(4, 8, k), num_tries=20, seconds=60) for k in (2, 3, 4, 6, 8)]
    assert all(max(found.timeline.peak_microbatches) <= k for k, found in zip((2, 3, 4, 6, 8), times, strict=True))
    assert times[0].time > times[2].time > times[4].time


@pytest.mark.parametrize(
    ("times", "grain"),
    [([1.0, 2.0], 1), ([18.5, 9.0], 0.5), ([18.522, 0.601], 0.001), ([1 / 3, 1 / 3], 1 / 3), ([0.1, 0.3], 0.1)],
)
def test_every_time_is_a_multiple_of_the_grain(times, grain):
    problem = Problem.of(num_ranks=2, num_microbatches=3, rank_of=round_robin, num_stages=2, forward=times)
    problem = replace(problem, backward_input=problem.forward, backward_weight=problem.forward)
    assert problem.grain == pytest.approx(grain)
    time = problem.simulate(SCHEDULES["1f1b"].orders(2, 3)).makespan
    assert problem.rounded_up(time) == pytest.approx(time, rel=1e-12)
    assert problem.rounded_up(time - grain / 3) == pytest.approx(time)
    assert problem.shorter_than(time) == pytest.approx(time - grain)
    assert problem.shorter_than(time + grain / 3) == pytest.approx(time)


def test_times_without_a_grain_are_left_as_they_are():
    problem = Problem.of(num_ranks=1, num_microbatches=1, rank_of=round_robin, num_stages=1, forward=2**0.5, latency=0)
    assert problem.rounded_up(10.1) == 10.1
    assert 10.1 - 1e-7 < problem.shorter_than(10.1) < 10.1


def test_a_look_for_less_than_a_time_between_two_grains_finds_the_shorter_of_them():
    problem = a_v(2, 2, 2)
    shortest = search(problem, seconds=60).time
    looked = beam(problem, span=False, width=10_000, below=shortest + 0.5)
    assert problem.simulate(looked.orders).makespan == shortest
    assert beam(problem, span=False, width=10_000, below=shortest)[:2] == (None, True)


@pytest.mark.parametrize(
    ("p", "m", "k", "rank_of", "time"),
    [(4, 4, 2, round_robin, 53), (4, 4, 3, round_robin, 41), (4, 8, 3, round_robin, 73), (3, 3, 2, v_shape, 29)],
)
def test_where_little_fits_what_is_at_a_time_bounds_the_step(p, m, k, rank_of, time):
    """Of two stages a rank that holds three inputs: one micro-batch at a time is between F and B of the second."""
    problem = replace(a_v(p, m, k), rank_of=rank_of)
    found = search(problem, num_tries=200, seconds=60)
    assert found.time == found.bound.time == time
    held = windows(problem)
    assert held
    for window in held:
        (row,) = [row for row in found.timeline.rows if any(t.action == F(window.first, 0) for t in row)]
        at = {t.action: t for t in row}
        inside = [(at[F(window.first, i)].start, at[B(window.last, i)].end) for i in range(m)]
        assert all(end - start >= window.length for start, end in inside)
        assert max(sum(start <= now < end for start, end in inside) for now, _ in inside) <= window.most


@pytest.mark.parametrize("free", [[0.0], [0.0, 1.0], [0.0, 3.0, 3.0], [0.0, 2.0, 19.0]])
def test_jobs_in_slots_end_as_early_as_where_each_goes_where_it_can_end_first(free):
    for count in range(1, 9):
        ends = sorted(start + 5 * (i + 1) for start in free for i in range(count))
        assert end_of(free, 5.0, count) == ends[count - 1]


def test_the_report_says_what_is_proved():
    found = search(a_v(4, 8, 8), measure="span")
    assert found.report().splitlines()[0] == "span                        48"
    assert "(proved: no order is shorter)" in found.report()
    assert "best named that fits        48  (zbv)" in found.report()
    unproved = search(a_v(4, 8, 4), measure="span", num_tries=5)
    assert unproved.gap > 0.05
    assert "proved" not in unproved.report()


def test_a_full_backward_counts_as_its_halves():
    problem = Problem.of(
        num_ranks=1, num_microbatches=1, rank_of=round_robin, num_stages=1, activations=2, deferred=5, limit=5
    )
    assert problem.peaks(problem.simulate([[F(0, 0), BW(0, 0)]])) == [2]
    assert problem.peaks(problem.simulate([[F(0, 0), B(0, 0), W(0, 0)]])) == [5]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_ranks": 0}, "num_ranks must be at least 1, got 0"),
        ({"num_microbatches": 0}, "num_microbatches must be at least 1, got 0"),
        ({"num_stages": 1}, r"every rank below 2 needs a stage, got stages on ranks \[0\]"),
        ({"forward": [1, 1, 1]}, "forward must be one number or one for each of the stages, got 3 for 2"),
        ({"backward_weight": 0}, "backward_weight must be positive and finite, got 0"),
        ({"latency": -1}, "latency must be at least 0 and finite, got -1"),
        ({"activations": float("nan")}, "activations must be at least 0 and finite, got nan"),
        ({"activations": 3, "limit": 2}, "takes 3 on rank 0, got a limit of 2"),
    ],
)
def test_a_wrong_problem_is_refused(changed, message):
    arguments = {"num_ranks": 2, "num_microbatches": 2, "rank_of": round_robin, "num_stages": 2} | changed
    with pytest.raises(ValueError, match=message):
        Problem.of(**arguments)


def test_a_wrong_search_is_refused():
    with pytest.raises(ValueError, match="measure must be one of makespan, span, got 'time'"):
        search(a_v(2, 2, 4), measure="time")
    with pytest.raises(ValueError, match="seconds and num_tries must be above 0, got 0 and 2000"):
        search(a_v(2, 2, 4), seconds=0)
