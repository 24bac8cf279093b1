"""Forwards that stand alone (evaluate, predict, forward): any batch of at least one sample, under every schedule."""

import functools

import numpy as np
import pytest
from toy_pipeline import apply, check_grads, connect, dense, gradients_in_one_process

import minigrad as mg
from minigrad import nn
from minigrad.autodiff.mode import is_recording
from pipeline import FORWARD_ONLY, SCHEDULES, F, draw, simulate, validate
from pipeline.runtime.microbatch import split
from pipeline.schedules.orders import backwards_of, forwards_of
from pipeline.schedules.schedule import round_robin, v_shape

LAYERS = [dense(f"fc{i}", 4, 4) for i in range(8)]
X = np.random.default_rng(0).standard_normal((7, 4))
Y = np.random.default_rng(1).standard_normal((7, 4))
EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)


@functools.cache
def whole_model():
    param = nn.ParamGetter(0, np.float64)
    return nn.Sequential([factory(param) for _, factory in LAYERS])


def in_one_process(x):
    return whole_model()(x).data


@functools.cache
def loss_in_one_process(num_samples, num_parts):
    return gradients_in_one_process(
        LAYERS, split(X[:num_samples], num_parts), split(Y[:num_samples], num_parts), mg.mse
    )[0]


def check_outputs(outputs, x_parts, comm_holds_last):
    if comm_holds_last:
        for output, x in zip(outputs, x_parts, strict=True):
            np.testing.assert_allclose(output, in_one_process(x), rtol=1e-12)
    else:
        assert outputs == []


def holds_last(pipe):
    return any(stage.is_last for stage in pipe.stages)


@EVERY_SCHEDULE
@pytest.mark.point_to_point
def test_a_batch_of_fewer_samples_makes_fewer_micro_batches(ranks, schedule):
    def program(comm):
        pipe = connect(comm, LAYERS, schedule=schedule, num_microbatches=2 * comm.size)
        for num_samples in (1, 2, 7):
            x, y = X[:num_samples], Y[:num_samples]
            num_parts = min(num_samples, 2 * comm.size)
            first, last = comm.rank == 0, holds_last(pipe)
            check_outputs(pipe.predict(x if first else None), split(x, num_parts), last)
            loss = loss_in_one_process(num_samples, num_parts)
            np.testing.assert_allclose(pipe.evaluate(x if first else None, y if last else None), loss, rtol=1e-12)
        assert all(p.grad is None for p in pipe.stages.parameters())

    ranks.run(program)


def test_nothing_is_recorded_where_no_backward_comes(ranks):
    """A tape of every forward would hold all activations, and nothing else of the result would tell."""
    recorded = []

    def look(x):
        recorded.append(is_recording())
        return x

    def program(comm):
        layers = [dense("first", 4, 4), *(apply(f"look{i}", look) for i in range(comm.size))]
        pipe = connect(comm, layers, num_microbatches=comm.size)
        pipe.evaluate(X, Y)
        pipe.predict(X)
        comm.barrier()
        assert set(recorded) == {False}
        comm.barrier()
        pipe.step(X, Y)

    ranks.run(program)
    assert set(recorded) == {False, True}


@EVERY_SCHEDULE
def test_a_shorter_list_makes_fewer_micro_batches(ranks, schedule):
    def program(comm):
        pipe = connect(comm, LAYERS, schedule=schedule, num_microbatches=2 * comm.size)
        parts = [X[:4], X[4:]] if comm.size > 1 else [X]
        check_outputs(pipe.predict(parts if comm.rank == 0 else None), parts, holds_last(pipe))

    ranks.run(program)


