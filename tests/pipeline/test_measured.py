"""A measured step as a timeline, and the prediction beside it."""

import textwrap

import numpy as np
import pytest
from toy_pipeline import dense

import minigrad as mg
from distributed import LocalWorld, Mesh
from pipeline import (
    BW,
    SCHEDULES,
    Event,
    F,
    PipelineExecutor,
    PipelineStage,
    Timeline,
    draw,
    events,
    picture,
    simulate,
    svg,
)
from pipeline.schedules.measured import compare, predict, replicas, timeline, times

ORDERS = SCHEDULES["zero_bubble_h1"].orders(2, 3)
SIMULATED = simulate(ORDERS, num_stages=2, forward=[2, 1], backward_input=[2, 3], backward_weight=[1, 2])


def shifted(event, by):
    return Event(*event)._replace(start=event[2] + by, end=event[3] + by)


def same(a: Timeline, b: Timeline):
    for ours, theirs in zip(a.rows, b.rows, strict=True):
        assert [action for action, _, _ in ours] == [action for action, _, _ in theirs]
        assert [time for _, *pair in ours for time in pair] == pytest.approx(
            [time for _, *pair in theirs for time in pair]
        )
    return True


def test_a_timeline_comes_back_from_its_events_whatever_else_happened():
    recorded = [shifted(event, 7) for event in events(SIMULATED, seconds=1)]
    recorded += [Event(0, "open", 0, 7, "step"), Event(1, "0SEND_F0", 9, 12, "send")]
    assert same(timeline(recorded), SIMULATED)


def test_weight_halves_side_by_side_share_their_time():
    recorded = [Event(0, "0W2 0W3", 1, 4, "compute")]
    (row,) = timeline(recorded).rows
    assert [(str(action), start, end) for action, start, end in row] == [("0W2", 0, 1.5), ("0W3", 1.5, 3)]


def test_a_timeline_is_of_one_step():
    twice = [Event(0, "0F0", 0, 1, "compute"), Event(0, "0F0", 1, 2, "compute")]
    with pytest.raises(ValueError, match="a timeline is of one step, but an action ran twice on rank 0"):
        timeline(twice)


def test_an_action_that_waited_inside_is_one():
    # As a forward does whose parameters another replica holds, with --zero.
    parts = [("0F0", 0, 1, "compute"), ("values", 1, 3, "wait"), ("0F0", 3, 4, "compute"), ("0BW0", 4, 5, "compute")]
    assert timeline([Event(0, *part) for part in parts]).rows == [[(F(0, 0), 0, 4), (BW(0, 0), 4, 5)]]


@pytest.mark.parametrize("recorded", [[], [Event(1, "0F0", 0, 1, "compute")]])
def test_every_rank_must_have_computed(recorded):
    with pytest.raises(ValueError, match="a timeline needs an action on every rank, got none on rank 0"):
        timeline(recorded)


def test_times_are_medians_by_stage_and_a_full_backward_is_half_and_half():
    assert times(SIMULATED) == {"forward": [2, 1], "backward_input": [2, 3], "backward_weight": [1, 2]}
    other = simulate(ORDERS, num_stages=2, forward=[4, 9], backward_input=[2, 3], backward_weight=[1, 2])
    assert times(SIMULATED, other, other)["forward"] == [4, 9]
    whole = simulate(SCHEDULES["1f1b"].orders(2, 3), num_stages=2, backward_input=1, backward_weight=3)
    assert times(whole) == {"forward": [1, 1], "backward_input": [2, 2], "backward_weight": [2, 2]}


def test_a_steady_step_is_what_is_predicted():
    assert same(predict(SIMULATED), SIMULATED)
    delayed = predict(SIMULATED, latency=1)
    assert delayed.makespan > SIMULATED.makespan


def test_times_in_halves_predict_another_order():
    orders = SCHEDULES["1f1b"].orders(2, 3)
    expected = simulate(orders, num_stages=2, forward=[2, 1], backward_input=[2, 3], backward_weight=[1, 2])
    assert same(predict(SIMULATED, SIMULATED, orders=orders), expected)


