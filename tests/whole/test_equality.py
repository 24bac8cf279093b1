"""Distributed equals single: every layout and schedule trains as one process does.

In float64, with dropout, on batches that divide by nothing: each gradient before the step, the loss on every rank, and
the parameters after some steps of SGD with momentum. AdamW alone would not do: it hides a wrong scale of the gradient.
"""

import functools
from collections.abc import Callable
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
import pytest
from cases import case
from toy_pipeline import dense, holds, scale

import minigrad as mg
from distributed import LocalWorld, Mesh
from distributed.data_parallel.ddp import DistributedDataParallel
from minigrad import nn, optim, rng
from minigrad.models import gpt, mlp
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage

NUM_STEPS = 2  # the second one meets momentum, and shapes that are known
# 1 and 2 micro-batches are fewer than there are stages (torchtitan#775, PiPPy#1064).
# Samples of each replica, by number of replicas: at least one for each of 8 micro-batches, divided by none of 2, 4, 8.
SAMPLES = {1: (25,), 2: (14, 11), 3: (9, 8, 8), 4: (9, 9, 8, 9)}
LAYOUTS = {
    1: [(1, 1)],
    2: [(2, 1), (1, 2)],
    3: [(3, 1), (1, 3)],
    4: [(1, 4), (2, 2), (4, 1)],
    6: [(2, 3)],
    8: [(2, 4)],
}
CONFIG = gpt.GPTConfig(vocab_size=17, context=6, num_layers=8, num_heads=2, width=8, dropout=0.1)
SGD = optim.SGD(0.5, momentum=0.9)


class Model(NamedTuple):
    """Layers, and the batch of a step: (generator, number of samples) -> x, y."""

    layers: list[Any]
    batch: Callable[[np.random.Generator, int], tuple[Any, Any]]
    loss_fn: Callable[[Any, Any], Any]


def text(generator, num_samples):
    ids = generator.integers(0, CONFIG.vocab_size, (num_samples, CONFIG.context + 1))
    return ids[:, :-1], ids[:, 1:]


def points(generator, num_samples):
    return generator.standard_normal((num_samples, 4)), generator.standard_normal((num_samples, 3))


WIDTHS = [4, *[8] * 7, 3]  # as many layers as two chunks on each of four ranks need
MODELS = {
    "gpt": Model(gpt.layers(CONFIG), text, mg.cross_entropy),
    "mlp": Model(mlp.layers(WIDTHS, dropout=0.1), points, mg.mse),
    # Tied on the first and last stage, and used on one of them: as the head's table in a batch that never reaches it.
    "unused tie": Model(
        [
            holds("embed", "w", (4,)),
            *(dense(f"fc{i}", 4, 4) for i in range(7)),
            scale("out", shape=(4,), shared="w"),
            dense("head", 4, 3),
        ],
        points,
        mg.mse,
    ),
}


def batches(model, num_replicas):
    generator = np.random.default_rng(7)
    return [MODELS[model].batch(generator, sum(SAMPLES[num_replicas])) for _ in range(NUM_STEPS)]


@functools.cache
def one_process(model, num_replicas, rule):
    """Train in one process; return losses, gradients of every step, and the parameters at the end."""
    layers, _, loss_fn = MODELS[model]
    param = nn.ParamGetter(0, np.float64)
    net = nn.Sequential([factory(param) for _, factory in layers])
    optimizer = optim.Optimizer(net.parameters(), rule)
    losses, grads = [], []
    for step, (x, y) in enumerate(batches(model, num_replicas)):
        optimizer.zero_grad()
        with rng.scope(seed=1, step=step):
            loss = loss_fn(net(x), y)
        mg.backward(loss)
        losses.append(loss.item())
        grads.append({p.name: p.grad.copy() for p in net.parameters()})
        optimizer.step()
    return losses, grads, net.state_dict()


