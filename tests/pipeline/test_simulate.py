import pytest
from drawn_orders import read

from pipeline import SCHEDULES, ScheduleError, interleaved_1f1b, simulate
from pipeline.schedules.simulate import link_of_host

# Tables 5 and 6 of arXiv 2401.10241: ranks, micro-batches, times of F, B, W and of a message in ms, bubble rates of
# 1F1B, ZB-H1 and ZB-H2, of interleaved 1F1B, and its chunks a rank.
PUBLISHED = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083, 0.1055, 3),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837, 0.0818, 3),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444, 0.0443, 3),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698, 0.0808, 4),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559, 0.0628, 4),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294, 0.0320, 4),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672, 0.1104, 3),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088, 0.0516, 0.0852, 3),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576, 0.0266, 0.0445, 3),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421, 0.0641, 0.1493, 2),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106, 0.0490, 0.1164, 2),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594, 0.0257, 0.0624, 2),
]
ROWS = pytest.mark.parametrize(  # the larger ones, which say no more, with the long tests
    "row",
    [pytest.param(row, marks=[pytest.mark.long] if row[0] * row[1] > 1000 else []) for row in PUBLISHED],
    ids=lambda row: f"{row[0]}-{row[1]}",
)
COLUMNS = {"1f1b": 6, "zero_bubble_h1": 7, "zero_bubble_h2": 8}


def rate(schedule, row):
    num_ranks, num_microbatches, f, b, w, latency = row[:6]
    v = schedule.num_chunks
    return simulate(
        schedule.orders(num_ranks, num_microbatches),
        num_stages=schedule.num_stages(num_ranks),
        forward=f / v,
        backward_input=b / v,
        backward_weight=w / v,
        latency=latency,
    ).span_bubble_rate


@ROWS
@pytest.mark.parametrize("name", COLUMNS)
def test_published_bubble_rates(name, row):
    assert rate(SCHEDULES[name], row) == pytest.approx(row[COLUMNS[name]], abs=5e-5)


@ROWS
def test_published_bubble_rates_of_interleaved_1f1b_are_a_little_lower_than_ours(row):
    assert rate(interleaved_1f1b(row[10]), row) == pytest.approx(row[9], abs=4e-3)


@pytest.mark.parametrize(
    ("schedule", "makespan", "span_bubble", "peaks"),
    [
        (SCHEDULES["gpipe"], 33, 9, [8, 8, 8, 8]),
        (SCHEDULES["1f1b"], 33, 9, [4, 3, 2, 1]),
        (interleaved_1f1b(2), 28.5, 4.5, [11, 9, 7, 5]),
        (interleaved_1f1b(4), 26.25, 2.25, [19, 17, 15, 13]),
        (SCHEDULES["zero_bubble_h1"], 27, 3, [4, 3, 2, 1]),
        (SCHEDULES["zero_bubble_h2"], 27, 0, [7, 5, 3, 1]),
        (SCHEDULES["zbv"], 25.5, 0, [8, 8, 8, 8]),
    ],
)
def test_small_golden_values(schedule, makespan, span_bubble, peaks):
    time = 1 / schedule.num_chunks
    times = {"forward": time, "backward_input": time, "backward_weight": time}
    timeline = simulate(schedule.orders(4, 8), num_stages=schedule.num_stages(4), **times)
    assert timeline.makespan == makespan
    assert timeline.ideal == 24
    assert [timeline.makespan_bubble(rank) for rank in range(4)] == [makespan - 24] * 4
    assert timeline.span_bubble == span_bubble
    assert timeline.bubble_fraction == (makespan - 24) / 24
    assert timeline.efficiency == 24 / makespan
    assert timeline.peak_microbatches == peaks


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


