"""The executor: what a pass over a batch returns, what it sends, and which parameters it reaches.

Hooks, memory and mistakes have files of their own. That training equals one process, over layouts, schedules and
numbers of micro-batches, is in test_equality.py.
"""

import numpy as np
import pytest
from recording import Log, RecordingCommunicator
from toy_pipeline import (
    PLACEMENTS,
    X,
    Y,
    apply,
    check_against_one_process,
    check_grads,
    chunked,
    connect,
    dense,
    four_layers,
    gradients_in_one_process,
    grads_of,
    holds,
    mean,
    scale,
    scale_positive,
    step_with_hooks,
)

import minigrad as mg
from distributed import SoloCommunicator
from distributed.data_parallel.ddp import DistributedDataParallel
from minigrad import Hooks, nn, rng
from pipeline import SCHEDULES
from pipeline.runtime.microbatch import split

BOTH = pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])


def lanes(log):
    """Count the messages that a rank sends: activations, gradients, headers."""
    tags = [event.tag % 3 for event in log.calls("isend")]
    return [tags.count(lane) for lane in range(3)]


# What a pass returns


@BOTH
@pytest.mark.point_to_point
def test_run_gives_every_rank_the_losses_and_each_end_what_is_there(ranks, schedule):
    x_parts, y_parts = split(X, 3), split(Y, 3)
    loss, grads = gradients_in_one_process(four_layers(), x_parts, y_parts, mg.mse)
    param = nn.ParamGetter(0, np.float64)
    model = nn.Sequential([factory(param) for _, factory in four_layers()])
    leaves = [mg.Tensor(x, requires_grad=True) for x in x_parts]
    outputs = [model(leaf) for leaf in leaves]
    losses = [mg.mse(output, y) for output, y in zip(outputs, y_parts, strict=True)]
    for part, leaf in zip(losses, leaves, strict=True):
        mg.backward_with_grad(part, len(leaf) / len(X))

    def program(comm):
        pipe = connect(comm, four_layers(), schedule=schedule)
        result = pipe.run(X, Y, input_grads=True)
        check_grads(pipe, grads)
        return result, result.loss

    results = ranks.run(program)
    for rank, (result, rank_loss) in enumerate(results):
        np.testing.assert_allclose(result.losses, [part.item() for part in losses], rtol=1e-12)
        assert result.weights == [3 / 7, 2 / 7, 2 / 7]
        np.testing.assert_allclose(rank_loss, loss, rtol=1e-12)
        assert rank_loss == results[0][1]
        assert len(result.outputs) == (3 if rank == ranks.size - 1 else 0)
        for ours, wanted in zip(result.outputs, outputs, strict=bool(result.outputs)):
            np.testing.assert_allclose(ours, wanted.data, rtol=1e-12)
        assert len(result.input_grads) == (3 if rank == 0 else 0)
        for ours, leaf in zip(result.input_grads, leaves, strict=bool(result.input_grads)):
            np.testing.assert_allclose(ours, leaf.grad, rtol=1e-12)


@BOTH
@pytest.mark.point_to_point
def test_forward_and_backward_start_from_the_callers_cotangents(ranks, schedule):
    x_parts = split(X, 3)
    cotangents = [np.cos(part @ np.ones((4, 2))) for part in x_parts]
    # The loss sum(output * g) has the cotangent g; one process weighs micro-batches, the caller of backward() does not.
    weighted = [g * len(X) / len(g) for g in cotangents]
    _, grads = gradients_in_one_process(four_layers(), x_parts, weighted, lambda output, g: (output * g).sum())

    def program(comm):
        last = comm.rank == comm.size - 1
        pipe = connect(comm, four_layers(), schedule=schedule, loss_fn=None)
        for g in (cotangents, np.concatenate(cotangents)):
            mg.flat.zero_grad(pipe.stages.parameters())
            result = pipe.forward(X, input_grads=True)
            assert [len(output) for output in result.outputs] == ([3, 2, 2] if last else [])
            assert sum(stage.num_in_flight for stage in pipe.stages) == 3
            result = pipe.backward(g if last else None)
            check_grads(pipe, grads)
            assert [part.shape for part in result.input_grads] == ([(3, 4), (2, 4), (2, 4)] if comm.rank == 0 else [])
            assert result.losses == []
            with pytest.raises(RuntimeError, match=r"a pass by pipe.forward\(\) and pipe.backward\(\) has no loss"):
                _ = result.loss

    ranks.run(program)


