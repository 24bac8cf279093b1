"""Mistakes: one line, the same on every rank, before any message; and a good step afterwards is as good as ever."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from recording import Log, RecordingCommunicator
from toy_pipeline import (
    PLACEMENTS,
    X,
    Y,
    apply,
    check_grads,
    chunked,
    connect,
    four_layers,
    gradients_in_one_process,
    mean,
    scale,
)

import minigrad as mg
from distributed import LocalWorld, SoloCommunicator
from minigrad import nn, rng
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage
from pipeline.runtime.microbatch import split


def forward(pipe):
    pipe.forward(X)


def backward(pipe):
    pipe.backward(np.ones((7, 2)))


def check_refused(ranks, mistake, kind, message, *, before=None, after=None):
    """Check that a mistake is one line on every rank, and that a good step goes on as if nothing had been.

    Args:
        mistake: called with the executor; raises.
        before, after: what goes before it, and what must then still work.
    """
    loss, grads = gradients_in_one_process(four_layers(), split(X, 3), split(Y, 3), mg.mse)

    def program(comm):
        log = Log()
        pipe = connect(RecordingCommunicator(comm, log), four_layers())
        pipe.step(X, Y)
        if before is not None:
            before(pipe)
        log.clear()
        with pytest.raises(kind, match=message) as caught:
            mistake(pipe)
        assert log.calls("isend", "irecv") == [], "a message before the error"
        if after is not None:
            after(pipe)
        mg.flat.zero_grad(pipe.stages.parameters())
        np.testing.assert_allclose(pipe.step(X, Y), loss, rtol=1e-12)
        check_grads(pipe, grads)
        return str(caught.value)

    messages = ranks.run(program)
    assert len(set(messages)) == 1
    assert "\n" not in messages[0]


def no_input(pipe):
    pipe.step(None, Y)


def few_samples(pipe):
    pipe.step(X[:2], Y[:2])


def other_samples(pipe):
    pipe.step(X, Y[:6])


def no_targets(pipe):
    pipe.evaluate(X, None)


def integer_input_grads(pipe):
    pipe.run(np.ones((7, 4), int), Y, input_grads=True)


STEP_MISTAKES = {
    no_input: (ValueError, "the first stage needs an input x, got None"),
    few_samples: (ValueError, "got 2 and 3"),
    other_samples: (ValueError, "same samples in every micro-batch, got 7 and 6 in all"),
    no_targets: (ValueError, "the last stage needs targets y, got None"),
    integer_input_grads: (ValueError, "input_grads needs a floating point x, got int64"),
    backward: (RuntimeError, r"backward\(\) without pipe.forward\(\): each micro-batch can be used only once"),
}


@pytest.mark.parametrize("mistake", STEP_MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_refused_before_any_message(ranks, mistake):
    check_refused(ranks, mistake, *STEP_MISTAKES[mistake])


COTANGENTS = {
    "none": (None, "the last stage needs the cotangents of its outputs, got None"),
    "shape": (np.ones((7, 3)), r"micro-batch 0 must be as its output, float64\[3, 2\], got float64\[3, 3\]"),
    "dtype": (np.ones((7, 2), "f4"), r"micro-batch 0 must be as its output, float64\[3, 2\], got float32\[3, 2\]"),
    "count": ([np.ones((3, 2))], "cotangents: num_microbatches is 3, got a list of 1"),
    "cut": ([np.ones((n, 2)) for n in (3, 3, 1)], r"micro-batch 1 must be as its output, float64\[2, 2\], got"),
}


@pytest.mark.parametrize("case", COTANGENTS)
def test_wrong_cotangents_are_refused_and_right_ones_may_follow(ranks, case):
    cotangents, message = COTANGENTS[case]
    check_refused(ranks, lambda pipe: pipe.backward(cotangents), ValueError, message, before=forward, after=backward)


@pytest.mark.parametrize("name", ["step", "run", "forward"])
def test_a_second_forward_is_refused_until_the_backward(ranks, name):
    def second(pipe):
        getattr(pipe, name)(X, *([] if name == "forward" else [Y]))

    message = r"a forward still waits for pipe.backward\(\): a new pass would use its micro-batches twice"
    check_refused(ranks, second, RuntimeError, message, before=forward, after=backward)


def test_a_forward_whose_backward_will_not_come_can_be_given_up(ranks):
    def give_up(pipe):
        pipe.cancel()
        assert sum(stage.num_in_flight for stage in pipe.stages) == 0

    def after(pipe):
        pipe.cancel()  # nothing is left to give up
        forward(pipe)
        backward(pipe)

    check_refused(ranks, backward, *STEP_MISTAKES[backward], before=lambda pipe: (forward(pipe), give_up(pipe)))
    check_refused(
        ranks, no_input, *STEP_MISTAKES[no_input], before=lambda pipe: (forward(pipe), give_up(pipe), after(pipe))
    )


class InterruptError(Exception):
    """What a test raises in the middle of a step."""


def fail(*_):
    raise InterruptError


BREAKS = {
    "loss": lambda pipe: pipe.step(X, Y),
    "hook": lambda pipe: pipe.step(X, Y, hooks=mg.Hooks(on_grad_ready=fail)),
    "backward": lambda pipe: pipe.backward(np.ones((7, 2)), hooks=mg.Hooks(between_ops=fail)),
}


@pytest.mark.parametrize("where", BREAKS)
def test_after_an_error_in_mid_step_the_next_one_is_right(where):
    loss, grads = gradients_in_one_process(four_layers(), split(X, 3), split(Y, 3), mg.mse)
    pipe = connect(SoloCommunicator(), four_layers(), schedule="zero_bubble_h1")
    if where == "loss":
        pipe.loss_fn = fail
    if where == "backward":
        pipe.forward(X)
    with pytest.raises(InterruptError):
        BREAKS[where](pipe)
    assert sum(stage.num_in_flight for stage in pipe.stages) == 0
    pipe.loss_fn = mg.mse
    mg.flat.zero_grad(pipe.stages.parameters())
    np.testing.assert_allclose(pipe.step(X, Y), loss, rtol=1e-12)
    check_grads(pipe, grads)


def test_after_an_error_on_one_of_several_ranks_a_new_executor_is_needed():
    def program(comm):
        pipe = connect(comm, four_layers(), loss_fn=fail)
        with pytest.raises(TimeoutError if comm.rank == 0 else InterruptError):
            pipe.step(X, Y)
        with pytest.raises(RuntimeError, match=r"a step of this executor ended in an error.*make a new Pipeline"):
            pipe.step(X, Y)

    LocalWorld(2, timeout_seconds=2.0).run(program)  # as long as rank 1 may take on a busy machine


def test_a_second_backward_is_refused(ranks):
    def both(pipe):
        forward(pipe)
        backward(pipe)

    check_refused(ranks, backward, *STEP_MISTAKES[backward], before=both)


def test_without_a_loss_fn_a_step_is_refused(ranks):
    def program(comm):
        pipe = connect(comm, four_layers(), loss_fn=None)
        for call in (pipe.step, pipe.run, pipe.evaluate):
            with pytest.raises(ValueError, match="the last stage needs a loss_fn; give one to PipelineExecutor"):
                call(X, Y)
        pipe.forward(X)
        pipe.backward(np.ones((7, 2)))

    ranks.run(program)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_microbatches": 0}, "num_microbatches must be at least 1, got 0"),
        ({"max_tag": 30}, r"stages \* micro-batches must be at most 10 on this communicator, got {size} and 12"),
        ({"schedule": chunked(*PLACEMENTS["v"])}, r"chunked places stages \[0, {last}\] on rank 0, got \[0\]"),
    ],
)
def test_an_executor_that_cannot_work_is_refused_on_every_rank(ranks, changed, message):
    def program(comm):
        comm = RecordingCommunicator(comm, Log(), max_tag=changed.get("max_tag"))
        stages = PipelineStage.of(four_layers(), comm, SCHEDULES["1f1b"])
        arguments = {"schedule": SCHEDULES["1f1b"], "num_microbatches": 12} | changed
        arguments.pop("max_tag", None)
        wanted = message.format(size=comm.size, last=2 * comm.size - 1)
        with pytest.raises(ValueError, match=wanted) as caught:
            PipelineExecutor(stages, comm, **arguments)
        PipelineExecutor(stages, comm, SCHEDULES["1f1b"], num_microbatches=1, loss_fn=mg.mse).step(X, Y)
        return str(caught.value)

    assert len(set(ranks.run(program))) == 1


@pytest.mark.parametrize("in_one_step", [True, False])
def test_an_output_whose_shape_depends_on_data_ends_the_run(in_one_step):
    """No check at the beginning can see it; the first stage raises, and the job ends with it."""
    whole, half = np.ones((2, 4)), np.array([[1.0] * 4, [-1.0] * 4])

    def program(comm):
        layers = [apply("positive", lambda x: x[x[:, 0] > 0]), scale("w")]
        pipe = connect(comm, layers, num_microbatches=2, loss_fn=mean)
        pipe.step([whole, whole.copy() if not in_one_step else half], Y[:4])
        pipe.step([half, half.copy()], Y[:4])

    message = r"stage 0: an input float64\[2, 4\] gave float64\[2, 4\] before and float64\[1, 4\] now"
    with pytest.raises(RuntimeError, match=message) as caught:
        LocalWorld(2, timeout_seconds=20).run(program)
    assert caught.value.__notes__ == ["[rank 0]"]


@pytest.mark.ranks(2, 3, 4)
def test_ranks_in_different_random_scopes_are_refused(ranks):
    def program(comm):
        pipe = connect(comm, four_layers())
        with (
            rng.scope(seed=comm.rank, step=0),
            pytest.raises(ValueError, match=r"same rng.scope \(seed, step, first_sample\), but ranks 0 and 1 differ"),
        ):
            pipe.step(X, Y)
        with rng.scope(seed=0, step=0):
            pipe.step(X, Y)

    ranks.run(program)


LAYERS = [("fc", lambda param: nn.Linear(param.at("fc"), 4, 4))]
ONE = SCHEDULES["1f1b"]
IN = np.ones((2, 4), np.float32)


def executor_of(loss_fn: Any) -> PipelineExecutor:
    solo = SoloCommunicator()
    return PipelineExecutor(PipelineStage.of(LAYERS, solo, ONE), solo, ONE, num_microbatches=1, loss_fn=loss_fn)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (
            lambda: PipelineStage.of([nn.ReLU()], SoloCommunicator(), ONE),
            TypeError,
            r"layers are \(name, factory\), such as",
        ),
        (lambda: PipelineStage.of([("fc", 3)], SoloCommunicator(), ONE), TypeError, r"got \('fc', 3\)"),
        (
            lambda: PipelineStage.of(LAYERS, SoloCommunicator(), "1f1b"),
            TypeError,
            r"such as SCHEDULES\['1f1b'\], got '1f1b'",
        ),
        (lambda: PipelineStage.of(LAYERS, 2, ONE), TypeError, r"takes a communicator, such as world\(\), got int"),
        (
            lambda: PipelineStage.of([("fc", lambda param: None)], SoloCommunicator(), ONE),
            ValueError,
            "the factory of layer 'fc' must return a layer, which can be called, got None",
        ),
        (lambda: executor_of("mse"), TypeError, "loss_fn must be a function of an output and y, got 'mse'"),
        (
            lambda: PipelineExecutor([nn.ReLU()], SoloCommunicator(), ONE, num_microbatches=1),
            TypeError,
            "takes what PipelineStage.of returns, got list",
        ),
        (
            lambda: executor_of(lambda y, _: 3.0).step(IN, IN),
            TypeError,
            "without axes, the mean of a micro-batch, got float",
        ),
        (lambda: executor_of(lambda y, _: y).step(IN, IN), TypeError, r"of a micro-batch, got shape \(2, 4\)"),
        (
            lambda: executor_of(mg.mse).step(IN, IN, hooks=print),
            TypeError,
            "hooks must be Hooks, got <built-in function",
        ),
    ],
)
def test_what_is_given_in_place_of_something_else_is_named(
    make: Callable[[], Any], kind: type[Exception], words: str
) -> None:
    # An attribute that a string or a number lacks said so, from inside.
    with pytest.raises(kind, match=words):
        make()
