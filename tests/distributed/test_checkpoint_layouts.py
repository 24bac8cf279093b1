"""A checkpoint has no layout: saved in one and loaded in any other, the next step is the one that was to come.

In float64, with dropout, AdamW with a warmup, weights tied over two stages, an uneven batch, and a buffer that
training changes.
"""

from pathlib import Path

import numpy as np
import pytest

import minigrad as mg
from distributed import DistributedDataParallel, Mesh
from distributed.checkpoint.checkpointer import Checkpointer
from minigrad import nn, rng
from minigrad.lr_schedule import warmup_cosine
from minigrad.models import gpt
from minigrad.optim import SGD, AdamW, Optimizer
from minigrad.precision import use_precision
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage

SAVED_STEPS, FURTHER_STEPS = 2, 1
NUM_SAMPLES = 5
CONFIG = gpt.GPTConfig(vocab_size=11, context=4, num_layers=3, num_heads=2, width=8, dropout=0.1)
# Where a gradient is zero but for rounding, AdamW's step is rounding divided by itself: hence the larger eps.
RULE = AdamW(warmup_cosine(0.01, num_steps=20, num_warmup_steps=5), eps=1e-4)
LAYOUTS = {  # name -> dp, pp, schedule, zero
    "one process": (1, 1, None, 0),
    "dp 2": (2, 1, "1f1b", 0),
    "dp 2, shards": (2, 1, "1f1b", 1),
    "pp 2": (1, 2, "1f1b", 0),
    "pp 2 in chunks": (1, 2, "zbv", 0),
    "dp 2, pp 2": (2, 2, "1f1b", 0),
    "dp 2, pp 2, shards": (2, 2, "1f1b", 2),
}
ON_FOUR = {  # of those of four ranks: each kind of change once
    "one process": "dp 2, pp 2, shards",
    "dp 2, shards": "dp 2, pp 2",
    "pp 2 in chunks": "dp 2, pp 2, shards",
    "dp 2, pp 2": "dp 2, pp 2",
    "dp 2, pp 2, shards": "pp 2 in chunks",
}


class Shift(nn.Module):
    """Adds a buffer, which each step of the training changes."""

    def __init__(self):
        self.shift = nn.Buffer(np.zeros(CONFIG.width), "shift")

    def __call__(self, x):
        return x + self.shift


embedding, *blocks, head = gpt.layers(CONFIG)
# The buffer is in the third of four stages: with two chunks a rank, in the second one of its rank.
LAYERS = [embedding, *blocks[:2], ("shift", lambda param: Shift()), blocks[2], head]