@BOTH
def test_evaluate_and_predict_record_nothing_and_may_come_between_forward_and_backward(ranks, schedule):
    loss, grads = gradients_in_one_process(four_layers(), split(X, 3), split(Y, 3), mg.mse)

    def program(comm):
        log = Log()
        pipe = connect(RecordingCommunicator(comm, log), four_layers(), schedule=schedule)
        np.testing.assert_allclose(pipe.evaluate(X, Y), loss, rtol=1e-12)
        assert all(p.grad is None for p in pipe.stages.parameters())
        assert sum(stage.num_in_flight for stage in pipe.stages) == 0
        assert lanes(log)[1] == 0
        result = pipe.forward(X)
        evaluated = pipe.evaluate(X[:5], Y[:5])
        predicted = pipe.predict(X)
        for ours, output in zip(predicted, result.outputs, strict=True):
            np.testing.assert_array_equal(ours, output)
        pipe.backward([2 / (7 * 2) * (o - y) for o, y in zip(result.outputs, split(Y, 3), strict=False)] or None)
        check_grads(pipe, grads)
        return evaluated

    assert len(set(ranks.run(program))) == 1


# Losses and their scale


@BOTH
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 8])
def test_the_gradient_does_not_depend_on_the_number_of_micro_batches(ranks, schedule, num_microbatches):
    """L = mean(w x), x = 1 ... 8: 4.5, in uneven parts of 3, 3 and 2 too. torchtitan#1733, pytorch#126600"""

    def program(comm):
        layers = [scale("w", 1.0), *(apply(str(i), lambda x: x) for i in range(comm.size - 1))]
        pipe = connect(comm, layers, schedule=schedule, num_microbatches=num_microbatches, loss_fn=mean)
        return pipe.step(np.arange(1.0, 9), np.zeros(8)), list(grads_of(pipe).values())

    results = ranks.run(program)
    assert [loss for loss, _ in results] == [4.5] * ranks.size
    assert results[0][1] == [4.5]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_micro_batch_has_a_loss_of_its_own(ranks, schedule):
    """One place for the loss of all is right in 1F1B, which uses it at once, and wrong in GPipe. DeepSpeed#3900"""
    if schedule == "interleaved_1f1b" and 3 % ranks.size:
        pytest.skip("needs micro-batches divisible by ranks")

    def program(comm):
        layers = [scale(f"w{i}", 1.0) for i in range(SCHEDULES[schedule].num_stages(comm.size))]
        pipe = connect(comm, layers, schedule=schedule, loss_fn=mean)
        result = pipe.run(np.array([1.0, 2.0, 4.0]), np.zeros(3))
        return result.losses, [float(grad) for grad in grads_of(pipe).values()]

    for losses, grads in ranks.run(program):
        assert losses == [1, 2, 4]
        np.testing.assert_allclose(grads, 7 / 3)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_two_steps_add_up(ranks, tied):
    """Means of 2, 4 and then 6, 8: 3 and then 10; with w once on the first rank and once on the last, twice that.

    Wrong is to scale, or to sum over ranks, what an earlier step left. torchtitan#1733
    """

    def program(comm):
        between = [apply(str(i), lambda x: x) for i in range(comm.size - 2)]
        last = [scale("last", 1.0, shared="w" if tied else None)] if comm.size > 1 else []
        pipe = connect(comm, [scale("w", 1.0), *between, *last], num_microbatches=2, loss_fn=mean)
        steps = []
        for x in ([2.0, 4.0], [6.0, 8.0]):
            pipe.step(np.array(x), np.zeros(2))
            steps.append({name: float(grad) for name, grad in grads_of(pipe).items()})
        return [[step[name] for step in steps] for name in steps[0]]

    ends = [part for part in ranks.run(program) if part]
    factor = 2 if tied and ranks.size > 1 else 1
    assert ends == [[[3 * factor, 10 * factor]]] * min(ranks.size, 2)


@pytest.mark.ranks(2, 3, 4)
def test_hooks_reduce_what_earlier_steps_without_them_accumulated(ranks):
    def program(comm):
        between = [apply(str(i), lambda x: x) for i in range(comm.size - 2)]
        layers = [scale("w", 1.0), *between, scale("last", 1.0, shared="w")]
        pipe = connect(comm, layers, num_microbatches=2, loss_fn=mean)
        ddp = DistributedDataParallel(pipe.stages, SoloCommunicator())
        pipe.step(np.array([2.0, 4.0]), np.zeros(2))
        pipe.step(np.array([6.0, 8.0]), np.zeros(2), hooks=ddp.hooks(num_samples=2))
        ddp.wait()
        return [float(p.grad) for p in pipe.stages.parameters()]

    assert [part for part in ranks.run(program) if part] == [[20.0]] * 2