def of_replicas(schedule, num_ranks, paces, **delays):
    """Simulate replicas of one pipeline that take so long for an action each, as one timeline of all their ranks."""
    num_stages = schedule.num_stages(num_ranks)
    orders = schedule.orders(num_ranks, 4)
    timelines = [
        simulate(orders, num_stages=num_stages, forward=pace, backward_input=pace, backward_weight=pace, **delays)
        for pace in paces
    ]
    return Timeline([row for one in timelines for row in one.rows]), timelines


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_each_replica_is_predicted_from_its_own_times(name, num_ranks):
    together, apart = of_replicas(SCHEDULES[name], num_ranks, [1, 3, 2])
    assert replicas(together) == apart
    assert same(predict(together), together)
    delayed, _ = of_replicas(SCHEDULES[name], num_ranks, [1, 3, 2], latency=2)
    assert same(predict(delayed), together), "latency is what a prediction leaves out"
    assert together.peak_microbatches_per_stage == apart[0].peak_microbatches_per_stage


def test_other_orders_are_predicted_for_every_replica():
    together, _ = of_replicas(SCHEDULES["zero_bubble_h1"], 2, [1, 3])
    expected, _ = of_replicas(SCHEDULES["gpipe"], 2, [1, 3])
    assert same(predict(together, together, orders=SCHEDULES["gpipe"].orders(2, 4)), expected)


def test_ranks_that_are_no_replicas_are_refused():
    (first, second) = SIMULATED.rows
    for rows, shown in (
        ([first, first, second], r"\[0\], \[0\], \[1\]"),
        ([first, first, second, second], r"\[0\], \[0\], \[1\], \[1\]"),
        ([second], r"\[1\]"),
    ):
        with pytest.raises(ValueError, match=f"pipelines of the same stages, one after another; got {shown}"):
            predict(Timeline(rows))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_recorded_step_of_dp_x_pp_is_predicted_and_drawn(name):
    x, y = np.ones((16, 4)), np.ones((16, 4))

    def program(comm):
        mesh = Mesh(comm, dp=2, pp=2)
        stages = PipelineStage.of([dense(f"fc{i}", 4, 4) for i in range(4)], mesh.pp, SCHEDULES[name])
        pipe = PipelineExecutor(stages, mesh.pp, SCHEDULES[name], num_microbatches=4, loss_fn=mg.mse)
        with pipe.recorder:
            pipe.step(x, y)
        return pipe.recorder.gather(comm)

    measured = timeline(LocalWorld(4).run(program)[0])
    predicted = predict(measured)
    orders = SCHEDULES[name].orders(2, 4)
    for shown in (measured, predicted):
        assert [[action for action, _, _ in row] for row in shown.rows] == orders * 2
        assert all(f"rank {rank}" in svg(picture(shown, "a step", scale=900 / shown.makespan)) for rank in range(4))


def test_a_forward_only_pass_is_predicted_too():
    forwards = simulate([[a for a in order if a.kind.name == "F"] for order in ORDERS], num_stages=2, forward=[2, 1])
    assert same(predict(forwards), forwards)


def test_both_are_drawn_with_their_numbers_side_by_side():
    predicted = simulate(SCHEDULES["1f1b"].orders(2, 2), num_stages=2)
    measured = simulate(SCHEDULES["1f1b"].orders(2, 2), num_stages=2, latency=0.5)
    text = compare(predicted, measured)
    assert draw(predicted) in text
    assert draw(measured) in text
    assert text.endswith(
        textwrap.dedent(
            """
                                             predicted  measured
            makespan, s                         9.0000   10.0000
            span bubble, s                      3.0000    4.0000
            span bubble rate                    0.3333    0.4000
            bubble fraction                     0.5000    0.6667
            efficiency                          0.6667    0.6000
            makespan bubble of rank 0, s        3.0000    4.0000
            makespan bubble of rank 1, s        3.0000    4.0000"""
        )
    )
