"""The solver, against every order that there is of small problems, and as a judge of search and bounds."""

import random
import sys

import pytest
from all_orders import SMALL, random_problem, shortest_times

from minigrad.extras import needs
from pipeline import check_deadlock_free, lower, validate
from pipeline.cli.main import main
from pipeline.schedules.bound import lower_bounds
from pipeline.schedules.csv_file import load
from pipeline.schedules.exact import check_solvable, shortest
from pipeline.schedules.greedy import Rule, build
from pipeline.schedules.problem import Problem
from pipeline.schedules.schedule import round_robin, v_shape
from pipeline.schedules.search import MEASURES, search


@pytest.fixture(autouse=True)
def solver():
    pytest.importorskip("highspy", reason="the exact answer needs highspy")


def some_orders(problem):
    """Return orders that fit, and are not short: one micro-batch after another."""
    offsets = tuple((100.0, 100.0 if stage else 0.0, 0.0) for stage in range(problem.num_stages))
    return build(problem, Rule(offsets, period=1000.0, target=float("inf"), patience=float("inf"))).orders


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("size", SMALL, ids=lambda size: f"{size[0]}-{size[1]}-{size[2]}-{size[3].__name__}")
def test_it_is_the_shortest_of_all_that_there_are(size, seed):
    problem = random_problem(*size, random.Random(seed), deferred=(0, 1))
    for measure, time in shortest_times(problem).items():
        found = shortest(problem, some_orders(problem), measure=measure)
        assert found.time == pytest.approx(time), measure
        assert found.proved
        assert problem.fits(found.timeline)


def small(num_ranks, num_microbatches, rank_of, **values):
    num_stages = num_ranks * (1 if rank_of is round_robin else 2)
    return Problem.of(
        num_ranks=num_ranks, num_microbatches=num_microbatches, rank_of=rank_of, num_stages=num_stages, **values
    )


UNEQUAL = {"forward": [1, 2, 1, 3], "backward_input": [1, 2, 2, 3], "backward_weight": [1, 1, 2, 2], "latency": 0.5}
PROBLEMS = {
    "4 x 8, memory of 3": small(4, 8, round_robin, limit=3),
    "4 x 8, twice the memory": small(4, 8, round_robin, limit=8, deferred=0.5, latency=0.1),
    "4 x 6, unequal stages": small(4, 6, round_robin, limit=4, deferred=0.5, **UNEQUAL),
    "v, 2 x 3": small(2, 3, v_shape, limit=3),
}


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_it_lies_between_the_bound_and_what_is_found(name, measure):
    problem = PROBLEMS[name]
    found = search(problem, measure=measure, num_tries=20, seconds=60)
    exact = shortest(problem, found.orders, measure=measure)
    assert exact.proved
    assert max(bound.time for bound in lower_bounds(problem, span=measure == "span")) <= exact.time * (1 + 1e-6)
    assert exact.time <= found.time * (1 + 1e-6)
    place = {"num_stages": problem.num_stages, "rank_of": problem.rank_of}
    validate(exact.orders, num_microbatches=problem.num_microbatches, **place)
    check_deadlock_free(lower(exact.orders, **place), **place)
    assert problem.fits(exact.timeline)


def test_the_command_prints_it_and_writes_its_order(tmp_path, capfd):
    path = tmp_path / "exact.csv"
    sizes = ["--ranks", "2", "--microbatches", "3", "--placement", "v", "--memory", "1.5"]
    assert main(["search", *sizes, "--seconds", "60", "--exact", "--csv", str(path)]) == 0
    printed = capfd.readouterr().out
    assert printed.startswith("placement v: 4 stages on 2 ranks, 3 micro-batches\nmakespan                    10\n")
    assert printed.endswith("exact                       10  (by a solver: no order is shorter)\n")
    problem = PROBLEMS["v, 2 x 3"]
    assert problem.simulate(load(path).orders(2, 3)).makespan == 20  # whose actions are twice as long


def test_a_solver_that_runs_out_of_seconds_says_what_it_ruled_out():
    problem = small(4, 8, v_shape, limit=4)
    orders = some_orders(problem)
    exact = shortest(problem, orders, seconds=0.01)
    assert not exact.proved
    assert exact.orders == orders
    assert exact.report().endswith(f" to {exact.time:.6g}  (the solver ran out of seconds)")


@pytest.mark.parametrize(
    ("problem", "measure", "message"),
    [
        (small(4, 40, round_robin), "span", "of at most 400 actions, got 480: F, B and W of 40 micro-batches on 4 st"),
        (small(2, 2, round_robin, deferred=2), "span", "memory from B to W as from F to B, got 2 and 1 on stage 0"),
        (small(2, 2, round_robin), "time", "measure must be one of makespan, span, got 'time'"),
        (
            small(2, 2, lambda stage, ranks: 1 - stage % 2),
            "span",
            r"needs the first stages on one rank after another, got \[1, 0\] by rank",
        ),
    ],
)
def test_what_it_cannot_answer_is_refused(problem, measure, message):
    with pytest.raises(ValueError, match=message):
        check_solvable(problem, measure)


def test_without_the_package_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "highspy", None)
    assert main(["search", "--ranks", "2", "--exact"]) == 2
    assert needs("an exact answer", "highspy", "exact") in capsys.readouterr().err
