"""Ranks that run out of data: all take as many steps, and each mean is over the samples that there are."""

import numpy as np
import pytest

import minigrad as mg
from distributed import DistributedDataParallel, LocalWorld, Mesh, SoloCommunicator
from minigrad import nn
from minigrad.models import MLP
from minigrad.optim import SGD, clip_by_global_norm
from pipeline import SCHEDULES, PipelineStage

NUM_BATCHES = (3, 1, 0, 2)  # by rank


def batches_of(rank):
    """Return this rank's batches, of other sizes than those of other ranks."""
    generator = np.random.default_rng(rank)
    sizes = [(4, 6), (2, 6), (5, 6), (3, 6)][rank]
    return [tuple(generator.standard_normal((sizes[0] + i, n)) for n in (6, 2)) for i in range(NUM_BATCHES[rank])]


def in_one_process(num_ranks):
    """Return the parameters after as many steps, each over all samples that some rank has."""
    model = MLP([6, 5, 2], seed=0, dtype=np.float64)
    optimizer = mg.optim.Optimizer(model.parameters(), SGD(0.1, momentum=0.9))
    for step in range(max(NUM_BATCHES[:num_ranks])):
        parts = [batches_of(rank)[step] for rank in range(num_ranks) if step < NUM_BATCHES[rank]]
        x, y = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        optimizer.zero_grad()
        mg.backward(mg.mse(model(x), y))
        clip_by_global_norm(model.parameters(), 0.5)
        optimizer.step()
    return {p.name: p.data.copy() for p in model.parameters()}


@pytest.mark.parametrize(
    "options", [{}, {"zero": 1}, {"zero": 2}, {"step_early": True}, {"zero": 1, "step_early": True}], ids=str
)
def test_equals_one_process(ranks, options):
    wanted = in_one_process(ranks.size)

    def program(comm):
        ddp = DistributedDataParallel(MLP([6, 5, 2], seed=0, dtype=np.float64), comm, bucket_bytes=64, **options)
        optimizer = ddp.optimizer(SGD(0.1, momentum=0.9))
        num_steps = 0
        for batch in ddp.join(batches_of(comm.rank)):
            optimizer.zero_grad()
            if batch is None:
                ddp.reduce_no_samples()
                loss = 0.0
            else:
                x, y = batch
                loss = mg.mse(ddp.model(x), y)
                mg.backward_with_hooks(loss, ddp.hooks(num_samples=len(x)))
            ddp.wait()
            ddp.clip_by_global_norm(0.5)
            optimizer.step()
            assert ddp.mean(loss) > 0
            num_steps += 1
        return num_steps, {p.name: p.data.copy() for p in ddp.params}

    for num_steps, found in ranks.run(program):
        assert num_steps == max(NUM_BATCHES[: ranks.size])
        for name, values in wanted.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-12, atol=1e-15)


def test_weights_of_the_ranks_that_have_some(ranks):
    def program(comm):
        w = mg.Parameter(np.ones(2), "w")

        class Model(nn.Module):
            def __init__(self):
                self.w = w

        ddp = DistributedDataParallel(Model(), comm)
        if comm.rank == comm.size - 1 and comm.size > 1:
            ddp.reduce_no_samples()
        else:
            weight = comm.rank + 1.0
            mg.backward_with_hooks((w * weight).sum(), ddp.hooks(num_samples=1, weight=weight))
        ddp.wait()
        return w.grad.copy()

    weights = np.arange(1, max(2, ranks.size))
    for grad in ranks.run(program):
        np.testing.assert_allclose(grad, (weights**2).sum() / weights.sum(), rtol=1e-6)


def test_somebody_needs_samples(ranks):
    def program(comm):
        ddp = DistributedDataParallel(MLP([2, 2], seed=0), comm)
        with pytest.raises(ValueError, match=r"every rank calls reduce_no_samples\(\): some rank needs samples"):
            ddp.reduce_no_samples()

    ranks.run(program)


def test_gradients_that_would_be_lost_are_not():
    ddp = DistributedDataParallel(MLP([2, 2], seed=0), SoloCommunicator())
    mg.backward(ddp.model(np.ones((1, 2), np.float32)).sum())
    with pytest.raises(RuntimeError, match=r"with a gradient of .*: call optimizer\.zero_grad"):
        ddp.reduce_no_samples()


def test_a_pipeline_is_refused():
    def program(comm):
        layers = [(f"fc{i}", lambda param, i=i: nn.Linear(param.at(f"fc{i}"), 2, 2)) for i in range(2)]
        mesh = Mesh(comm, dp=1, pp=2)
        ddp = DistributedDataParallel(PipelineStage.of(layers, mesh.pp, SCHEDULES["gpipe"]), mesh.dp)
        with pytest.raises(ValueError, match="join is for replicas in one process each"):
            next(ddp.join([1]))

    LocalWorld(2).run(program)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("has_batches", [False, True])
def test_a_rank_that_leaves_a_step_out_is_named_on_all(ranks, has_batches):
    """Rank 0 forgets `reduce_no_samples`, or leaves a batch of its own out; the others are in a step meanwhile."""

    def program(comm):
        ddp = DistributedDataParallel(MLP([2, 2], seed=0), comm)

        def run():
            for batch in ddp.join([np.ones((1, 2), np.float32)] * (2 if comm.rank or has_batches else 0)):
                if comm.rank == 0:
                    continue
                mg.backward_with_hooks(ddp.model(batch).sum(), ddp.hooks(num_samples=1))
                ddp.wait()

        with pytest.raises(RuntimeError, match="left a step out: by rank they are at the next item, a step"):
            run()

    ranks.run(program)


def test_a_rank_of_which_no_sample_counts_weighs_nothing(ranks):
    def program(comm):
        w = mg.Parameter(np.ones(2, np.float32), "w")

        class Model(nn.Module):
            def __init__(self):
                self.w = w

        ddp = DistributedDataParallel(Model(), comm, sums="exact" if comm.size > 2 else "plain")
        weight = comm.rank if comm.size > 1 else 1
        loss = (w * (7.0 if weight == 0 else weight)).sum()
        mg.backward_with_hooks(loss, ddp.hooks(num_samples=3, weight=weight))
        ddp.wait()
        assert ddp.first_sample == 3 * comm.rank
        return w.grad.copy()

    weights = np.arange(ranks.size) if ranks.size > 1 else np.ones(1)
    for grad in ranks.run(program):
        np.testing.assert_allclose(grad, (weights**2).sum() / weights.sum(), rtol=1e-6)