def train(comm, model, dp, pp, schedule, num_microbatches, rule):
    """Train in a layout; return what this rank saw, as `one_process`."""
    layers, _, loss_fn = MODELS[model]
    mesh = Mesh(comm, dp=dp, pp=pp)
    stages = PipelineStage.of(layers, mesh.pp, SCHEDULES[schedule], dtype=np.float64)
    ddp = DistributedDataParallel(stages, mesh.dp, bucket_bytes=2000)
    optimizer = optim.Optimizer(stages.parameters(), rule)
    pipe = PipelineExecutor(stages, mesh.pp, SCHEDULES[schedule], num_microbatches=num_microbatches, loss_fn=loss_fn)
    first = sum(SAMPLES[dp][: mesh.dp.rank])
    own = slice(first, first + SAMPLES[dp][mesh.dp.rank])
    losses, grads = [], []
    for step, (x, y) in enumerate(batches(model, dp)):
        optimizer.zero_grad()
        hooks = ddp.hooks(num_samples=len(x[own]))
        with rng.scope(seed=1, step=step, first_sample=ddp.first_sample):
            loss = pipe.step(x[own], y[own], hooks=hooks)
        ddp.wait()
        losses.append(ddp.mean(loss))
        grads.append({p.name: p.grad.copy() for p in stages.parameters()})
        optimizer.step()
    return losses, grads, {p.name: p.data.copy() for p in stages.parameters()}


def check_equal(results, expected, *, rtol=1e-10, atol=1e-14):
    """Check what each rank saw against one process, and what ranks share against each other, to the last bit."""
    losses, grads, values = expected
    final = {}
    for rank_losses, rank_grads, rank_values in results:
        np.testing.assert_allclose(rank_losses, losses, rtol=rtol)
        assert rank_losses == results[0][0]
        for step, (ours, reference) in enumerate(zip(rank_grads, grads, strict=True)):
            for name, grad in ours.items():
                np.testing.assert_allclose(grad, reference[name], rtol=rtol, atol=atol, err_msg=f"{name}, step {step}")
        for name, value in rank_values.items():
            np.testing.assert_allclose(value, values[name], rtol=rtol, atol=atol, err_msg=name)
            np.testing.assert_array_equal(value, final.setdefault(name, value), err_msg=f"copies of {name}")
    assert final.keys() == values.keys()


def allows(schedule, num_ranks, num_microbatches):
    """Tell whether a schedule takes these sizes; some want micro-batches divisible by ranks."""
    try:
        SCHEDULES[schedule].orders(num_ranks, num_microbatches)
    except ValueError:
        return False
    return True


def check_layouts(ranks, model, schedule, num_microbatches, rule=SGD, *, min_pp=1, **tolerance):
    """Hold every layout of so many ranks against one process; four replicas alone add nothing to two and three."""
    for dp, pp in LAYOUTS[ranks.size]:
        if pp >= min_pp and allows(schedule, pp, num_microbatches):
            results = ranks.run(train, model, dp, pp, schedule, num_microbatches, rule)
            check_equal(results, one_process(model, dp, rule), **tolerance)


@pytest.mark.parametrize(
    ("model", "schedule", "num_microbatches"),
    [("gpt", "1f1b", 4), ("unused tie", "gpipe", 2), ("unused tie", "1f1b", 1)],
)
@pytest.mark.point_to_point
def test_training_equals_one_process(ranks, model, schedule, num_microbatches):
    check_layouts(ranks, model, schedule, num_microbatches, min_pp=2 if ranks.size == 4 else 1)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.point_to_point
def test_every_schedule_equals_one_process(ranks, schedule):
    check_layouts(ranks, "mlp", schedule, 4, min_pp=2)


WORLDS = [*product((2, 3, 4), (False, True)), (6, False), (8, False)]  # size, whether sends wait for their receives
GRID = list(product(MODELS, SCHEDULES, range(1, 9), WORLDS))