def test_a_message_takes_its_bytes_over_the_bandwidth_longer():
    orders = read("0F0 0BW0\n1F0 1BW0\n2F0 2BW0")
    starts = [
        [start for _, start, _ in row]
        for row in simulate(orders, num_stages=3, latency=0.25, message_bytes=[50, 200], bandwidth=100).rows
    ]
    # 0.75 over the first boundary and 2.25 over the second, there and back.
    assert starts == [[0, 13], [1.75, 10.25], [5, 6]]
    everywhere = simulate(orders, num_stages=3, message_bytes=50, bandwidth=100)
    assert [start for _, start, _ in everywhere.rows[2]] == [3, 4]


def test_the_weight_half_holds_nobody_up():
    #   rank 0 |F0|     |B0|W0|
    #   rank 1    |F0|B0|W0|
    timeline = simulate(read("0F0 0B0 0W0\n1F0 1B0 1W0"), num_stages=2)
    assert [[start for _, start, _ in row] for row in timeline.rows] == [[0, 3, 4], [1, 2, 3]]


def test_peak_counts_from_forward_to_input_half():
    timeline = simulate(read("0F0 0B0 0W0 0F1 0B1 0F2 0F3 0W1 0BW2 0BW3"), num_stages=1)
    #                   held   1   0   0   1   0   1   2   2    1    0
    assert timeline.peak_microbatches == [2]


def test_memory_is_held_from_forward_to_input_half_and_some_of_it_to_the_weight_half():
    timeline = simulate(read("0F0 0F1 0B0 0B1 0W0 0W1 0F2 0BW2"), num_stages=1)
    #                        10  20  14   8   4   0   10  0    where 4 are kept for the weight half
    assert timeline.peak_memory(10, 4) == [20]
    assert timeline.peak_memory(3, 4) == [8]


def test_a_forward_that_no_backward_follows_keeps_nothing():
    assert simulate(read("0F0 0F1 0BW1 0F2"), num_stages=1).peak_microbatches == [1]


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
        ({"forward": [1, 2, 3]}, "forward must be one number or one for each of the stages, got 3 for 2"),
        ({"latency": -1}, "latency must be at least 0 and finite, got -1"),
        ({"latency": float("inf")}, "latency must be at least 0 and finite, got inf"),
        ({"bandwidth": 0}, "bandwidth must be positive, got 0"),
        ({"bandwidth": float("nan")}, "bandwidth must be positive, got nan"),
        ({"message_bytes": -1}, "message_bytes must be at least 0 and finite, got -1"),
        ({"message_bytes": [1, 2]}, "message_bytes must be one number or one for each of the boundaries, got 2 for 1"),
    ],
)
def test_times_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        simulate(read(UNEQUAL), num_stages=2, **options)


def test_every_rank_has_work():
    with pytest.raises(ValueError, match="every rank needs at least one action, got none on rank 1"):
        simulate([*read("0F0 0BW0"), []], num_stages=1)


def test_a_shared_link_serves_what_was_made_first_first():
    # Rank 0 makes 0F0 at 1 and 0F1 at 2; a message takes 3 on the link. Alone, the second would be there at 5.
    orders = read("0F0 0F1\n1F0 1F1")
    shared = simulate(orders, num_stages=2, message_bytes=3, bandwidth=1, link_of=link_of_host(1))
    apart = simulate(orders, num_stages=2, message_bytes=3, bandwidth=1)
    assert [start for _, start, _ in shared.rows[1]] == [4, 7]
    assert [start for _, start, _ in apart.rows[1]] == [4, 5]
    inside = simulate(orders, num_stages=2, message_bytes=3, bandwidth=1, link_of=link_of_host(2))
    assert inside == apart


def test_both_directions_of_a_v_share_the_link_that_leaves_a_rank():
    """Outputs on the way down and gradients on the way up go the same way; a link for each rank makes them wait."""
    schedule = SCHEDULES["zbv"]
    times = {"num_stages": 8, "message_bytes": 3, "bandwidth": 1}
    apart = simulate(schedule.orders(4, 8), **times)
    shared = simulate(schedule.orders(4, 8), link_of=link_of_host(1), **times)
    assert shared.makespan > apart.makespan
    assert [[action for action, _, _ in row] for row in shared.rows] == schedule.orders(4, 8)
