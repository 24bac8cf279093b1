"""Hooks of a pipeline's step: each once, with the final gradient, inside the backward that finished it."""

import re

import numpy as np
import pytest
from recording import Log, RecordingCommunicator
from toy_pipeline import (
    X,
    Y,
    apply,
    connect,
    dense,
    four_layers,
    gradients_in_one_process,
    grads_of,
    mean,
    scale,
    scale_positive,
    step_with_hooks,
)

import minigrad as mg
from distributed import Mesh
from distributed.data_parallel.ddp import DistributedDataParallel
from minigrad import Hooks, nn
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage
from pipeline.runtime.microbatch import split


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_hooks_fire_once_with_final_gradients_between_the_ops_of_the_last_backward(ranks, schedule):
    def program(comm):
        pipe = connect(comm, four_layers(), schedule=schedule)
        events = step_with_hooks(pipe, X, Y)
        names = [name for name, _ in events if name not in ("start", "op")]
        final = grads_of(pipe)
        assert sorted(names) == sorted(final)
        assert [names for name, names in events if name == "start"] == [sorted(final)]
        for name, grad in events:
            if name in final:
                np.testing.assert_array_equal(grad, final[name])
        kinds = "".join("o" if name == "op" else "s" if name == "start" else "h" for name, _ in events)
        # Start, with micro-batches still to go or not; hooks of the last layer, ops, hooks of the one before, ...
        wanted = r"o*so*" + r"h[ho]*o" * (len(pipe.stages.parameters()) // 2 - 1) + r"[ho]*"
        assert re.fullmatch(wanted, kinds), kinds

    ranks.run(program)


def test_a_parameter_of_early_micro_batches_is_ready_early_and_one_of_none_is_not_reached(ranks):
    def both(param):
        return nn.Sequential([factory(param) for _, factory in (scale("v"), scale_positive("w", 1.0))])

    def program(comm):
        layers = [("both", both), *(apply(str(i), lambda x: x) for i in range(comm.size - 1))]
        pipe = connect(comm, layers, schedule="gpipe", loss_fn=mean)
        steps = [step_with_hooks(pipe, np.array([x, -1, -1]), np.zeros(3)) for x in (1.0, -1.0)]
        return [
            [(name, grad) if name == "start" else name for name, grad in events if name != "op"] for events in steps
        ]

    first, *others = ranks.run(program)
    assert first == [[("start", ["v", "w"]), "w", "v"], [("start", ["v"]), "v"]]
    assert others == [[[("start", [])]] * 2] * (ranks.size - 1)


@pytest.mark.ranks(2, 3, 4)
def test_a_tied_parameter_is_ready_last_after_its_sum(ranks):
    def program(comm):
        between = [dense(f"fc{i}", 4, 4) for i in range(comm.size)]
        layers = [("embed", scale("w")[1]), *between, ("head", scale("head", shared="w")[1])]
        pipe = connect(comm, layers, loss_fn=mean)
        events = step_with_hooks(pipe, X, Y)
        return [(name, grad) for name, grad in events if name != "op"]

    layers = [scale("w"), *(dense(f"fc{i}", 4, 4) for i in range(ranks.size)), scale("last", shared="w")]
    _, grads = gradients_in_one_process(layers, split(X, 3), split(Y, 3), mean)
    events = ranks.run(program)
    for ours in (events[0], events[-1]):
        assert "w" in ours[0][1]
        assert ours[-1][0] == "w"
        np.testing.assert_allclose(ours[-1][1], grads["w"], rtol=1e-12)
    for ours in events[1:-1]:
        assert "w" not in dict(ours)


def test_messages_move_between_the_ops_of_a_forward(ranks):
    """Over TCP a large activation, sent just before a forward, otherwise arrives when that forward has ended."""

    def program(comm):
        log = Log()
        pipe = connect(RecordingCommunicator(comm, log), four_layers(), num_microbatches=1)
        (stage,) = pipe.stages
        log.num_progress = 0
        pipe.predict(X)
        num_neighbours = (comm.rank > 0) + (comm.rank < comm.size - 1)
        return log.num_progress, 2 * len(stage.layers) + 1 + num_neighbours  # a product and a tanh a layer; the actions

    assert all(calls == expected for calls, expected in ranks.run(program))


def test_messages_move_between_the_ops_of_a_backward(ranks):
    def program(comm):
        log = Log()
        pipe = connect(RecordingCommunicator(comm, log), four_layers())
        log.num_progress = 0
        events = step_with_hooks(pipe, X, Y)
        assert log.num_progress >= sum(name == "op" for name, _ in events) > 0

    ranks.run(program)


@pytest.mark.ranks(4)
@pytest.mark.point_to_point
def test_a_bucket_is_launched_inside_a_hook_while_a_message_is_under_way(ranks):
    """What the project is about: gradients travel over dp inside backward, beside the pipeline's own messages."""

    def program(comm):
        log = Log()
        mesh = Mesh(RecordingCommunicator(comm, log), dp=2, pp=2)
        stages = PipelineStage.of(four_layers(), mesh.pp, SCHEDULES["1f1b"])
        ddp = DistributedDataParallel(stages, mesh.dp, bucket_bytes=8)
        pipe = PipelineExecutor(stages, mesh.pp, SCHEDULES["1f1b"], num_microbatches=4, loss_fn=mg.mse)
        begins = Hooks(on_grad_ready=lambda p: log.note("hook begins"))
        ends = Hooks(on_grad_ready=lambda p: log.note("hook ends"), between_ops=lambda: log.note("op"))
        hooks = ddp.hooks(num_samples=7)
        log.clear()
        pipe.step(X, Y, hooks=begins + hooks + ends)
        last_op = max(i for i, event in enumerate(log) if event.call == "op")
        launches, in_hook = [], False
        for i, event in enumerate(log):
            if event.call.startswith("hook"):
                in_hook = event.call == "hook begins"
            elif event.call == "allreduce" and in_hook:
                launches.append((i < last_op, bool(event.outstanding)))
        assert log.requests == {}
        ddp.wait()
        return mesh.pp.rank, ddp.buckets.num_buckets, launches

    for stage, num_buckets, launches in ranks.run(program):
        assert len(launches) == num_buckets > 2
        assert sum(before_last_op for before_last_op, _ in launches) >= num_buckets - 1
        if stage == 1:  # the gradient of the micro-batch before is on its way to the first stage
            assert all(outstanding for _, outstanding in launches)
