"""The drawings are laid out by hand: a schedule is right when it looks like its picture."""

import inspect
import re
from itertools import product

import pytest

from pipeline import (
    FORWARD_ONLY,
    SCHEDULES,
    Schedule,
    check_deadlock_free,
    draw,
    forward_only,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    lower,
    one_f_one_b,
    simulate,
    validate,
    zbv,
    zero_bubble_h1,
    zero_bubble_h2,
)
from pipeline.schedules.orders import interleaved_1f1b_order, looped_bfs_order
from pipeline.schedules.schedule import v_shape
from pipeline.schedules.v_orders import dualpipev, dualpipev_overlap, v_half, v_min

TIMES = [(1, 1, 1), (1.5, 1.25, 0.75), (2, 2, 1), (3, 2.5, 2), (1, 1.2, 0.9)]  # of F, B and W on a rank
TIMES += [(1, 3, 2), (1, 1, 2), (3, 1, 2)]  # a weight half that is longer than a forward, or than an input half
ALL = {**SCHEDULES, "forward_only": FORWARD_ONLY}
ANY = pytest.mark.parametrize("schedule", [*ALL.values(), interleaved_1f1b(3), looped_bfs(3)], ids=lambda s: s.name)


def sizes(schedule):
    """Yield (P, M) that a schedule allows: P up to 8, M below, at and between P, 2P - 1 and 2P."""
    for p, m in product(range(1, 9), (1, 2, 3, 4, 5, 6, 8, 11, 15, 16)):
        if schedule.name != "interleaved_1f1b" or m % p == 0:
            yield p, m


FEW, MANY = (1, 2, 3, 4), (5, 6, 7, 8)
UP_TO = pytest.mark.parametrize("num_ranks", [FEW, pytest.param(MANY, marks=pytest.mark.long)], ids=["few", "many"])


