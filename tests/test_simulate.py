import pytest
from drawn_orders import read

from pipeline import SCHEDULES, ScheduleError, simulate

# Tables 5 and 6 of arXiv 2401.10241: ranks, micro-batches, times of F, B, W and of a message in ms, rate of 1F1B.
PUBLISHED = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, {"1f1b": 0.2431}),
    (8, 32, 18.513, 18.086, 9.331, 0.626, {"1f1b": 0.1985}),
    (8, 64, 18.546, 18.097, 9.321, 0.762, {"1f1b": 0.1240}),
    (8, 24, 29.718, 29.444, 19.927, 0.527, {"1f1b": 0.2347}),
    (8, 32, 29.802, 29.428, 19.530, 0.577, {"1f1b": 0.1898}),
    (8, 64, 29.935, 29.621, 19.388, 0.535, {"1f1b": 0.1091}),
    (16, 48, 11.347, 11.248, 8.132, 0.377, {"1f1b": 0.2552}),
    (16, 64, 11.307, 11.254, 8.101, 0.379, {"1f1b": 0.2082}),
    (16, 128, 11.325, 11.308, 8.109, 0.378, {"1f1b": 0.1251}),
    (32, 96, 10.419, 10.207, 7.715, 0.408, {"1f1b": 0.2646}),
    (32, 128, 10.408, 10.204, 7.703, 0.408, {"1f1b": 0.2168}),
    (32, 256, 10.402, 10.248, 7.698, 0.460, {"1f1b": 0.1352}),
]


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_microbatches", "f", "b", "w", "latency", "rate"),
    [(name, *row[:-1], rate) for row in PUBLISHED for name, rate in row[-1].items()],
)
def test_published_bubble_rates(name, num_ranks, num_microbatches, f, b, w, latency, rate):
    timeline = simulate(
        SCHEDULES[name].orders(num_ranks, num_microbatches),
        num_stages=num_ranks,
        forward=f,
        backward_input=b,
        backward_weight=w,
        latency=latency,
    )
    assert timeline.span_bubble_rate == pytest.approx(rate, abs=5e-5)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_small_golden_values(name):
    timeline = simulate(SCHEDULES[name].orders(4, 8), num_stages=4)
    assert timeline.makespan == 33
    assert timeline.ideal == 24
    assert [timeline.makespan_bubble(rank) for rank in range(4)] == [9, 9, 9, 9]
    assert timeline.bubble_fraction == 3 / 8
    assert timeline.efficiency == 24 / 33


# A step of one micro-batch on two unequal stages:    rank 0 |F0|     |B0      |
#                                                     rank 1    |F0|B0|
UNEQUAL = "0F0 0BW0\n1F0 1BW0"


def test_each_bubble_is_what_it_says():
    timeline = simulate(read(UNEQUAL), num_stages=2, backward_input=[2, 0.5], backward_weight=[1, 0.5])
    assert [[(str(action), start, end) for action, start, end in row] for row in timeline.rows] == [
        [("0F0", 0, 1), ("0BW0", 3, 6)],
        [("1F0", 1, 2), ("1BW0", 2, 3)],
    ]
    assert timeline.makespan == 6
    assert [timeline.busy(rank) for rank in (0, 1)] == [4, 2]
    assert [timeline.span(rank) for rank in (0, 1)] == [6, 2]
    assert [timeline.makespan_bubble(rank) for rank in (0, 1)] == [2, 4]
    assert timeline.span_bubble == 2
    assert timeline.span_bubble_rate == pytest.approx(2 / 6)
    assert timeline.ideal == 4
    assert timeline.bubble_fraction == (6 - 4) / 4
    assert timeline.efficiency == 4 / 6


def test_latency_is_paid_between_ranks_only():
    crossing = simulate(read(UNEQUAL), num_stages=2, latency=0.25)
    assert [start for row in crossing.rows for _, start, _ in row] == [0, 4.5, 1.25, 2.25]
    local = simulate(read("0F0 1F0 1BW0 0BW0"), num_stages=2, latency=0.25)
    assert [start for _, start, _ in local.rows[0]] == [0, 1, 2, 4]


def test_the_weight_half_holds_nobody_up():
    #   rank 0 |F0|     |B0|W0|
    #   rank 1    |F0|B0|W0|
    timeline = simulate(read("0F0 0B0 0W0\n1F0 1B0 1W0"), num_stages=2)
    assert [[start for _, start, _ in row] for row in timeline.rows] == [[0, 3, 4], [1, 2, 3]]


def test_peak_counts_from_forward_to_input_half():
    timeline = simulate(read("0F0 0B0 0W0 0F1 0B1 0F2 0F3 0W1 0BW2 0BW3"), num_stages=1)
    #                   held   1   0   0   1   0   1   2   2    1    0
    assert timeline.peak_microbatches == [2]


def test_peak_of_a_rank_counts_all_its_stages_at_once():
    # V placement: stages 0 and 3 on rank 0, stages 1 and 2 on rank 1.
    orders = """
        0F0 0F1 3F0 3BW0 3F1 3BW1 0BW0 0BW1
        1F0 2F0 1F1 2F1 2BW0 1BW0 2BW1 1BW1
    """
    timeline = simulate(read(orders), num_stages=4)
    assert timeline.peak_microbatches == [3, 4]
    assert timeline.peak_microbatches_per_stage == [2, 2, 2, 1]


def test_a_rank_that_waits_for_ever_is_named():
    with pytest.raises(ScheduleError, match=r"no rank can go on: rank 0 is at 0BW0 and needs 1B0$"):
        simulate(read("0F0 0BW0\n1F0"), num_stages=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward": 0}, "forward must be positive and finite, got 0"),
        ({"forward": float("inf")}, "forward must be positive and finite, got inf"),
        ({"backward_input": [1, -1]}, r"backward_input must be positive and finite, got \[1, -1\]"),
        ({"backward_weight": float("nan")}, "backward_weight must be positive and finite, got nan"),
        ({"forward": [1, 2, 3]}, "forward must be one time or one for each of 2 stages, got 3 times"),
        ({"latency": -1}, "latency must be at least 0 and finite, got -1"),
        ({"latency": float("inf")}, "latency must be at least 0 and finite, got inf"),
    ],
)
def test_times_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        simulate(read(UNEQUAL), num_stages=2, **options)


def test_every_rank_has_work():
    with pytest.raises(ValueError, match="every rank needs at least one action, got none on rank 1"):
        simulate([*read("0F0 0BW0"), []], num_stages=1)