# Shapes and messages


@BOTH
@pytest.mark.point_to_point
def test_micro_batches_of_different_shapes_and_one_shape_first_and_twice_in_a_step(ranks, schedule):
    generator = np.random.default_rng(2)
    x_parts = [generator.standard_normal(shape) for shape in [(2, 4), (3, 5, 4), (2, 4), (3, 5, 4)]]
    y_parts = [np.zeros((*x.shape[:-1], 2)) for x in x_parts]
    check_against_one_process(ranks, four_layers(), x_parts, y_parts, schedule=schedule, num_steps=3)


@BOTH
@pytest.mark.point_to_point
def test_headers_travel_for_new_shapes_only(ranks, schedule):
    def program(comm):
        log = Log()
        pipe = connect(RecordingCommunicator(comm, log), four_layers(), schedule=schedule)
        sent = []
        for num_samples in (7, 7, 6, 7):
            log.clear()
            pipe.step(X[:num_samples], Y[:num_samples])
            sent.append(lanes(log))
            assert log.requests == {}, "a request is outstanding at the end of the step"
            assert len(log.calls("isend", "irecv")) == len(log.calls("done"))
        return sent

    for rank, sent in enumerate(ranks.run(program)):
        there, back = 3 * (rank < ranks.size - 1), 3 * (rank > 0)
        # Of 7 samples in 3, 2, 2 all are new, though one comes twice; of 6 in 2, 2, 2 none is.
        assert sent == [[there, back, there], [there, back, 0], [there, back, 0], [there, back, 0]]


def test_a_single_rank_sends_nothing():
    log = Log()
    pipe = connect(RecordingCommunicator(SoloCommunicator(), log), four_layers())
    pipe.step(X, Y)
    assert log.calls("isend", "irecv") == []


@BOTH
@pytest.mark.point_to_point
def test_no_gradient_travels_for_integers_between_stages(ranks, schedule):
    """A receiver that waits for one would wait for ever. PiPPy#1029"""
    ids = np.arange(6).reshape(6, 1)

    def layers(size):
        table = ("table", lambda param: nn.Embedding(param.at("table"), 20, 2))
        return [*(apply(f"next{i}", lambda ids: ids + 1) for i in range(max(1, size - 1))), table]

    loss, grads = gradients_in_one_process(layers(ranks.size), [ids], [None], mean)

    def program(comm):
        log = Log()
        pipe = connect(RecordingCommunicator(comm, log), layers(comm.size), schedule=schedule, loss_fn=mean)
        for _ in range(2):
            mg.flat.zero_grad(pipe.stages.parameters())
            np.testing.assert_allclose(pipe.step(ids, np.zeros(6)), loss)
            check_grads(pipe, grads)
        return lanes(log)

    for rank, sent in enumerate(ranks.run(program)):
        there = 3 * (rank < ranks.size - 1)
        assert sent == [2 * there, 0, there]