def drawn(name, num_ranks, num_microbatches):
    schedule = ALL[name]
    orders = schedule.orders(num_ranks, num_microbatches)
    return draw(simulate(orders, num_stages=schedule.num_stages(num_ranks)))


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
    ("forward_only", 2, 4): """
rank 0 |F0|F1|F2|F3|
rank 1    |F0|F1|F2|F3|
""",
    ("interleaved_1f1b", 2, 2): """
rank 0 |0F0|0F1|2F0|2F1|       |2B0    |   |2B1    |0B0    |0B1    |
rank 1     |1F0|1F1|3F0|3B0    |3F1|3B1    |1B0    |1B1    |
""",
    ("interleaved_1f1b", 1, 2): """
rank 0 |0F0|1F0|1B0    |0F1|0B0    |1F1|1B1    |0B1    |
""",
    ("looped_bfs", 2, 2): """
rank 0 |0F0|0F1|2F0|2F1|           |2B0    |2B1    |0B0    |0B1    |
rank 1     |1F0|1F1|3F0|3F1|3B0    |3B1    |1B0    |1B1    |
""",
    ("looped_bfs", 2, 1): """
rank 0 |0F0|   |2F0|           |2B0    |       |0B0    |
rank 1     |1F0|   |3F0|3B0    |       |1B0    |
""",
    ("zero_bubble_h1", 2, 3): """
rank 0 |F0|F1|  |B0|W0|F2|B1|W1|B2|W2|
rank 1    |F0|B0|F1|B1|W0|F2|B2|W1|W2|
""",
    ("zero_bubble_h1", 3, 3): """
rank 0 |F0|F1|F2|     |B0|W0|B1|W1|B2|W2|
rank 1    |F0|F1|  |B0|F2|B1|W0|B2|W1|W2|
rank 2       |F0|B0|F1|B1|F2|B2|W0|W1|W2|
""",
    ("zero_bubble_h2", 2, 3): """
rank 0 |F0|F1|F2|B0|W0|B1|W1|B2|W2|
rank 1    |F0|B0|F1|B1|F2|B2|W0|W1|W2|
""",
    ("zero_bubble_h2", 3, 5): """
rank 0 |F0|F1|F2|F3|F4|B0|W0|B1|W1|B2|W2|B3|W3|B4|W4|
rank 1    |F0|F1|F2|B0|F3|B1|F4|B2|W0|B3|W1|B4|W2|W3|W4|
rank 2       |F0|B0|F1|B1|F2|B2|F3|B3|F4|B4|W0|W1|W2|W3|W4|
""",
    ("zbv", 2, 3): """
rank 0 |0F0|0F1|0F2|3F0|3B0|3W0|3F1|3B1|3W1|0B0|0W0|3F2|3B2|3W2|0B1|0W1|0B2|0W2|
rank 1     |1F0|2F0|1F1|2F1|2B0|2W0|1F2|1B0|1W0|2F2|2B1|2W1|1B1|2B2|1B2|1W1|2W2|1W2|
""",
    ("v_min", 2, 3): """
rank 0 |0F0|       |3F0|3B0|3W0|0F1|0B0|0W0|3F1|3B1|3W1|0F2|0B1|0W1|3F2|3B2|3W2|   |0B2|0W2|
rank 1     |1F0|2F0|       |2B0|1B0|1F1|2F1|2W0|1W0|2B1|1B1|1F2|2F2|2W1|1W1|2B2|1B2|2W2|1W2|
""",
    ("v_min", 3, 2): """
rank 0 |0F0|               |5F0|0F1|5B0|5W0|       |5F1|   |0B0|5B1|5W1|0W0|       |0B1|0W1|
rank 1     |1F0|       |4F0|       |1F1|4B0|   |4F1|4W0|1B0|1W0|   |4B1|4W1|   |1B1|1W1|
rank 2         |2F0|3F0|               |2F1|3F1|3B0|2B0|3W0|2W0|       |3B1|2B1|3W1|2W1|
""",
    ("v_half", 2, 3): """
rank 0 |0F0|0F1|0F2|3F0|3B0|3F1|3B1|0B0|0W0|0B1|3W0|3F2|3B2|0W1|3W1|0B2|0W2|3W2|
rank 1     |1F0|2F0|1F1|2F1|2B0|1B0|2B1|1B1|1F2|2F2|1W0|2W0|2B2|1B2|1W1|2W1|1W2|2W2|
""",
    ("dualpipev", 2, 4): """
rank 0 |0F0|0F1|0F2|3F0|3B0|3W0|3F1|0F3|3B1    |3F2|0B0    |3B2    |3F3|   |0B1    |3B3    |0B2|0W2|0B3|0W3|
rank 1     |1F0|2F0|1F1|2F1|1F2|2B0    |2F2|1B0    |1F3|2B1    |2F3|1B1    |2B2    |1B2    |2B3|1B3|2W3|1W3|
""",
    ("dualpipev_overlap", 2, 4): """
rank 0 |0F0|0F1|0F2|3F0|3B0|3W0|3F1|0F3&3B1    |   |3F2&0B0    |3B2    |   |3F3&0B1    |3B3    |0B2|0W2|0B3|0W3|
rank 1     |1F0|2F0|1F1|2F1|1F2|2B0    |2F2&1B0    |1F3&2B1    |2F3&1B1    |2B2    |1B2    |   |2B3|1B3|2W3|1W3|
""",
    ("zbv", 2, 1): """
rank 0 |0F0|       |3F0|3B0|3W0|       |0B0|0W0|
rank 1     |1F0|2F0|       |2B0|2W0|1B0|1W0|
""",
}


@pytest.mark.parametrize("case", DRAWINGS, ids=str)
def test_looks_like_its_drawing(case):
    assert drawn(*case) == DRAWINGS[case].strip()


@pytest.mark.parametrize(
    ("order", "case"),
    [
        (forward_only, ("forward_only", 2, 4)),
        (gpipe, ("gpipe", 2, 4)),
        (one_f_one_b, ("1f1b", 2, 4)),
        (interleaved_1f1b_order, ("interleaved_1f1b", 2, 2)),
        (looped_bfs_order, ("looped_bfs", 2, 2)),
        (zero_bubble_h1, ("zero_bubble_h1", 2, 3)),
        (zero_bubble_h2, ("zero_bubble_h2", 2, 3)),
        (zbv, ("zbv", 2, 3)),
        (v_min, ("v_min", 2, 3)),
        (v_half, ("v_half", 2, 3)),
        (dualpipev, ("dualpipev", 2, 4)),
        (dualpipev_overlap, ("dualpipev_overlap", 2, 4)),
    ],
)
def test_the_docstring_shows_the_same_drawing(order, case):
    assert all(line in inspect.getdoc(order) for line in DRAWINGS[case].strip().splitlines())


