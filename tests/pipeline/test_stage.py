"""A stage: what it builds, one micro-batch forward and backward, and what tied copies need."""

import gc
import weakref

import numpy as np
import pytest
from toy_pipeline import apply, dense, gradients_in_one_process, mean, scale

import minigrad as mg
from distributed import SoloCommunicator
from minigrad import Hooks, nn
from minigrad.models import gpt
from pipeline import SCHEDULES, PipelineStage, Schedule, cut_by_sizes, gpipe
from pipeline.runtime.boundary import Bundle

LAYERS = [dense("a", 3, 4), dense("b", 4, 4), dense("c", 4, 2)]
ONE = SCHEDULES["1f1b"]


def only_stage(layers):
    (stage,) = PipelineStage.of(layers, SoloCommunicator(), ONE, dtype=np.float64)
    return stage


def forward(stage, x, *, input_grad, **kwargs):
    """Run the forward of a single array."""
    (output,), reached = stage.forward(0, [Bundle((x,), (input_grad,), False)], **kwargs)
    (array,) = output.arrays
    assert not output.is_tuple
    return array, reached


def backward(stage, *cotangents):
    """Run the backward; return the gradient of the input, or None."""
    (input_grads,) = stage.backward(0, cotangents, Hooks())
    return input_grads[0] if input_grads else None


# Building


def test_each_rank_builds_its_own_layers_only(ranks):
    built = []

    def layer(name):
        def factory(param):
            built.append(name)
            return lambda x: x

        return name, factory

    def program(comm):
        names = [f"l{i}" for i in range(5)]
        stages = PipelineStage.of([layer(name) for name in names], comm, ONE)
        (stage,) = stages
        assert len(stages) == 1
        assert len(stage.layers) == stage.spec.layer_stop - stage.spec.layer_start
        return names[stage.spec.layer_start : stage.spec.layer_stop]

    parts = ranks.run(program)
    assert [name for part in parts for name in part] == [f"l{i}" for i in range(5)]


def test_values_are_those_of_the_whole_model_whatever_the_seed_of_others(ranks):
    config = gpt.GPTConfig(vocab_size=11, context=4, num_layers=4, num_heads=1, width=4)
    whole = gpt.GPT(config, seed=5, dtype=np.float64).state_dict()

    def program(comm):
        stages = PipelineStage.of(gpt.layers(config), comm, ONE, seed=5, dtype=np.float64)
        for p in stages.parameters():
            np.testing.assert_array_equal(p.data, whole[p.name], strict=True)
        return [p.name for p in stages.counted_parameters()]

    assert sorted(name for names in ranks.run(program) for name in names) == sorted(whole)


@pytest.mark.ranks(2, 3, 4)
def test_a_stage_says_which_part_it_is(ranks):
    config = gpt.GPTConfig(vocab_size=11, context=4, num_layers=4, num_heads=1, width=4)

    def program(comm):
        (stage,) = PipelineStage.of(gpt.layers(config), comm, ONE)
        assert (stage.is_first, stage.has_embedding) == (comm.rank == 0, comm.rank == 0)
        assert (stage.is_last, stage.has_lm_head) == ((comm.rank == comm.size - 1,) * 2)
        assert stage.stage_id == comm.rank
        assert stage.num_blocks == stage.block_end - stage.block_start
        return stage.num_blocks, stage.block_start

    parts = ranks.run(program)
    assert sum(num for num, _ in parts) == 4
    assert [start for _, start in parts] == [sum(num for num, _ in parts[:i]) for i in range(len(parts))]


def test_more_stages_than_layers_are_refused_on_every_rank(ranks):
    def program(comm):
        message = f"at most the number of layers, got {comm.size} and {comm.size - 1}"
        with pytest.raises(ValueError, match=message):
            PipelineStage.of(LAYERS[:1] * (comm.size - 1), comm, ONE)
        comm.barrier()

    ranks.run(program)


# One micro-batch


def test_a_profile_says_in_which_layer_of_a_stage_an_op_ran():
    stage = only_stage(LAYERS)
    with mg.profile():
        forward(stage, np.ones((2, 3)), input_grad=True)
    (root,) = stage._tapes[0].roots
    assert root.node.seen.path.startswith("PipelineStage.layers[2]")


def test_forward_and_backward_are_those_of_the_layers():
    x = np.linspace(-1, 1, 12).reshape(4, 3)
    stage = only_stage(LAYERS)
    output, reached = forward(stage, x, input_grad=True)
    assert stage.num_in_flight == 1
    assert {p.name for p in reached} == set(dict(stage.named_parameters()))
    input_grad = backward(stage, np.full(output.shape, 1 / output.size))
    assert stage.num_in_flight == 0

    _, grads = gradients_in_one_process(LAYERS, [x], [None], mean)
    for name, grad in stage.param_grads().items():
        np.testing.assert_array_equal(grad, grads[name], strict=True)
    leaf = mg.Tensor(x, requires_grad=True)
    mg.backward(mg.nn.Sequential(stage.layers)(leaf).mean())
    np.testing.assert_array_equal(input_grad, leaf.grad, strict=True)


