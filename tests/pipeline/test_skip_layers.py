"""Models with skip connections over stages, as a U-Net has, run by every schedule; and declarations that are wrong."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from toy_pipeline import (
    apply,
    check_against_one_process,
    check_grads,
    connect,
    dense,
    giving,
    gradients_in_one_process,
    grads_of,
    join,
    unet,
)

import minigrad as mg
from distributed import LocalWorld, SoloCommunicator
from minigrad import nn
from minigrad.nn.skips import SkipFactory
from pipeline import SCHEDULES, PipelineStage, cut_by_sizes, layer_seconds
from pipeline.runtime.memory import stage_bytes
from pipeline.runtime.microbatch import split
from pipeline.runtime.skips import stage_skips
from pipeline.verify import Case, verify

GENERATOR = np.random.default_rng(0)
X, Y = GENERATOR.standard_normal((9, 4)), GENERATOR.standard_normal((9, 5))
CASE = Case(unet(), [(X, Y)], mg.mse)
NAMES = [name for name, _ in unet()]


def recomputed(layer):
    name, factory = layer

    if isinstance(factory, SkipFactory):
        return name, replace(factory, factory=lambda param: nn.Recomputed(factory.factory(param)))
    return name, lambda param: nn.Recomputed(factory(param))


# Training


@pytest.mark.parametrize(
    ("schedule", "dp", "pp"),
    [*((name, 1, 4) for name in SCHEDULES), *((name, 2, 2) for name in ("1f1b", "zbv", "dualpipev_overlap"))],
)
def test_every_schedule_trains_as_one_process(schedule, dp, pp):
    report = verify(CASE, dp=dp, pp=pp, schedule=schedule, num_microbatches=4)
    assert report.largest_difference < 1e-14


@pytest.mark.point_to_point
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_over_messages_too_again_and_again(ranks, schedule):
    if SCHEDULES[schedule].num_stages(ranks.size) > len(unet()):
        pytest.skip("there are more stages than layers")
    check_against_one_process(ranks, unet(), split(X, 4), split(Y, 4), schedule=schedule, num_steps=3)


@pytest.mark.parametrize(("schedule", "num_ranks"), [("gpipe", 8), ("gpipe", 4), ("zbv", 4), ("interleaved_1f1b", 2)])
def test_contributions_are_added_in_the_order_of_one_process(schedule, num_ranks):
    """An output that goes on and is taken twice gets three: with the same sums the gradients have the same bits."""
    num_parts = num_ranks if schedule == "interleaved_1f1b" else 1
    _, grads = gradients_in_one_process(unet(), split(X, num_parts), split(Y, num_parts), mg.mse)

    def program(comm):
        pipe = connect(comm, unet(), schedule=schedule, num_microbatches=num_parts)
        pipe.step(X, Y)
        for name, grad in grads_of(pipe).items():
            np.testing.assert_array_equal(grad, grads[name], err_msg=name)

    LocalWorld(num_ranks).run(program)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev_overlap"])
def test_recomputed_layers_give_the_same_bits(schedule):
    def program(comm):
        grads = []
        for layers in (unet(), [recomputed(layer) for layer in unet()]):
            pipe = connect(comm, layers, schedule=schedule, num_microbatches=4)
            pipe.step(X, Y)
            grads.append(grads_of(pipe))
        for name, grad in grads[0].items():
            np.testing.assert_array_equal(grad, grads[1][name])

    LocalWorld(2).run(program)


def test_forwards_alone_and_a_backward_apart():
    _, grads = gradients_in_one_process(unet(), split(X, 3), split(Y, 3), mg.mse)
    model = nn.Sequential([factory(nn.ParamGetter(0, np.float64)) for _, factory in unet()])

    def program(comm):
        pipe = connect(comm, unet())
        outputs = pipe.forward(X).outputs
        pipe.backward([2 / Y.size * (o - y) for o, y in zip(outputs, split(Y, 3), strict=False)] or None)
        check_grads(pipe, grads)
        last = comm.rank == comm.size - 1
        outputs = pipe.predict(X)
        np.testing.assert_allclose(np.concatenate(outputs) if last else model(X).data, model(X).data)
        np.testing.assert_allclose(pipe.evaluate(X, Y), mg.mse(model(X), Y).item())

    LocalWorld(4).run(program)


def test_a_skip_of_integers_is_data_and_has_no_gradient():
    layers = [
        giving(apply("ids", lambda x: (x.data if isinstance(x, mg.Tensor) else x).round().astype(np.int64)), "ids"),
        ("embed", lambda param: lambda ids: mg.Tensor(ids.astype(np.float64), requires_grad=False)),
        dense("fc", 4, 4),
        ("last", nn.takes(lambda param: lambda x, ids: x * (ids > 0), "ids")),
    ]
    check_against_one_process(LocalWorld(4), layers, split(X, 2), split(Y[:, :4], 2), num_steps=2)


def test_what_several_layers_take_and_what_passes_on_too_gets_the_sum():
    layers = [giving(apply("same", lambda x: x), "x"), giving(dense("fc0", 4, 4), "y"), *(
        join(f"fc{i}", 4, 4 if i < 6 else 5, *(["x", "y"] if i < 6 else [])) for i in range(1, 7)
    )]  # fmt: skip
    for schedule in ("1f1b", "interleaved_1f1b", "zbv"):
        check_against_one_process(LocalWorld(2), layers, split(X, 2), split(Y, 2), schedule=schedule)
    check_against_one_process(LocalWorld(7), layers, split(X, 2), split(Y, 2))


# What travels


def ends(schedule, num_ranks, layers):
    names = [name for name, _ in layers]
    specs = cut_by_sizes(names, [1] * len(layers))
    return dict(stage_skips(layers, specs, SCHEDULES[schedule].rank_of, num_ranks))


def test_a_rank_gets_an_array_once():
    assert ends("1f1b", 8, unet()) == {(0, 4): ("a",), (0, 7): ("a",), (1, 6): ("b",), (2, 3): ("c",)}
    # In a V on four ranks stages 0 and 7 are together, as 1 and 6; in a loop on two ranks 0, 2, 4 and 6.
    assert ends("zbv", 4, unet()) == {(0, 4): ("a",), (0, 7): ("a",), (1, 6): ("b",), (2, 3): ("c",)}
    layers = [giving(dense("l0", 4, 4), "a"), *(join(f"l{i}", 4, 4, "a") for i in range(1, 4))]
    assert ends("interleaved_1f1b", 2, layers) == {(0, 1): ("a",), (0, 2): ("a",), (1, 3): ("a",)}

    def program(comm):
        pipe = connect(comm, layers, schedule="interleaved_1f1b", num_microbatches=2)
        sent = Counter()
        send = pipe._p2p.send

        def noted(message, bundle):
            if message.other is not None:
                sent[message.kind.value] += 1
            send(message, bundle)

        pipe._p2p.send = noted
        pipe.step(X, Y[:, :4])
        return sent

    # Stages 1 and 3 are on rank 1: it gets "a" once a micro-batch, and sends one gradient back.
    assert LocalWorld(2).run(program) == [Counter(SEND_F=2), Counter(SEND_B=2)]


def test_names_between_the_same_stages_travel_together_and_those_within_one_do_not():
    layers = [
        giving(dense("l0", 4, 4), "a"),
        giving(dense("l1", 4, 4), "b"),
        dense("l2", 4, 4),
        join("l3", 4, 4, "b", "a"),
    ]
    names = [name for name, _ in layers]
    rank_of = SCHEDULES["1f1b"].rank_of
    assert stage_skips(layers, cut_by_sizes(names, [2, 1, 1]), rank_of, 3) == {(0, 2): ("a", "b")}
    assert stage_skips(layers, cut_by_sizes(names, [4]), rank_of, 1) == {}


@pytest.mark.usefixtures("young_heap")
def test_memory_and_times_of_such_a_model_can_be_measured():
    held = stage_bytes(unet(), X, num_stages=4, loss_fn=lambda y: mg.mse(y, Y), dtype=np.float64)
    rows = len(X) * 8
    assert [stage.message for stage in held] == [0, (6 + 0) * rows, (6 + 5) * rows, (6 + 6 + 5) * rows]
    assert all(stage.activations > 0 for stage in held)
    assert len(layer_seconds(unet(), X, SoloCommunicator(), num_runs=1, dtype=np.float64)) == len(unet())


# Declarations that are wrong


WRONG = {
    "taken before it is given": (
        [join("l0", 4, 4, "a"), giving(dense("l1", 4, 4), "a")],
        "goes to a later layer, but 'a' is taken by 'l0' and given by 'l1', which does not come before it",
    ),
    "taken by itself": (
        [dense("l0", 4, 4), giving(join("l1", 4, 4, "a"), "a")],
        "goes to a later layer, but 'a' is taken by 'l1' and given by 'l1'",
    ),
    "given by nobody": (
        [dense("l0", 4, 4), join("l1", 4, 4, "b")],
        "is given by a layer, but 'b', which 'l1' takes, is by none",
    ),
    "given twice": (
        [giving(dense("l0", 4, 4), "a"), giving(dense("l1", 4, 4), "a"), join("l2", 4, 4, "a")],
        "is given by one layer, but 'a' is given by 'l0' and 'l1'",
    ),
    "taken by nobody": (
        [giving(dense("l0", 4, 4), "a"), dense("l1", 4, 4)],
        "is taken by a layer, but 'a' of 'l0' is by none",
    ),
    "too many": (
        [*(giving(dense(f"l{i}", 4, 4), f"n{i}") for i in range(9)), join("u", 4, 4, *(f"n{i}" for i in range(9)))],
        "at most 8 skip connections go from one stage to another, got 9 from 0 to 1",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_declaration_is_one_error_on_all_ranks_before_any_message(case):
    layers, message = WRONG[case]
    specs = cut_by_sizes([name for name, _ in layers], [len(layers) - 1, 1])
    told = []

    def program(comm):
        with pytest.raises(ValueError, match=message) as caught:
            PipelineStage.of(layers, comm, SCHEDULES["1f1b"], specs=specs)
        told.append(str(caught.value))

    LocalWorld(2).run(program)
    assert len(told) == 2
    assert len(set(told)) == 1


def test_ranks_whose_models_have_other_skips_are_told():
    def program(comm):
        layers = [giving(dense("l0", 4, 4), "a"), dense("l1", 4, 4), join("l2", 4, 4, "a")]
        if comm.rank:
            layers = [dense("l0", 4, 4), giving(dense("l1", 4, 4), "a"), join("l2", 4, 4, "a")]
        with pytest.raises(ValueError, match="need the same schedule, skip connections and num_microbatches"):
            connect(comm, layers)

    LocalWorld(3).run(program)


def test_a_model_alone_says_what_is_missing():
    model = nn.Sequential([factory(nn.ParamGetter(0)) for _, factory in [dense("l0", 4, 4), join("l1", 4, 4, "a")]])
    with pytest.raises(ValueError, match="a layer takes 'a', which no layer before it gives"):
        model(X)


def test_what_a_skip_brings_is_one_tensor():
    layers = [giving(apply("l0", lambda x: (x, x)), "a"), apply("l1", lambda x: x[0]), join("l2", 4, 4, "a")]
    with pytest.raises(TypeError, match="stage 0 must give tensors or arrays, got tuple"):
        LocalWorld(3).run(lambda comm: connect(comm, layers).step(X, Y[:, :4]))