@UP_TO
@ANY
def test_every_small_size_is_valid_and_ends_without_deadlock(schedule, num_ranks):
    for p, m in sizes(schedule):
        if p not in num_ranks:
            continue
        orders = schedule.orders(p, m)
        place = {"num_stages": schedule.num_stages(p), "rank_of": schedule.rank_of}
        validate(orders, num_microbatches=m, trains=schedule.trains, **place)
        programs = lower(orders, **place)
        check_deadlock_free(programs, **place)
        assert [[action for action in program if action.kind.is_compute] for program in programs] == orders


def idle(p, m, v, f, b, w):
    """The bubble of each schedule by its published formula, times as on a rank; None where it does not hold."""
    return {
        "forward_only": (p - 1) * f,
        "gpipe": (p - 1) * (f + b + w),
        "1f1b": (p - 1) * (f + b + w),
        "interleaved_1f1b": (p - 1) * (f + b + w) / v,
        # With M < P each loop waits for the last rank to be through with the loop before.
        "looped_bfs": ((p - 1) + (v - 1) * max(p - m, 0)) * (f + b + w) / v,
        "zero_bubble_h1": (p - 1) * (f + b - w) if m >= p and w <= min(f, b) else None,
        "zero_bubble_h2": (p - 1) * (f + b - 2 * w) if m >= 2 * p - 1 and w <= min(f, b) else None,
        "zbv": (p - 1) * (b - w) if m >= 2 * p - 1 and w <= f <= b else None,
        "v_min": (4 * p - (5 if p % 3 else 3)) * f / 2 if f == b == w and m >= p else None,
        "v_half": None,  # an upper bound, see below
        "dualpipev": (p - 1) * (f + b - w) / 2 if m >= 2 * p and w <= f == b else None,
        "dualpipev_overlap": (p - 1) * ((f + b + w) + b - 2 * w) / 2 if m >= 2 * p and w <= f == b else None,
    }


IS_SPAN = (
    "zero_bubble_h2",
    "zbv",
    "v_min",
    "dualpipev",
    "dualpipev_overlap",
)  # the papers count the idle time inside a rank's span; elsewhere up to the makespan


@pytest.mark.parametrize("num_ranks", [(2, 4), pytest.param((6, 8), marks=pytest.mark.long)], ids=str)
@ANY
@pytest.mark.parametrize(("f", "b", "w"), TIMES)
def test_the_bubble_is_what_the_formula_says(schedule, f, b, w, num_ranks):
    v = schedule.num_chunks
    times = {"forward": f / v, "backward_input": b / v, "backward_weight": w / v}
    for p, m in sizes(schedule):
        formula = idle(p, m, v, f, b, w)[schedule.name]
        if p in num_ranks and formula is not None:
            timeline = simulate(schedule.orders(p, m), num_stages=schedule.num_stages(p), **times)
            bubble = timeline.span_bubble if schedule.name in IS_SPAN else timeline.makespan_bubble(0)
            assert bubble == pytest.approx(formula), (p, m)


def test_few_microbatches_take_as_long_as_zero_bubble_needs_to_go_there_and_back():
    for p, m in sizes(SCHEDULES["zero_bubble_h1"]):
        if m <= p:
            orders = SCHEDULES["zero_bubble_h1"].orders(p, m)
            timeline = simulate(orders, num_stages=p, forward=3, backward_input=2.5, backward_weight=2)
            assert timeline.makespan == pytest.approx((m + p - 1) * 5.5 + 2), (p, m)


@UP_TO
@ANY
def test_the_peak_is_what_the_formula_says(schedule, num_ranks):
    v = schedule.num_chunks
    for p, m in sizes(schedule):
        if p not in num_ranks or schedule.name in ("v_min", "v_half"):
            continue  # at most what their papers say, see below
        if (schedule.name == "zbv" and m < 2 * p - 1) or ("dualpipev" in schedule.name and m < 2 * p):
            continue
        peaks = {
            "forward_only": [0] * p,
            "gpipe": [m] * p,
            "1f1b": [min(m, p - rank) for rank in range(p)],
            "interleaved_1f1b": [min(v * m, 2 * (p - rank - 1) + (v - 1) * p + 1) for rank in range(p)],
            "looped_bfs": [v * m] * p,
            "zero_bubble_h1": [min(m, p - rank) for rank in range(p)],
            "zero_bubble_h2": [min(m, 2 * (p - rank) - 1) for rank in range(p)],
            "zbv": [2 * p] * p,
            "dualpipev": [2 * p + 1] * p,
            "dualpipev_overlap": [2 * p + 1] * p,
        }
        timeline = simulate(schedule.orders(p, m), num_stages=schedule.num_stages(p))
        assert timeline.peak_microbatches == peaks[schedule.name], (p, m)