def test_two_halves_are_the_whole_to_the_last_bit():
    x = np.linspace(-1, 1, 12).reshape(4, 3)
    whole, halves = only_stage(LAYERS), only_stage(LAYERS)
    for stage in (whole, halves):
        output, _ = forward(stage, x, input_grad=True)
    g = np.linspace(1, 2, output.size).reshape(output.shape)
    wanted = backward(whole, g)
    got = halves.backward_input(0, [g], Hooks())[0][0]
    assert all(p.grad is None for p in halves.parameters())
    halves.backward_weight([0], Hooks())
    np.testing.assert_array_equal(got, wanted, strict=True)
    for name, grad in halves.param_grads().items():
        np.testing.assert_array_equal(grad, whole.param_grads()[name], strict=True)


def test_the_weight_half_of_a_frozen_stage_is_nothing():
    stage = only_stage(LAYERS)
    for p in stage.parameters():
        p.requires_grad = False
    output, reached = forward(stage, np.ones((2, 3)), input_grad=False)
    assert reached == []
    assert stage.backward_input(0, [np.ones_like(output)], Hooks()) == [()]
    stage.backward_weight([0], Hooks())
    assert stage.num_in_flight == 0


def test_finish_is_where_the_backward_starts():
    stage = only_stage([scale("a", 3.0)])
    output, _ = forward(stage, np.array([1.0, 2.0]), input_grad=False, finish=lambda y: (y * y).mean())
    assert output == 22.5
    backward(stage, 0.5)
    np.testing.assert_allclose(stage.param_grads()["a"], 0.5 * 2 * 3 * 2.5)


def test_a_stage_may_hand_its_input_on():
    stage = only_stage([apply("same", lambda x: x)])
    x = np.ones((2, 3))
    output, reached = forward(stage, x, input_grad=True)
    assert output is x
    assert reached == []
    g = np.full((2, 3), 5.0)
    np.testing.assert_array_equal(backward(stage, g), g)


def test_the_gradient_of_an_unused_input_is_zeros():
    stage = only_stage([scale("a", shape=(3,)), apply("drop", lambda x: mg.Tensor(np.ones((2, 3), np.float32)))])
    output, _ = forward(stage, np.ones((2, 3)), input_grad=True)
    assert output.dtype == np.float32
    input_grad = backward(stage, np.ones((2, 3), np.float32))
    np.testing.assert_array_equal(input_grad, np.zeros((2, 3)), strict=True)
    np.testing.assert_array_equal(stage.param_grads()["a"], np.zeros(3))


def test_integers_reach_the_layers_as_they_are():
    seen = []
    stage = only_stage([apply("look", lambda x: seen.append(x) or x)])
    ids = np.array([1, 2])
    output, _ = forward(stage, ids, input_grad=False)
    assert seen[0] is ids
    assert output is ids
    assert backward(stage) is None


def test_a_tuple_crosses_a_boundary_and_gradients_come_back_for_its_floating_tensors():
    mask, extra = np.array([1, 0], np.int32), np.array([0.5, 0.5])
    stage = only_stage(
        [scale("a", 3.0), apply("spread", lambda h: (h, mg.Tensor(mask), mask, extra, mg.Tensor(extra), h * h))]
    )
    (output,), reached = stage.forward(0, [Bundle((np.array([1.0, 2.0]),), (True,), False)])
    assert output.is_tuple
    assert output.returns == (True, False, False, False, True, True)
    np.testing.assert_array_equal(output.arrays[5], [9, 36])
    assert [p.name for p in reached] == ["a"]
    # The constant tensor's gradient comes back too, since what is trainable behind it may change: in vain here.
    ((input_grad,),) = stage.backward(0, [np.ones(2), np.ones(2), np.array([0.0, 10.0])], Hooks())
    np.testing.assert_array_equal(input_grad, [3, 3 + 2 * 3 * 6 * 10])


def test_layers_of_the_next_stage_see_the_tuple():
    stage = only_stage([apply("use", lambda x: x[0] * x[1]), scale("a", 2.0)])
    h, mask = np.array([1.0, 2.0]), np.array([1, 0], np.int32)
    (output,), _ = stage.forward(0, [Bundle((h, mask), (True, False), True)])
    np.testing.assert_array_equal(output.arrays[0], [2, 0])
    ((input_grad,),) = stage.backward(0, [np.ones(2)], Hooks())
    np.testing.assert_array_equal(input_grad, [2, 0])