@functools.cache
def is_trained(schedule, num_microbatches, size):
    """Tell whether some layout of this many ranks takes the schedule."""
    return any(allows(schedule, pp, num_microbatches) for _, pp in LAYOUTS[size])


def pairs(row):
    """Return the values of a row of the grid, two by two, with their places."""
    return set(combinations(enumerate(row), 2))


def sample():
    """Choose rows of the grid in which every two values meet that meet anywhere in it."""
    models, chosen, seen = list(MODELS), [], set()
    latin = [
        (models[(place + m) % len(models)], schedule, m, WORLDS[(3 * place + m) % len(WORLDS)])
        for place, schedule in enumerate(SCHEDULES)
        for m in range(1, 9)
    ]
    for row in latin + GRID:
        _, schedule, num_microbatches, (size, _) = row
        if pairs(row) - seen and is_trained(schedule, num_microbatches, size):
            chosen.append(row)
            seen |= pairs(row)
    return chosen


@pytest.mark.long
@pytest.mark.parametrize(("model", "schedule", "num_microbatches", "world"), sample())
def test_every_two_values_of_the_grid_train_as_one_process(model, schedule, num_microbatches, world):
    """Every layout of a size but four replicas, as above."""
    size, synchronous_sends = world
    ranks = LocalWorld(size, synchronous_sends=synchronous_sends)
    check_layouts(ranks, model, schedule, num_microbatches, min_pp=2 if size == 4 else 1)


@pytest.mark.soak
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.point_to_point
def test_training_equals_one_process_in_every_layout(ranks, model, schedule):
    for num_microbatches in range(1, 9):
        with case(num_microbatches, "micro-batches"):
            check_layouts(ranks, model, schedule, num_microbatches)


@pytest.mark.soak
@pytest.mark.ranks(6, 8)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_two_replicas_of_long_pipelines_equal_one_process(ranks, model, schedule):
    for num_microbatches in range(1, 9):
        with case(num_microbatches, "micro-batches"):
            check_layouts(ranks, model, schedule, num_microbatches)


@pytest.mark.ranks(2, 4)
def test_adamw_equals_one_process(ranks):
    # Where a gradient is zero but for rounding, AdamW's step is rounding divided by itself: hence the larger eps.
    rule = optim.AdamW(0.01, eps=1e-4)
    check_layouts(ranks, "gpt", "1f1b", 4, rule, min_pp=2, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("model", ["mlp", "unused tie"])
def test_two_runs_and_two_schedules_give_the_same_bits(ranks, model):
    for dp, pp in LAYOUTS[ranks.size]:
        first, *others = [ranks.run(train, model, dp, pp, schedule, 4, SGD) for schedule in ("1f1b", "1f1b", "gpipe")]
        for other in others:
            for ours, theirs in zip(first, other, strict=True):
                assert ours[0] == theirs[0]
                for a, b in zip([*ours[1], ours[2]], [*theirs[1], theirs[2]], strict=True):
                    assert {name: array.tobytes() for name, array in a.items()} == {
                        name: array.tobytes() for name, array in b.items()
                    }


@pytest.mark.ranks(2, 3, 4)
def test_tied_copies_stay_equal_to_the_last_bit(ranks):
    def program(comm):
        stages = PipelineStage.of(gpt.layers(CONFIG), comm, SCHEDULES["1f1b"])
        optimizer = optim.Optimizer(stages.parameters(), optim.AdamW(0.01))
        pipe = PipelineExecutor(stages, comm, SCHEDULES["1f1b"], num_microbatches=3, loss_fn=mg.cross_entropy)
        generator = np.random.default_rng(3)
        for step in range(4):
            optimizer.zero_grad()
            with rng.scope(seed=1, step=step):
                pipe.step(*text(generator, 7))
            optimizer.step()
        return {p.name: p.data.tobytes() for p in stages.tied}

    copies = ranks.run(program)
    assert list(copies[0]) == ["embed.token.weight"]
    assert copies[0] == copies[-1]
    assert all(middle == {} for middle in copies[1:-1])
