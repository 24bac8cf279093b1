"""Gradients reduced beside a step: when a bucket is ready, one after another, what is left at the end."""

import pytest
from drawn_orders import read

from pipeline import SCHEDULES, simulate
from pipeline.schedules.reductions import Reduction, Reductions, end_of_step, hidden_share, reduce_beside


def one_rank(text, **times):
    orders = read(text)
    return simulate(orders, num_stages=1 + max(a.stage for order in orders for a in order), **times)


def test_those_of_a_later_stage_hide_behind_the_rest():
    # The backward of stage 1 is done at 3, of stage 0 at 4.
    timeline = one_rank("0F0 1F0 1BW0 0BW0", backward_weight=0.5, backward_input=0.5)
    assert timeline.makespan == 4
    for size, latency, end in ((0.75, 0, 4.75), (2, 0, 7), (0.75, 0.5, 5.5)):  # the second: 3 to 5, 5 to 7
        reduced = reduce_beside(timeline, Reductions(size, latency=latency, bandwidth=1))
        assert end_of_step(timeline, reduced) == end
    assert hidden_share(timeline, reduce_beside(timeline, Reductions(2, bandwidth=1))) == 0.25
    assert end_of_step(timeline, reduce_beside(timeline, Reductions([0, 9], bandwidth=9))) == 4


def test_buckets_become_ready_one_after_the_other_while_a_weight_half_runs():
    timeline = one_rank("0F0 0B0 0W0", backward_weight=4.0)
    reduced = reduce_beside(timeline, Reductions(10, bucket_bytes=5, bandwidth=5))
    assert reduced == [[Reduction(0, 4, 4, 5), Reduction(0, 6, 6, 7)]]
    reduced = reduce_beside(timeline, Reductions(10, bucket_bytes=4, latency=1, bandwidth=4))
    assert [bucket.ready for bucket in reduced[0]] == pytest.approx([3.6, 5.2, 6])
    assert reduced[0][-1].end == pytest.approx(3.6 + 2 + 2 + 1.5)  # the last holds what is left


def test_weight_halves_in_a_row_run_side_by_side():
    """Then the first parameter is final early in all of them, not in the last one alone."""
    timeline = one_rank("0F0 0F1 0B0 0B1 0W0 0W1")
    reduced = reduce_beside(timeline, Reductions(2, bucket_bytes=1, bandwidth=1))
    assert [bucket.ready for bucket in reduced[0]] == [5, 6]
    apart = one_rank("0F0 0F1 0B0 0W0 0B1 0W1")
    assert [bucket.ready for bucket in reduce_beside(apart, Reductions(2, bucket_bytes=1))[0]] == [5.5, 6]


def test_a_rank_reduces_its_last_stage_first_whatever_is_ready():
    timeline = one_rank("0F0 1F0 1B0 0BW0 1W0")
    assert [bucket.stage for bucket in reduce_beside(timeline, Reductions(1, bandwidth=1))[0]] == [1, 0]
    assert end_of_step(timeline, reduce_beside(timeline, Reductions(1, bandwidth=1))) == 8


def test_without_gradients_nothing_is_reduced():
    timeline = simulate(SCHEDULES["1f1b"].orders(2, 4), num_stages=2)
    reduced = reduce_beside(timeline, Reductions(0, latency=1))
    assert reduced == [[], []]
    assert end_of_step(timeline, reduced) == timeline.makespan
    assert hidden_share(timeline, reduced) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gradient_bytes": -1}, "gradient_bytes must be at least 0 and finite, got -1"),
        ({"gradient_bytes": [1, float("inf")]}, "gradient_bytes must be at least 0 and finite, got"),
        ({"gradient_bytes": 1, "bucket_bytes": 0}, "bucket_bytes must be positive, got 0"),
        ({"gradient_bytes": 1, "bandwidth": float("nan")}, "bandwidth must be positive, got nan"),
        ({"gradient_bytes": 1, "latency": float("inf")}, "latency must be at least 0 and finite, got inf"),
    ],
)
def test_wrong_costs_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Reductions(**values)


def test_an_evaluation_has_nothing_to_reduce():
    with pytest.raises(ValueError, match="reductions need a training step, got no backward of stage 0"):
        reduce_beside(one_rank("0F0"), Reductions(1))


def test_more_buckets_than_there_is_time_for_are_refused():
    """Bytes where MiB were meant, 25 of them a bucket: a command counted its buckets for hours, without a word."""
    with pytest.raises(ValueError, match="at most 100,000 buckets, got 171,798,692: make them larger"):
        Reductions([0, 4 << 30], bucket_bytes=25)