@pytest.mark.parametrize("wrong", [lambda x: None, lambda x: (x, "mask"), lambda x: [x, 3.0]])
def test_something_else_than_tensors_and_arrays_is_refused(wrong):
    stage = only_stage([apply("wrong", wrong)])
    with pytest.raises(TypeError, match=r"stage 0 must give tensors or arrays, got (NoneType|str|float)"):
        forward(stage, np.ones(2), input_grad=False)


def test_the_output_is_free_once_it_is_sent_and_the_tape_once_it_is_walked():
    alive = []

    def watch(x):
        y = x + 1.0  # keeps nothing: only its output's holder keeps the array
        alive.append(weakref.ref(y.data))
        return y

    stage = only_stage([scale("a"), apply("watch", watch)])
    gc.disable()
    try:
        output, _ = forward(stage, np.ones(3), input_grad=False)
        assert alive[0]() is output
        del output
        assert alive[0]() is None  # while its tape waits for the backward
        assert stage.num_in_flight == 1
        backward(stage, np.ones(3))
    finally:
        gc.enable()
    np.testing.assert_array_equal(stage.param_grads()["a"], 3.0)


def test_without_a_tape_nothing_is_kept():
    stage = only_stage(LAYERS)
    output, reached = forward(stage, np.ones((2, 3)), input_grad=False, keep_tape=False)
    assert output.shape == (2, 2)
    assert (reached, stage.num_in_flight) == ([], 0)


def test_param_grads_are_zeros_where_no_backward_reached():
    stage = only_stage([scale("a", shape=(2,))])
    np.testing.assert_array_equal(stage.param_grads()["a"], np.zeros(2))


# Tied parameters: `w` on the first and the last rank, `v` on all


def tied_layers(size):
    inner = [scale(f"inner{i}", shared="v") for i in range(size)]
    return [scale("first", shared="w"), *inner, scale("last", shared="w")]


def tied_stages(comm):
    # The first and the last layer go with the first and the last stage, as an embedding and a head do.
    layers = tied_layers(comm.size)
    layers[0], layers[-1] = ("embed", layers[0][1]), ("head", layers[-1][1])
    return PipelineStage.of(layers, comm, ONE, dtype=np.float64)


def test_tied_parameters_are_those_of_several_ranks(ranks):
    def program(comm):
        stages = tied_stages(comm)
        parameters, counted = ([p.name for p in ps] for ps in (stages.parameters(), stages.counted_parameters()))
        return [p.name for p in stages.tied], parameters, counted, stages.tied_states()

    size = ranks.size
    for rank, (tied, parameters, counted, states) in enumerate(ranks.run(program)):
        held = ["v", "w"] if rank in (0, size - 1) else ["v"]
        assert tied == (held if size > 1 else [])
        assert sorted(parameters) == held
        assert sorted(counted) == (["v", "w"] if rank == 0 else [])
        assert states == ({"v": True, "w": True if "w" in held else None} if size > 1 else {})


def test_tied_gradients_are_summed_over_their_ranks_and_what_was_there_stays(ranks):
    def program(comm):
        stages = tied_stages(comm)
        for p in stages.parameters():
            p.grad = np.full(p.shape, 100.0)  # summed over ranks in an earlier step
        before = stages.set_tied_aside()
        for p in stages.tied:
            if p.name == "v" or comm.rank == 0:  # the last rank's backward does not reach `w`
                p.accumulate_grad(np.full(p.shape, 1.0 + comm.rank))
        stages.sum_tied(before)
        return {p.name: float(p.grad) for p in stages.parameters()}

    size = ranks.size
    for rank, grads in enumerate(ranks.run(program)):
        added = size * (size + 1) / 2 if size > 1 else 0
        assert grads["v"] == 100 + added
        assert grads.get("w", 101) == (101 if size > 1 else 100)
        assert ("w" in grads) == (rank in (0, size - 1))


@pytest.mark.ranks(2, 3)
def test_a_frozen_tied_parameter_is_left_alone(ranks):
    def program(comm):
        stages = tied_stages(comm)
        for p in stages.tied:
            p.requires_grad = False
        stages.sum_tied(stages.set_tied_aside())
        assert [p.grad for p in stages.tied] == [None] * len(stages.tied)
        assert set(stages.tied_states().values()) <= {False, None}

    ranks.run(program)


@pytest.mark.ranks(2, 3, 4)
def test_copies_of_different_shape_are_refused_on_every_rank(ranks):
    def program(comm):
        last = comm.size - 1
        layers = [scale(str(i), shared="w", shape=(3 if i == last else 2,)) for i in range(comm.size)]
        message = (
            "copies of a tied parameter must have the same shape and dtype, "
            rf"but 'w' is float32\[2\] on rank 0 and float32\[3\] on rank {last}"
        )
        with pytest.raises(ValueError, match=message):
            PipelineStage.of(layers, comm, ONE)
        comm.barrier()

    ranks.run(program)


