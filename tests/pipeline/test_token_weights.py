"""Targets that do not count: the mean over those that do, in a pipeline, with replicas, and in its loss alone."""

import numpy as np
import pytest
from toy_pipeline import check_grads, connect, dense

import minigrad as mg
from distributed import DistributedDataParallel, Mesh
from minigrad.nn import ParamGetter, Sequential

IGNORED = -1
M = 3
LAYERS = [dense("fc0", 3, 6), dense("fc1", 6, 4), dense("fc2", 4, 4), dense("fc3", 4, 5)]


def token_loss(output, y):
    """Average over what counts; 0 where nothing does."""
    total = mg.cross_entropy(output, y, ignore_index=IGNORED, reduction="sum")
    return total * (1 / max(1, num_counted(y)))


def num_counted(y):
    return int((y != IGNORED).sum())


def batch_of(replica):
    """Return 5 rows of 4 tokens; each replica's micro-batches have other numbers of targets, one of them none."""
    generator = np.random.default_rng(replica)
    x, y = generator.standard_normal((5, 4, 3)), generator.integers(0, 5, (5, 4))
    y[0, : 1 + replica] = IGNORED
    y[4] = IGNORED
    return x, y


def in_one_process(num_replicas):
    """Return loss and gradients of all replicas' batches, taken as one."""
    param = ParamGetter(0, np.float64)
    model = Sequential([factory(param) for _, factory in LAYERS])
    x, y = (np.concatenate(parts) for parts in zip(*map(batch_of, range(num_replicas)), strict=True))
    loss = token_loss(model(x), y)
    mg.backward(loss)
    return loss.item(), {p.name: p.grad_view().copy() for p in model.parameters()}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble_h1"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_the_loss_and_its_gradient_are_the_means_over_what_counts(ranks, schedule, everywhere):
    loss, grads = in_one_process(1)
    x, y = batch_of(0)

    def program(comm):
        pipe = connect(comm, LAYERS, schedule=schedule, num_microbatches=M, loss_fn=token_loss)
        weights = pipe.weigh(y, num_counted) if everywhere or comm.rank == comm.size - 1 else None
        result = pipe.run(x, y, weights=weights)
        assert result.loss == pytest.approx(loss, rel=1e-12)
        assert result.weights == [7 / 15, 8 / 15, 0]
        check_grads(pipe, grads)
        assert pipe.evaluate(x, y, weights=weights) == pytest.approx(loss, rel=1e-12)
        assert pipe.evaluate(x, y) != pytest.approx(loss, rel=1e-3)

    ranks.run(program)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
def test_replicas_with_other_numbers_of_targets_weigh_by_them(ranks, schedule):
    loss, grads = in_one_process(2)

    def program(comm):
        mesh = Mesh(comm, dp=2, pp=comm.size // 2)
        pipe = connect(mesh.pp, LAYERS, schedule=schedule, num_microbatches=M, loss_fn=token_loss)
        ddp = DistributedDataParallel(pipe.stages, mesh.dp)
        x, y = batch_of(mesh.dp.rank)
        weights = pipe.weigh(y, num_counted)
        own = pipe.step(x, y, hooks=ddp.hooks(num_samples=len(x), weight=sum(weights)), weights=weights)
        ddp.wait()
        assert ddp.mean(own) == pytest.approx(loss, rel=1e-12)
        check_grads(pipe, grads)

    ranks.run(program)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("of_rank", "message"),
    [
        ({-1: [1, 2]}, "there must be one for each micro-batch, got 2 and 3"),
        ({-1: [1, -1, 2]}, r"at least 0 and finite, and one of them above 0, got \[1.0, -1.0, 2.0\]"),
        ({-1: [1, np.nan, 2]}, "at least 0 and finite"),
        ({-1: [0, 0, 0]}, "one of them above 0"),
        ({0: [1, 1, 1]}, "the rank of the last stage, .*, needs them, .*, but rank 0 gave others"),
        ({0: [1, 1, 1], -1: [1, 1, 2]}, "but rank 0 gave others"),
    ],
)
def test_weights_that_do_not_fit_are_refused_on_all_ranks(ranks, of_rank, message):
    x, y = batch_of(0)

    def program(comm):
        pipe = connect(comm, LAYERS, num_microbatches=M, loss_fn=token_loss)
        given = of_rank.get(-1 if comm.rank == comm.size - 1 else comm.rank)
        with pytest.raises(ValueError, match=message) as caught:
            pipe.step(x, y, weights=given)
        pipe.step(x, y)  # nothing was sent
        return str(caught.value)

    assert len(set(ranks.run(program))) == 1
