"""A GPT whose blocks are two layers each: the same model, which a pipeline may cut in the middle of a block."""

from itertools import islice

import numpy as np
import pytest

import minigrad as mg
from distributed import LocalWorld
from distributed.checkpoint import Checkpointer
from minigrad import nn, rng
from minigrad.models import GPT, GPTConfig, gpt, gpt2
from minigrad.models.generation import Sampling, generate
from minigrad.nn import ParamGetter, Recomputed, Sequential
from minigrad.optim import AdamW, Optimizer
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage, cut_by_sizes, cut_by_weights, layer_seconds
from pipeline.generation import generate as generate_in_pipeline

CONFIG = GPTConfig(vocab_size=29, context=10, num_layers=4, num_heads=2, width=8, dropout=0.3)
IDS = np.random.default_rng(0).integers(CONFIG.vocab_size, size=(7, 11))
X, Y = IDS[:, :-1], IDS[:, 1:]
NAMES = [name for name, _ in gpt.layers(CONFIG, half_blocks=True)]
# By halves of blocks, each of which is cut somewhere.
SIZES = {"1f1b": [4, 6], "zero_bubble_h1": [6, 4], "zbv": [2, 2, 2, 4]}


def check_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        np.testing.assert_array_equal(values, theirs[name], err_msg=name)


def test_each_block_is_two_layers():
    assert NAMES[:4] == ["embed", "block0.attention", "block0.feed_forward", "block1.attention"]
    assert NAMES[-2:] == ["block3.feed_forward", "head"]
    assert len(NAMES) == 2 + 2 * CONFIG.num_layers
    wrapped = [factory(ParamGetter()) for _, factory in gpt.layers(CONFIG, half_blocks=True, recompute=True)]
    assert [isinstance(layer, Recomputed) for layer in wrapped] == [False, *[True] * 8, False]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_process_has_the_same_bits(dtype, recompute):
    def trained(half_blocks):
        param = nn.ParamGetter(5, dtype)
        layers = gpt.layers(CONFIG, half_blocks=half_blocks, recompute=recompute and half_blocks)
        model = Sequential(factory(param) for _, factory in layers)
        first = model.state_dict()
        with rng.scope(seed=1, step=2):
            loss = mg.cross_entropy(model(X), Y)
            used = rng.current_scope().used
        ready = []
        mg.backward_with_hooks(loss, on_grad_ready=lambda p: ready.append(p.name))
        return loss.item(), first, {p.name: p.grad for p in model.parameters()}, ready, used, list(first)

    ours, theirs = trained(half_blocks=True), trained(half_blocks=False)
    for mine, expected in zip(ours[1:3], theirs[1:3], strict=True):
        check_same(mine, expected)
    assert ours[0] == theirs[0]
    assert ours[3:] == theirs[3:]


class Run:
    """A rank of a pipeline in training, its stages cut between blocks or within."""

    def __init__(self, comm, schedule, *, half_blocks, seed=5, recompute=False):
        layers = gpt.layers(CONFIG, half_blocks=half_blocks, recompute=recompute)
        specs = cut_by_sizes(NAMES, SIZES[schedule]) if half_blocks else None
        order = SCHEDULES[schedule]
        self.stages = PipelineStage.of(layers, comm, order, specs=specs, seed=seed, dtype=np.float64)
        self.optimizer = Optimizer(self.stages.parameters(), AdamW(1e-2))
        self.pipe = PipelineExecutor(self.stages, comm, order, num_microbatches=4, loss_fn=mg.cross_entropy)

    def step(self, number):
        """Return the loss, and the gradients by name."""
        self.optimizer.zero_grad()
        with rng.scope(seed=1, step=number):
            loss = self.pipe.step(X, Y)
        grads = {p.name: p.grad.copy() for p in self.stages.parameters()}
        self.optimizer.step()
        return loss, grads


