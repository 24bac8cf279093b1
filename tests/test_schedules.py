"""The drawings are laid out by hand: a schedule is right when it looks like its picture."""

import inspect
from itertools import product

import pytest

from pipeline import SCHEDULES, Schedule, draw, gpipe, lower, one_f_one_b, simulate, validate

SIZES = list(product(range(1, 7), range(1, 13)))


def drawn(name, num_ranks, num_microbatches):
    orders = SCHEDULES[name].orders(num_ranks, num_microbatches)
    return draw(simulate(orders, num_stages=num_ranks))


DRAWINGS = {
    ("gpipe", 2, 4): """
rank 0 |F0|F1|F2|F3|        |B0   |B1   |B2   |B3   |
rank 1    |F0|F1|F2|F3|B0   |B1   |B2   |B3   |
""",
    ("gpipe", 3, 2): """
rank 0 |F0|F1|                 |B0   |B1   |
rank 1    |F0|F1|        |B0   |B1   |
rank 2       |F0|F1|B0   |B1   |
""",
    ("1f1b", 2, 4): """
rank 0 |F0|F1|     |B0   |F2|B1   |F3|B2   |  |B3   |
rank 1    |F0|B0   |F1|B1   |F2|B2   |F3|B3   |
""",
    ("1f1b", 3, 4): """
rank 0 |F0|F1|F2|           |B0   |F3|B1   |  |B2   |  |B3   |
rank 1    |F0|F1|     |B0   |F2|B1   |F3|B2   |  |B3   |
rank 2       |F0|B0   |F1|B1   |F2|B2   |F3|B3   |
""",
}


@pytest.mark.parametrize("case", DRAWINGS, ids=str)
def test_looks_like_its_drawing(case):
    assert drawn(*case) == DRAWINGS[case].strip()


@pytest.mark.parametrize(("order", "case"), [(gpipe, ("gpipe", 2, 4)), (one_f_one_b, ("1f1b", 2, 4))])
def test_the_docstring_shows_the_same_drawing(order, case):
    assert all(line in inspect.getdoc(order) for line in DRAWINGS[case].strip().splitlines())


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)
def test_every_small_size_is_valid_and_costs_what_the_formulas_say(name, num_ranks, num_microbatches):
    schedule = SCHEDULES[name]
    num_stages = schedule.num_stages(num_ranks)
    orders = schedule.orders(num_ranks, num_microbatches)
    validate(orders, num_stages=num_stages, num_microbatches=num_microbatches, rank_of=schedule.rank_of)
    timeline = simulate(orders, num_stages=num_stages, forward=1.5, backward_input=1.25, backward_weight=0.75)
    peak = {
        "gpipe": [num_microbatches] * num_ranks,
        "1f1b": [min(num_microbatches, num_ranks - rank) for rank in range(num_ranks)],
    }
    assert timeline.bubble_fraction == pytest.approx((num_ranks - 1) / num_microbatches)
    assert timeline.peak_microbatches == timeline.peak_microbatches_per_stage == peak[name]
    programs = lower(orders, rank_of=schedule.rank_of, num_stages=num_stages)
    assert [[action for action in program if action.kind.is_compute] for program in programs] == orders


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)
def test_all_schedules_sum_gradients_in_one_order(num_ranks, num_microbatches):
    for schedule in SCHEDULES.values():
        for order in schedule.orders(num_ranks, num_microbatches):
            backwards = [action.microbatch for action in order if action.kind.value in ("B", "BW")]
            assert backwards == list(range(num_microbatches))


def test_the_table_is_keyed_by_name():
    assert {name: schedule.name for name, schedule in SCHEDULES.items()} == {"gpipe": "gpipe", "1f1b": "1f1b"}


def test_counts_start_at_one():
    with pytest.raises(ValueError, match="num_microbatches must be at least 1, got 0"):
        SCHEDULES["1f1b"].orders(2, 0)
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
        SCHEDULES["gpipe"].orders(0, 2)


def test_chunks_multiply_the_stages():
    schedule = Schedule("two chunks", gpipe, num_chunks=2)
    assert schedule.num_stages(3) == 6
    assert schedule.num_ranks(6) == 3
    assert [schedule.rank_of(stage, 3) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ValueError, match="two chunks needs num_stages divisible by num_chunks, got 5 and 2"):
        schedule.num_ranks(5)