@pytest.mark.point_to_point
def test_activations_travel_in_their_own_precision(ranks):
    def program(comm):
        log = Log()
        pipe = connect(RecordingCommunicator(comm, log), four_layers(), dtype=np.float32)
        pipe.step(X.astype(np.float32), Y.astype(np.float32))
        assert {grad.dtype for grad in grads_of(pipe).values()} == {np.dtype(np.float32)}
        data = [event for event in log.calls("isend") if event.tag % 3 != 2]
        return all(event.nbytes % (4 * len(split(X, 3)[event.tag // 3 % 3])) == 0 for event in data)

    assert all(ranks.run(program))


@pytest.mark.ranks(2, 4)
@pytest.mark.point_to_point
@BOTH
def test_large_messages_in_both_directions(ranks, schedule):
    """Too large to be buffered: two neighbours that both wait in a send would freeze. pytorch#172668"""
    check_large_messages(ranks, schedule, num_microbatches=4, num_values=1 << 20)


@pytest.mark.soak
@pytest.mark.ranks(2, 4)
@pytest.mark.point_to_point
@pytest.mark.parametrize("num_microbatches", [4, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_of_16_mib_under_every_schedule(ranks, schedule, num_microbatches):
    check_large_messages(ranks, schedule, num_microbatches=num_microbatches, num_values=1 << 22)


def check_large_messages(ranks, schedule, *, num_microbatches, num_values):
    num_stages = SCHEDULES[schedule].num_stages(ranks.size)

    def program(comm):
        layers = [scale(f"w{i}", 2.0) for i in range(num_stages)]
        pipe = connect(
            comm, layers, schedule=schedule, num_microbatches=num_microbatches, loss_fn=mean, dtype=np.float32
        )
        x = np.repeat(np.arange(1, num_microbatches + 1, dtype=np.float32)[:, None], num_values, axis=1)
        for _ in range(2):  # with headers, and without
            pipe.step(x, np.zeros(num_microbatches))
        return [float(grad) for grad in grads_of(pipe).values()]

    expected = 2 * 2.0 ** (num_stages - 1) * (num_microbatches + 1) / 2
    for grads in ranks.run(program):
        np.testing.assert_allclose(grads, expected, rtol=1e-5)


# Which parameters a step reaches


ODD = {
    "pass-through": [dense("a", 4, 4), apply("same", lambda x: x), dense("b", 4, 4), dense("c", 4, 2)],
    "pass-through ends": [apply("same", lambda x: x), dense("a", 4, 3), dense("b", 3, 2), apply("too", lambda x: x)],
    "without parameters": [dense("a", 4, 4), apply("tanh", mg.tanh), apply("relu", mg.relu), dense("b", 4, 2)],
    "transposed": [dense("a", 4, 4), apply("T", lambda x: mg.transpose(x)), apply("T", mg.transpose), dense("b", 4, 2)],
    "conditional": [scale_positive("a"), scale_positive("b", -1.0), scale_positive("c"), dense("d", 4, 2)],
    "cut": [dense("a", 4, 4), dense("b", 4, 4), apply("cut", lambda x: x.detach()), dense("c", 4, 2)],
    "tied neighbours": [dense("a", 4, 4), scale("s", 2.0), scale("t", shared="s"), dense("b", 4, 2)],
    "tied, used on one rank": [holds("h", "w"), dense("a", 4, 4), dense("b", 4, 2), scale("t", 1.0, shared="w")],
}


@BOTH
@pytest.mark.parametrize("case", ODD)
@pytest.mark.point_to_point
def test_odd_stages_equal_one_process(ranks, case, schedule):
    shift = np.array([3.0, -3, 3, 0, 0, -3, 3])[:, None]  # so that micro-batches differ in sign
    check_against_one_process(ranks, ODD[case], split(X + shift, 4), split(Y, 4), schedule=schedule, num_steps=2)


@BOTH
def test_freezing_and_unfreezing_in_mid_run(ranks, schedule):
    loss, grads = gradients_in_one_process(four_layers(), split(X, 3), split(Y, 3), mg.mse)

    def program(comm):
        pipe = connect(comm, four_layers(), schedule=schedule)
        for frozen in ([], ["fc0"], ["fc0", "fc2"], ["fc3"], ["fc0", "fc1", "fc2", "fc3"], []):
            for p in pipe.stages.parameters():
                p.requires_grad = p.name.split(".")[0] not in frozen
            mg.flat.zero_grad(pipe.stages.parameters())
            reached, ready = [], []
            hooks = Hooks(on_start=reached.extend, on_grad_ready=ready.append)
            np.testing.assert_allclose(pipe.step(X, Y, hooks=hooks), loss, rtol=1e-12)
            trained = [p for p in pipe.stages.parameters() if p.requires_grad]
            assert set(reached) == set(ready) == set(trained)
            assert len(ready) == len(trained)
            for p in pipe.stages.parameters():
                if p.requires_grad:
                    np.testing.assert_allclose(p.grad, grads[p.name], rtol=1e-12)
                else:
                    assert p.grad is None

    ranks.run(program)


@pytest.mark.point_to_point
def test_a_stage_may_give_another_precision_than_it_takes(ranks):
    """The gradient comes back in it, and so is rounded once more than in one process."""
    half = apply("half", lambda x: mg.astype(x, dtype=np.float32))
    layers = [dense("a", 4, 4), half, dense("b", 4, 4), dense("c", 4, 2)]
    check_against_one_process(ranks, layers, split(X, 3), split(Y, 3), rtol=1e-5)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_recomputation_draws_the_same_dropout_whatever_other_micro_batches_drew_since(ranks, schedule):
    """guided-diffusion#167: the gradient of a replay with a new mask is that of another sample, and nobody is told."""

    def block(name, recomputed):
        def factory(param):
            inner = nn.Sequential([dense(name, 4, 4)[1](param), nn.Dropout(f"{name}.drop", 0.5)])
            return (lambda x: mg.recompute(inner, x)) if recomputed else inner

        return name, factory

    def program(comm):
        found = []
        for recomputed in (False, True):
            layers = [block(f"b{i}", recomputed) for i in range(SCHEDULES[schedule].num_stages(comm.size))]
            pipe = connect(comm, layers, schedule=schedule, num_microbatches=8)
            ready = {}
            with rng.scope(seed=3, step=5):
                loss = pipe.step(x, x, hooks=Hooks(on_grad_ready=lambda p, ready=ready: ready.update({p.name: p.grad})))
            found.append((loss, {name: grad.tobytes() for name, grad in ready.items()}))
        return found

    x = np.random.default_rng(0).standard_normal((8, 4))
    for plain, replayed in ranks.run(program):
        assert plain == replayed
        assert plain[1]


# Chunks: schedules that place several stages, or none, on a rank


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.point_to_point
def test_stages_in_any_place_and_backwards_in_two_halves(ranks, placement, halves):
    rank_of, num_chunks = PLACEMENTS[placement]
    schedule = chunked(rank_of, num_chunks, halves=halves)
    size = 4 * ranks.size
    layers = [
        ("embed", scale("w")[1]),
        *(dense(f"fc{i}", 4, 4) for i in range(size)),
        ("head", scale("head", shared="w")[1]),
    ]
    y = np.zeros((7, 4))
    check_against_one_process(ranks, layers, split(X, 3), split(y, 3), schedule=schedule, num_steps=2)

    def program(comm):
        pipe = connect(comm, layers, schedule=schedule, loss_fn=mean)
        events = step_with_hooks(pipe, X if rank_of(0, comm.size) == comm.rank else None, Y)
        names = [name for name, _ in events if name not in ("op", "start")]
        assert sorted(names) == sorted(p.name for p in pipe.stages.parameters())
        assert sum(name == "start" for name, _ in events) == 1

    ranks.run(program)


@pytest.mark.ranks(2, 3)
@pytest.mark.point_to_point
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_masks_and_ids_cross_a_boundary_beside_the_activation(ranks, schedule):
    """PiPPy#1029: what carries no gradient keeps its dtype, and exactly one array goes back for each micro-batch."""
    mask, ids = np.array([[1, 0], [1, 1]], np.int32), np.array([[7, 8], [9, 10]])
    extra = np.ones((2, 2))

    def spread(h):
        rows = slice(0, h.shape[0])
        return h, mask[rows], ids[rows], extra[rows]

    def keep(parts):
        _, m, i, e = parts
        assert (m.dtype, i.dtype, e.dtype) == (np.int32, np.int64, np.float64)
        return parts

    def used(parts):
        return parts[0] * parts[1]

    x = np.array([[1.0, 2.0], [3.0, 4.0]])
    between = [apply(f"keep{i}", keep) for i in range(2 * ranks.size - 4)]
    layers = [scale("w", 2.0), apply("spread", spread), *between, apply("use", used), scale("v", 3.0)]

    def program(comm):
        log = Log()

        def loss_fn(y, _):
            return mg.sum(y)

        pipe = connect(RecordingCommunicator(comm, log), layers, schedule=schedule, loss_fn=loss_fn, num_microbatches=1)
        for _ in range(3):
            mg.flat.zero_grad(pipe.stages.parameters())
            log.clear()
            pipe.step(x, x)
            back = [event for event in log.calls("isend") if event.tag % 3 == 1]
            assert len(back) == (comm.rank > 0)
        return {name: grad.item() for name, grad in grads_of(pipe).items()}

    grads = {name: value for part in ranks.run(program) for name, value in part.items()}
    assert grads == {"w": 24, "v": 16}


def test_a_step_can_leave_its_loss_on_the_device(ranks):
    """It is the loss that `step` tells, on every rank, as an array."""

    def program(comm):
        pipe = connect(comm, four_layers())
        told = pipe.step(X, Y)
        loss = pipe.step_on_device(X, Y)
        assert loss.shape == ()
        np.testing.assert_allclose(loss, told, rtol=1e-6)

    ranks.run(program)
