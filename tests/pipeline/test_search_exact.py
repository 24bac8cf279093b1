"""The search against the solver: over problems drawn by chance, and over tight memories where no rule is best."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pipeline import check_deadlock_free, lower, validate
from pipeline.schedules.beam import beam
from pipeline.schedules.bound import lower_bounds
from pipeline.schedules.exact import shortest
from pipeline.schedules.problem import Problem
from pipeline.schedules.schedule import round_robin, v_shape
from pipeline.schedules.search import MEASURES, PLACEMENTS, search


@pytest.fixture(autouse=True, scope="module")
def solver():
    pytest.importorskip("highspy", reason="the exact answer needs highspy")


@st.composite
def problems(draw):
    """Draw unequal times, links and memory, so small that the solver needs a second at most."""
    num_chunks, rank_of = PLACEMENTS[draw(st.sampled_from(list(PLACEMENTS)))]
    num_ranks = draw(st.integers(1, 3 if num_chunks == 1 else 2))
    num_stages = num_chunks * num_ranks
    times = {
        name: draw(st.lists(st.sampled_from([1, 1.5, 2, 5]), min_size=num_stages, max_size=num_stages))
        for name in ("forward", "backward_input", "backward_weight")
    }
    kept = draw(st.lists(st.sampled_from([0.5, 1, 2]), min_size=num_stages, max_size=num_stages))
    share = draw(st.sampled_from([0, 0.5, 1]))
    least = [sum(k for s, k in enumerate(kept) if rank_of(s, num_ranks) == r) for r in range(num_ranks)]
    return Problem.of(
        num_ranks=num_ranks,
        num_microbatches=draw(st.integers(1, 3 if num_stages < 4 else 2)),
        rank_of=rank_of,
        num_stages=num_stages,
        latency=[draw(st.sampled_from([0, 0.25, 1])) for _ in range(num_stages - 1)],
        activations=kept,
        deferred=[share * k for k in kept],
        limit=[held + draw(st.sampled_from([0, 0.5, 1, 4])) for held in least],
        **times,
    )


@settings(max_examples=15, deadline=None, derandomize=True, phases=(Phase.generate,))
@given(problem=problems(), measure=st.sampled_from(list(MEASURES)))
def test_a_bound_is_at_most_the_exact_answer_which_is_found(problem, measure):
    found = search(problem, measure=measure, num_tries=150, seconds=60)
    exact = shortest(problem, found.orders, measure=measure)
    assert exact.proved
    assert max(bound.time for bound in lower_bounds(problem, span=measure == "span")) <= exact.time * (1 + 1e-6)
    assert found.bound.time <= exact.time * (1 + 1e-6)
    assert found.time == pytest.approx(exact.time)
    place = {"num_stages": problem.num_stages, "rank_of": problem.rank_of}
    validate(found.orders, num_microbatches=problem.num_microbatches, **place)
    check_deadlock_free(lower(found.orders, **place), **place)
    assert problem.fits(found.timeline)
    assert search(problem, measure=measure, num_tries=150, seconds=60).orders == found.orders


def tight(num_ranks, num_microbatches, limit, rank_of):
    num_stages = num_ranks * (1 if rank_of is round_robin else 2)
    return Problem.of(
        num_ranks=num_ranks, num_microbatches=num_microbatches, rank_of=rank_of, num_stages=num_stages, limit=limit
    )


CELLS = [(p, m, k, placement) for placement, (chunks, _) in PLACEMENTS.items() for p, m, k in [(2, 3, 2), (2, 4, 3)]]


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize(("p", "m", "k", "placement"), CELLS)
def test_the_shortest_order_of_a_tight_memory_is_found(p, m, k, placement, measure):
    """All cells that the solver settles within a minute: benchmarks/search.py."""
    problem = tight(p, m, k, PLACEMENTS[placement][1])
    found = search(problem, measure=measure, num_tries=150, seconds=60)
    assert found.time == pytest.approx(shortest(problem, found.orders, measure=measure).time)


@pytest.mark.parametrize(
    ("p", "m", "k", "measure", "time"),
    [(2, 4, 3, "makespan", 26), (2, 4, 3, "span", 25), (4, 4, 4, "makespan", 31), (4, 4, 4, "span", 31)],
)
def test_what_no_rule_finds_is_found_by_waiting(p, m, k, measure, time):
    """Rules alone came to 27, 26, 35 and 35: a rank that they let run a forward waits here for a backward."""
    assert search(tight(p, m, k, v_shape), measure=measure, num_tries=40, seconds=60).time == time


def test_a_look_that_drops_nothing_proves_that_nothing_is_shorter():
    problem = tight(2, 3, 2, v_shape)
    wide = beam(problem, span=False, width=10_000)
    time = problem.simulate(wide.orders).makespan
    assert wide.all
    assert time == pytest.approx(shortest(problem, wide.orders).time)
    assert beam(problem, span=False, width=10_000, below=time)[:2] == (None, True)
    narrow = beam(problem, span=False, width=1)
    assert not narrow.all


def test_a_look_ends_where_its_time_does():
    assert beam(tight(4, 8, 4, v_shape), span=True, width=1000, end=0.0)[:2] == (None, False)


def test_a_weight_half_that_waits_with_more_than_its_backward_frees_finds_room():
    problem = Problem.of(
        num_ranks=2, num_microbatches=4, rank_of=round_robin, num_stages=2, activations=1, deferred=2, limit=3
    )
    found = search(problem, num_tries=20, seconds=60)  # once an AssertionError: a backward took what there was not
    assert problem.fits(found.timeline)