class Run:
    """One rank of a run in a layout."""

    def __init__(self, comm, layout, seed):
        dp, pp, schedule, zero = LAYOUTS[layout]
        self.comm = comm
        self.schedule = schedule
        if schedule is None:
            param = nn.ParamGetter(seed, np.float64)
            self.model = nn.Sequential(factory(param) for _, factory in LAYERS)
            self.rows = slice(NUM_SAMPLES)
            self.optimizer = Optimizer(self.model.parameters(), RULE)
        else:
            mesh = Mesh(comm, dp=dp, pp=pp)
            chosen = SCHEDULES[schedule]
            self.model = PipelineStage.of(LAYERS, mesh.pp, chosen, seed=seed, dtype=np.float64)
            self.ddp = DistributedDataParallel(self.model, mesh.dp, bucket_bytes=2000, zero=zero)
            self.pipe = PipelineExecutor(self.model, mesh.pp, chosen, num_microbatches=2, loss_fn=mg.cross_entropy)
            starts = [0, 3, 5] if dp == 2 else [0, 5]
            self.rows = slice(starts[mesh.dp.rank], starts[mesh.dp.rank + 1])
            self.optimizer = self.ddp.optimizer(RULE)

    def step(self, number):
        ids = np.random.default_rng(number).integers(0, CONFIG.vocab_size, (NUM_SAMPLES, CONFIG.context + 1))[self.rows]
        x, y = ids[:, :-1], ids[:, 1:]
        self.optimizer.zero_grad()
        if self.schedule is None:
            with rng.scope(seed=1, step=number):
                loss = mg.cross_entropy(self.model(x), y)
            mg.backward(loss)
        else:
            hooks = self.ddp.hooks(num_samples=len(x))
            with rng.scope(seed=1, step=number, first_sample=self.ddp.first_sample):
                self.pipe.step(x, y, hooks=hooks)
            self.ddp.wait()
        self.optimizer.step()
        for buffer in self.model.buffers():
            buffer.data = 0.5 * buffer.data + 0.01 * number

    def numbers(self):
        """Copy everything that training changes."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        arrays = {tensor.name: tensor.data.copy() for tensor in tensors}
        for by_name in self.comm.gather_objects(dict(self.optimizer.state_slices())):  # shards, put together
            for name, (array, shape, start, stop) in by_name.items():
                whole = arrays.setdefault(name, np.empty(shape)).reshape(-1)
                whole[start:stop] = array.reshape(-1)
        return arrays


def undisturbed(comm, layout):
    """Train without a checkpoint; return the numbers after each step from the one that is saved on."""
    run = Run(comm, layout, seed=0)
    numbers = []
    for step in range(SAVED_STEPS + FURTHER_STEPS):
        run.step(step)
        numbers.append(run.numbers())
    return numbers[SAVED_STEPS - 1 :]


def save(comm, layout, folder):
    run = Run(comm, layout, seed=0)
    checkpoints = Checkpointer(folder, comm, run.model, run.optimizer)
    for step in range(SAVED_STEPS):
        run.step(step)
    checkpoints.save(SAVED_STEPS)
    checkpoints.wait()


def go_on(comm, layout, folder):
    """Load into a model that began otherwise, and train on; return as `undisturbed`."""
    run = Run(comm, layout, seed=5)
    run.step(0)  # what is loaded into need not be new
    loaded = Checkpointer(folder, comm, run.model, run.optimizer).load()
    numbers = [run.numbers()]
    for step in range(loaded.step, loaded.step + FURTHER_STEPS):
        run.step(step)
        numbers.append(run.numbers())
    return numbers


def num_ranks(layout):
    dp, pp, *_ = LAYOUTS[layout]
    return dp * pp


def on_as_many_as_it_takes(comm, program, layout, *args):
    """Run a program on the first ranks; the others wait."""
    taking_part = comm.rank < num_ranks(layout)
    part = comm.split(color=int(not taking_part))
    result = program(part, layout, *args) if taking_part else []
    comm.barrier()
    return result


def whole_model(ranks, program, layout, *args):
    """Return the numbers after each step, of all ranks together; copies must be equal to the last bit."""
    together = []
    for by_rank in zip(*filter(None, ranks.run(on_as_many_as_it_takes, program, layout, *args)), strict=True):
        together.append({})
        for name, array in (pair for numbers in by_rank for pair in numbers.items()):
            first = together[-1].setdefault(name, array)
            assert array.tobytes() == first.tobytes(), f"copies of {name}, {layout}"
    return together


@pytest.mark.ranks(2)
def test_the_next_step_is_the_one_that_was_to_come(ranks, tmp_path):
    """Saved in each layout and loaded in its two neighbours of the list: its shards, stages and chunks change."""
    layouts = [layout for layout in LAYOUTS if num_ranks(layout) <= 2]
    check(ranks, tmp_path, {layout: [layouts[i - 1], layouts[i - 2]] for i, layout in enumerate(layouts)})


@pytest.mark.long
@pytest.mark.ranks(2)
def test_so_it_is_from_every_layout_of_two_ranks_and_to_every(ranks, tmp_path):
    layouts = [layout for layout in LAYOUTS if num_ranks(layout) <= 2]
    check(ranks, tmp_path, dict.fromkeys(layouts, layouts))


@pytest.mark.ranks(4)
def test_so_it_is_on_four_ranks(ranks, tmp_path):
    check(ranks, tmp_path, {saved_in: [loaded_in] for saved_in, loaded_in in ON_FOUR.items()})


@pytest.mark.long
@pytest.mark.ranks(4)
def test_so_it_is_from_every_layout_of_four_ranks_and_to_every(ranks, tmp_path):
    check(
        ranks,
        tmp_path,
        {
            saved_in: [loaded_in for loaded_in in LAYOUTS if 4 in (num_ranks(saved_in), num_ranks(loaded_in))]
            for saved_in in LAYOUTS
        },
    )


def check(ranks, tmp_path, pairs):
    """Save in each layout, and go on in each of those that belong to it."""
    tmp_path = Path(ranks.run(lambda comm: comm.broadcast_object(str(tmp_path)))[0])
    for saved_in, layouts in pairs.items():
        expected = whole_model(ranks, undisturbed, saved_in)
        ranks.run(on_as_many_as_it_takes, save, saved_in, tmp_path / saved_in)
        for loaded_in in layouts:
            case = f"saved in {saved_in}, loaded in {loaded_in}"
            at_load, *after = whole_model(ranks, go_on, loaded_in, tmp_path / saved_in)
            assert at_load.keys() == expected[0].keys()
            for name, array in expected[0].items():
                assert at_load[name].tobytes() == array.tobytes(), f"{name}, {case}"
            for step, (ours, theirs) in enumerate(zip(after, expected[1:], strict=True)):
                for name, array in theirs.items():
                    if loaded_in == saved_in:
                        assert ours[name].tobytes() == array.tobytes(), f"{name}, step {step}, {case}"
                    np.testing.assert_allclose(
                        ours[name], array, rtol=1e-12, atol=1e-15, err_msg=f"{name}, step {step}, {case}"
                    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("zero", [1, 2])
def test_shards_of_half_precision_are_saved_as_they_are_trained(ranks, tmp_path, zero):
    """Parameters are in float16 there, and each rank has the float32 values of its shard alone."""
    tmp_path = Path(ranks.run(lambda comm: comm.broadcast_object(str(tmp_path)))[0])

    def run(comm, zero, precision):
        model = nn.Linear(nn.ParamGetter().at("fc"), 3, 5)
        ddp = DistributedDataParallel(model, comm, zero=zero)
        use_precision(ddp.params, precision)
        optimizer = ddp.optimizer(SGD(0.1, momentum=0.9))
        return model, ddp, optimizer, Checkpointer(tmp_path, comm, model, optimizer)

    def step(model, ddp, optimizer, checkpoints):
        optimizer.zero_grad()
        mg.backward_with_hooks((model(np.float32([[1, 2, 3]])) ** 2.0).mean(), ddp.hooks(num_samples=1))
        ddp.wait()
        optimizer.step()
        return {p.name: p.data.astype(np.float32) for p in model.parameters()}

    def program(comm):
        trained, plain = run(comm, zero, "float16"), run(comm, 0, "float16")
        for _ in range(2):
            step(*trained)
            step(*plain)
        trained[3].save(2)
        trained[3].wait()
        other = run(comm, 0, "float32")  # in another layout and precision: not what ops saw, but what was trained
        assert other[3].load().step == 2
        for p, q in zip(other[0].parameters(), plain[0].parameters(), strict=True):
            np.testing.assert_array_equal(p.data, q.data)
        again = run(comm, zero, "float16")
        assert again[3].load().step == 2
        np.testing.assert_equal(step(*again), step(*trained))

    ranks.run(program)