def whole_of(results):
    """Return the losses of all ranks, which are one, and their gradients together."""
    losses = {loss for loss, _ in results}
    assert len(losses) == 1
    return losses, {name: grad for _, grads in results for name, grad in grads.items()}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", SIZES)
def test_a_pipeline_cut_within_blocks_has_the_bits_of_one_cut_between_them(schedule, recompute):
    def program(comm, half_blocks):
        run = Run(comm, schedule, half_blocks=half_blocks, recompute=recompute)
        return run.step(0), run.step(1), [p.name for stage in run.stages for p in stage.parameters()]

    ours, theirs = (LocalWorld(2).run(program, half_blocks) for half_blocks in (True, False))
    assert [names for *_, names in ours] != [names for *_, names in theirs]
    for step in (0, 1):  # the second with weights that the first has changed
        (our_loss, our_grads), (their_loss, their_grads) = (whole_of([r[step] for r in run]) for run in (ours, theirs))
        assert our_loss == their_loss
        check_same(our_grads, their_grads)


@pytest.mark.parametrize("half_blocks", [True, False])
def test_a_checkpoint_of_either_goes_on_as_the_other(half_blocks, tmp_path):
    def undisturbed(comm):
        run = Run(comm, "1f1b", half_blocks=half_blocks)
        run.step(0)
        checkpoints = Checkpointer(tmp_path, comm, run.stages, run.optimizer)
        checkpoints.save(1)
        checkpoints.wait()
        return run.step(1)

    def go_on(comm):
        run = Run(comm, "1f1b", half_blocks=not half_blocks, seed=9)
        Checkpointer(tmp_path, comm, run.stages, run.optimizer).load()
        return run.step(1)

    (expected_loss, expected), (loss, grads) = (whole_of(LocalWorld(2).run(f)) for f in (undisturbed, go_on))
    assert loss == expected_loss
    check_same(grads, expected)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", SIZES)
def test_a_pipeline_cut_within_blocks_writes_what_one_process_writes(schedule, recompute):
    sampling = Sampling(temperature=0.7, seed=3)

    def enlarge(params):
        for p in params:
            p.data = 4 * p.data  # or every token would be as likely as the next

    model = GPT(CONFIG, dtype=np.float64)
    enlarge(model.parameters())
    expected = list(islice(generate(model, [5, 6, 7], sampling=sampling), 25))  # past the context, too

    def program(comm):
        stages = Run(comm, schedule, half_blocks=True, seed=0, recompute=recompute).stages
        enlarge(stages.parameters())
        tokens = generate_in_pipeline(stages, SCHEDULES[schedule], [5, 6, 7], context=10, sampling=sampling)
        return list(islice(tokens, 25))

    assert LocalWorld(2).run(program) == [expected] * 2


def test_gpt_2s_weights_are_read_and_written(tmp_path):
    expected = GPT(CONFIG, seed=1)
    gpt2.save(expected.parameters(), CONFIG, tmp_path)

    def program(comm):
        stages = Run(comm, "1f1b", half_blocks=True).stages
        gpt2.load(stages.parameters(), CONFIG, tmp_path)
        return {p.name: p.data for p in stages.parameters()}

    first, second = LocalWorld(2).run(program)
    assert "block1.attention.qkv.weight" in first
    assert "block1.up.weight" in second
    check_same({name: values.astype(np.float32) for name, values in (first | second).items()}, expected.state_dict())


def test_measured_halves_are_cut_where_they_balance():
    def program(comm):
        layers = gpt.layers(CONFIG, half_blocks=True)
        seconds = layer_seconds(layers, X, comm)
        return len(seconds) == len(layers) and all(s > 0 for s in seconds)

    assert LocalWorld(2).run(program) == [True, True]
    weights = [0.1, *[1.0, 2.0] * CONFIG.num_layers, 3.5]
    first, second = cut_by_weights(NAMES, weights, 2)
    assert (first.layer_stop, second.layer_stop) == (6, 10)  # 7.1 and 8.5; of whole blocks 9.1 and 6.5