def searched_bubble(p, k):
    """The span bubble that the authors of V-Min and V-Half reached with room for k stage inputs, all times 1."""
    return 3 * p - 1 - 3 * k + max(3 * p, p - 1 + 2 * (1 + (k + 1) // 2))


@pytest.mark.parametrize("p", [*range(1, 8), *(pytest.param(p, marks=pytest.mark.long) for p in range(8, 13))])
def test_v_min_and_v_half_hold_no_more_than_their_papers_say(p):
    for m in (1, 2, p, 2 * p, 3 * p + 1):
        for name, most in (("v_min", 2 * ((p + 4) // 3)), ("v_half", 2 * ((p + 2) // 2))):
            timeline = simulate(SCHEDULES[name].orders(p, m), num_stages=2 * p)
            assert max(timeline.peak_microbatches) <= most, (name, m)
            if name == "v_half" and 1 < p <= 9 and m >= 2 * p:
                assert timeline.span_bubble <= max(0, searched_bubble(p, most)), m


def test_v_min_and_v_half_hold_what_the_public_ones_do():
    assert max(simulate(SCHEDULES["v_half"].orders(8, 24), num_stages=16).peak_microbatches) == 10
    assert max(simulate(SCHEDULES["v_min"].orders(4, 12), num_stages=8).peak_microbatches) == 4


@pytest.mark.parametrize(("p", "m", "bubble"), [(4, 8, 11), (4, 12, 11), (8, 24, 27)])
def test_v_min_is_as_short_as_the_public_greedy(p, m, bubble):
    assert simulate(SCHEDULES["v_min"].orders(p, m), num_stages=2 * p).span_bubble == bubble


@pytest.mark.parametrize(("name", "ahead"), [("zero_bubble_h1", 1), ("zero_bubble_h2", 2)])
def test_the_weight_halves_of_zero_bubble_take_the_memory_that_the_paper_says(name, ahead):
    timeline = simulate(SCHEDULES[name].orders(4, 16), num_stages=4)
    in_flight = [ahead * (4 - rank) - (ahead - 1) for rank in range(4)]
    assert timeline.peak_memory(10, 7) == [10 * n + 7 * ahead * rank for rank, n in enumerate(in_flight)]
    assert timeline.peak_memory(1, 0) == in_flight


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_all_schedules_sum_the_gradients_of_a_stage_in_one_order(schedule):
    for p, m in sizes(schedule):
        for order in ([single for a in order for single in a.singles] for order in schedule.orders(p, m)):
            for stage, kinds in product({action.stage for action in order}, (("B", "BW"), ("W", "BW"))):
                numbers = [a.microbatch for a in order if a.stage == stage and a.kind.value in kinds]
                assert numbers == list(range(m)), (p, m)


def test_the_table_is_keyed_by_name():
    names = ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zero_bubble_h1", "zero_bubble_h2", "zbv"]
    names += ["v_min", "v_half", "dualpipev", "dualpipev_overlap"]
    assert [schedule.name for schedule in SCHEDULES.values()] == list(SCHEDULES) == names
    assert all(schedule.trains for schedule in SCHEDULES.values())
    assert not FORWARD_ONLY.trains


def test_counts_start_at_one():
    with pytest.raises(ValueError, match="num_microbatches must be at least 1, got 0"):
        SCHEDULES["1f1b"].orders(2, 0)
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
        SCHEDULES["gpipe"].orders(0, 2)


def test_interleaved_1f1b_takes_whole_rounds():
    message = "interleaved 1F1B needs num_microbatches divisible by num_ranks, got 10 and 4"
    with pytest.raises(ValueError, match=message):
        interleaved_1f1b(2).orders(4, 10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (interleaved_1f1b, "interleaved 1F1B needs num_chunks of at least 2, got 1; 1f1b has one"),
        (looped_bfs, "looped BFS needs num_chunks of at least 2, got 1; gpipe has one"),
    ],
)
def test_interleaving_needs_two_chunks(make, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make(1)


def test_chunks_multiply_the_stages():
    schedule = Schedule("two chunks", gpipe, num_chunks=2)
    assert schedule.num_stages(3) == 6
    assert schedule.num_ranks(6) == 3
    assert [schedule.rank_of(stage, 3) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ValueError, match="two chunks needs num_stages divisible by num_chunks, got 5 and 2"):
        schedule.num_ranks(5)


def test_a_v_has_the_last_stage_with_the_first():
    assert [v_shape(stage, 3) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