@pytest.mark.ranks(2, 3, 4)
def test_a_name_on_two_ranks_without_a_tie_is_refused_on_every_rank(ranks):
    # A lambda that sees the last value of a loop's variable: every layer had the same name, and so all ranks had one
    # layer's weights, tied.
    layers = [(f"fc{i}", lambda param: nn.Linear(param.at(f"fc{i}"), 2, 2)) for i in range(4)]  # noqa: B023
    by_hand = [("fc", lambda param: Sharing(mg.Parameter(np.ones(2), "w")))] * 4

    def program(comm):
        for chosen, name in ((layers, "fc3.bias"), (by_hand, "w")):
            message = f"^layers on ranks 0 and 1 both have a parameter '{name}': give each a name of its own"
            with pytest.raises(ValueError, match=message):
                PipelineStage.of(chosen[: comm.size], comm, ONE)
            comm.barrier()

    ranks.run(program)


class Sharing(nn.Module):
    def __init__(self, parameter):
        self.parameter = parameter


@pytest.mark.ranks(2, 3, 4)
def test_a_layer_that_cannot_be_made_on_one_rank_is_an_error_on_all(ranks):
    def program(comm):
        last = comm.size - 1

        def cannot_be_made(param):
            raise ValueError("width must be positive")

        layers = [scale(str(i)) for i in range(last)] + [("broken", cannot_be_made)]
        with pytest.raises(ValueError, match=rf"^\[rank {last}\] width must be positive$"):
            PipelineStage.of(layers, comm, ONE)
        comm.barrier()

    ranks.run(program)


@pytest.mark.ranks(2, 3, 4)
def test_tied_parameters_come_first_so_that_their_bucket_is_the_last(ranks):
    """Buckets are launched from the last parameter to the first, and tied ones are final at the end of a step."""

    def program(comm):
        between = [dense(f"fc{i}", 4, 4) for i in range(2 * comm.size)]
        layers = [scale("w"), *between, scale("last", shared="w")]
        specs = cut_by_sizes([name for name, _ in layers], [3, *[2] * (comm.size - 2), 3])
        stages = PipelineStage.of(layers, comm, ONE, specs=specs)
        return [p.name for p in stages.tied], [p.name for p in stages.parameters()]

    results = ranks.run(program)
    for rank in (0, ranks.size - 1):
        tied, names = results[rank]
        assert tied == ["w"]
        assert names[0] == "w"
        assert names.count("w") == 1
    assert len(results[-1][1]) > 1, "on the last rank the tied one is the last of the layers"


@pytest.mark.ranks(2)
def test_a_parameter_of_two_stages_of_one_rank_is_one(ranks):
    """As in a V placement, where the first and the last stage are neighbours on a rank."""
    v_placement = Schedule("v", gpipe, num_chunks=2, rank_of=lambda stage, size: min(stage, 2 * size - 1 - stage))

    def program(comm):
        stages = PipelineStage.of(
            [scale(f"l{i}", shared="w" if i in (0, 3) else None) for i in range(4)], comm, v_placement
        )
        assert [stage.stage_id for stage in stages] == [comm.rank, 3 - comm.rank]
        assert stages.tied == []
        return [p.name for p in stages.parameters()]

    assert ranks.run(program) == [["w"], ["l1", "l2"]]


def test_train_and_eval_reach_every_layer(ranks):
    def program(comm):
        stages = PipelineStage.of([dense(f"l{i}", 2, 2) for i in range(comm.size)], comm, ONE)
        modules = [layer for stage in stages for layer in stage.layers]
        stages.eval()
        assert not any(module.training for layer in modules for module in layer.modules())
        stages.train()
        assert all(module.training for layer in modules for module in layer.modules())

    ranks.run(program)


# Cuts of the caller's own


@pytest.mark.ranks(2)
def test_stages_may_be_cut_otherwise(ranks):
    def program(comm):
        names = [name for name, _ in LAYERS]
        stages = PipelineStage.of(LAYERS, comm, ONE, specs=cut_by_sizes(names, [1, 2]), dtype=np.float64)
        for wrong in (cut_by_sizes(names, [3]), cut_by_sizes(names[:2], [1, 1])):
            with pytest.raises(ValueError, match="1f1b needs 2 stages of 3 layers in all, got specs of"):
                PipelineStage.of(LAYERS, comm, ONE, specs=wrong)
        for no_specs in (names[:2], [1, 2]):  # an attribute that they do not have
            with pytest.raises(TypeError, match="specs are what cut_by_sizes and cut_by_weights return, got "):
                PipelineStage.of(LAYERS, comm, ONE, specs=no_specs)
        return [len(stage.layers) for stage in stages]

    assert ranks.run(program) == [[1], [2]]