@EVERY_SCHEDULE
def test_forward_and_backward_apart_take_any_batch_and_leave_the_next_step_right(ranks, schedule):
    one, y = [X[:1]], Y[:1]
    _, grads = gradients_in_one_process(LAYERS, one, [y], mg.mse)

    def program(comm):
        pipe = connect(comm, LAYERS, schedule=schedule, num_microbatches=2 * comm.size)
        outputs = pipe.forward(X[:1]).outputs
        pipe.backward([2 / y.size * (outputs[0] - y)] if outputs else None)
        check_grads(pipe, grads)
        x_parts, y_parts = (split(np.concatenate([part, part]), 2 * comm.size) for part in (X, Y))
        loss, all_grads = gradients_in_one_process(LAYERS, x_parts, y_parts, mg.mse)
        mg.flat.zero_grad(pipe.stages.parameters())
        np.testing.assert_allclose(pipe.step(x_parts, y_parts), loss, rtol=1e-12)
        check_grads(pipe, all_grads)

    ranks.run(program)


@pytest.mark.parametrize("schedule", [*SCHEDULES.values(), FORWARD_ONLY], ids=lambda schedule: schedule.name)
def test_without_a_loss_fn_no_rule_of_the_schedule_binds(ranks, schedule):
    def program(comm):
        pipe = connect(comm, LAYERS, schedule=schedule, num_microbatches=1, loss_fn=None)
        check_outputs(pipe.predict(X), [X], holds_last(pipe))
        with pytest.raises(ValueError, match="the last stage needs a loss_fn"):
            pipe.step(X, Y)
        pipe.loss_fn = mg.mse
        try:
            schedule.orders(comm.size, 1)
        except ValueError as rule:
            with pytest.raises(ValueError, match=str(rule)):
                pipe.step(X, Y)
        else:
            if schedule.trains:
                assert np.isfinite(pipe.step(X, Y))

    ranks.run(program)


def test_more_micro_batches_than_the_executor_was_made_for_are_refused(ranks):
    def program(comm):
        pipe = connect(comm, LAYERS, schedule="1f1b", num_microbatches=2)
        with pytest.raises(ValueError, match="x: num_microbatches is 2, got a list of 3"):
            pipe.predict([X[:1], X[1:2], X[2:]])
        with pytest.raises(ValueError, match=r"a batch needs at least one sample for each micro-batch, got 0 and "):
            pipe.predict(X[:0])

    ranks.run(program)


# The orders


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 7])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("rank_of", "num_chunks"),
    [(round_robin, 1), (round_robin, 3), (v_shape, 2), (lambda stage, size: size - 1, 2)],
)
def test_orders_of_forwards_and_of_backwards_are_complete(rank_of, num_chunks, num_ranks, num_microbatches):
    num_stages = num_ranks * num_chunks
    sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches, "rank_of": rank_of}
    forwards = forwards_of(rank_of, num_ranks, num_stages, num_microbatches)
    validate(forwards, trains=False, **sizes)
    backwards = backwards_of(forwards)
    validate([[*f, *b] for f, b in zip(forwards, backwards, strict=True)], **sizes)
    for order in backwards:
        for stage in range(num_stages):
            numbers = [action.microbatch for action in order if action.stage == stage]
            assert numbers == sorted(numbers), "sums of gradients are in the order of a training step"


def test_forwards_leave_no_bubble_but_that_of_filling_the_pipeline():
    for num_ranks, num_chunks in ((4, 1), (4, 2), (3, 3)):
        num_stages, num_microbatches = num_ranks * num_chunks, 2 * num_ranks
        timeline = simulate(forwards_of(round_robin, num_ranks, num_stages, num_microbatches), num_stages=num_stages)
        assert timeline.makespan == num_chunks * num_microbatches + num_ranks - 1
    assert draw(simulate(forwards_of(v_shape, 2, 4, 4), num_stages=4)).splitlines() == [
        "rank 0 |0F0|0F1|0F2|3F0|0F3|3F1|   |3F2|   |3F3|",
        "rank 1     |1F0|2F0|1F1|2F1|1F2|2F2|1F3|2F3|",
    ]


def test_with_one_stage_a_rank_they_are_those_of_forward_only():
    assert (
        forwards_of(round_robin, 3, 3, 5)
        == FORWARD_ONLY.orders(3, 5)
        == [[F(r, i) for i in range(5)] for r in range(3)]
    )
