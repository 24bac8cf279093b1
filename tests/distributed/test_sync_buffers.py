"""What training changes beside the weights: statistics over the batch of all ranks, and running ones made equal."""

import numpy as np
import pytest

import minigrad as mg
from distributed import DistributedDataParallel
from distributed.data_parallel.batch_norm import SyncBatchNorm
from minigrad import nn
from minigrad.nn import BatchNorm, Buffer, Module, ParamGetter

IGNORED = -1


class Net(Module):
    """Channels, normalised, then classes."""

    def __init__(self, norm):
        param = ParamGetter(3, np.float64)
        self.first = nn.Linear(param.at("first"), 4, 3)
        self.norm = norm(param.at("norm"))
        self.last = nn.Linear(param.at("last"), 3, 5)

    def __call__(self, x):
        return self.last(self.norm(mg.tanh(self.first(x))))


def batch_of(rank):
    """Return rank + 2 samples: the ranks' means, and their numbers of targets that count, differ."""
    generator = np.random.default_rng(rank)
    x, y = generator.standard_normal((rank + 2, 4)) + rank, generator.integers(0, 5, rank + 2)
    y[0] = IGNORED if rank % 2 else y[0]
    return x, y


def plain(x, y, model, steps):
    optimizer = mg.optim.Optimizer(model.parameters(), mg.optim.SGD(0.1))
    for _ in range(steps):
        optimizer.zero_grad()
        loss = mg.cross_entropy(model(x), y, ignore_index=IGNORED)
        mg.backward(loss)
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("ignore", [False, True])
def test_a_step_with_sync_batch_norm_is_that_of_one_process_with_the_whole_batch(ranks, ignore):
    batches = [batch_of(rank) for rank in range(ranks.size)]
    if not ignore:
        batches = [(x, abs(y)) for x, y in batches]
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    model = Net(lambda param: BatchNorm(param, 3))
    loss = plain(x, y, model, 3)

    def program(comm):
        share = (lambda: ddp.share) if ignore else None
        replica = Net(lambda param: SyncBatchNorm(param, 3, comm, loss_weight=share))
        ddp = DistributedDataParallel(replica, comm)
        optimizer = mg.optim.Optimizer(replica.parameters(), mg.optim.SGD(0.1))
        x, y = batches[comm.rank]
        for _ in range(3):
            optimizer.zero_grad()
            hooks = ddp.hooks(num_samples=len(x), weight=int((y != IGNORED).sum()))
            own = mg.cross_entropy(replica(x), y, ignore_index=IGNORED)
            mg.backward_with_hooks(own, hooks)
            ddp.wait()
            optimizer.step()
        assert ddp.mean(own.item()) == pytest.approx(loss, rel=1e-12)
        for name, value in model.state_dict().items():  # running statistics too
            np.testing.assert_allclose(replica.state_dict()[name], value, rtol=1e-10, err_msg=name)
        return replica.norm.running_var.data

    by_rank = ranks.run(program)
    np.testing.assert_array_equal(by_rank, by_rank[:1] * len(by_rank))


def test_the_gradient_of_a_part_is_that_of_finite_differences():
    """Of this part's own loss and that of the other part, whose statistics move with it."""
    generator = np.random.default_rng(0)
    x, other = generator.standard_normal((4, 2)), generator.standard_normal((3, 2))
    gain, bias, g, g_other = (generator.standard_normal(shape) for shape in (2, 2, (4, 2), (3, 2)))
    weight, weight_other = 0.7, 0.3

    def loss_of(x):
        both = mg.ops.batch_norm(np.concatenate([x, other]), gain, bias).data
        return weight * (both[:4] * g).sum() + weight_other * (both[4:] * g_other).sum()

    t = g_other * gain
    pooled = np.concatenate([x, other])
    h = (other - pooled.mean(0)) / np.sqrt(pooled.var(0) + 1e-5)
    of_other = iter(
        [
            np.array([*other.mean(0), *((other - other.mean(0)) ** 2).sum(0), 3.0]),
            weight_other * np.concatenate([t.sum(0), (t * h).sum(0)]),
        ]
    )
    leaf = mg.Tensor(x, requires_grad=True)
    y = mg.ops.batch_norm(leaf, gain, bias, gather=lambda own: np.stack([own, next(of_other)]), weight=lambda: weight)
    mg.backward_with_grad(y, g)
    for place in np.ndindex(*x.shape):
        step = np.zeros_like(x)
        step[place] = 1e-6
        slope = (loss_of(x + step) - loss_of(x - step)) / 2e-6
        assert weight * leaf.grad[place] == pytest.approx(slope, abs=1e-8)


def test_evaluation_uses_the_running_statistics_and_moves_none():
    norm = BatchNorm(ParamGetter(0, np.float64), 2, momentum=1.0)
    x = np.random.default_rng(0).standard_normal((5, 2, 3)) * 3 + 1
    norm(x)
    norm.eval()
    before = norm.state_dict()
    y = norm(x[:1]).data
    flat = x.transpose(1, 0, 2).reshape(2, -1)
    wanted = (x[:1] - flat.mean(1)[:, None]) / np.sqrt(flat.var(1, ddof=1) + 1e-5)[:, None]
    np.testing.assert_allclose(y, wanted, rtol=1e-12)
    for name, value in norm.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("shape", [(1, 3), (4, 2)])
def test_a_batch_without_statistics_is_refused(shape):
    with pytest.raises(ValueError, match=r"batch_norm needs (at least 2 values|x of shape)|BatchNorm: x must be"):
        BatchNorm(ParamGetter(0), 3)(np.zeros(shape, np.float32))


class Counting(Module):
    """A weight, a running value, and a count."""

    def __init__(self):
        self.w = ParamGetter(0, np.float64)("w", (), nn.init.ones)
        self.mean, self.count = Buffer(np.zeros(2), "mean"), Buffer(0, "count")


@pytest.mark.parametrize(
    ("buffers", "mean", "count"),
    [
        ("own", lambda rank, size: rank + 1.0, lambda rank: rank),
        ("broadcast", lambda rank, size: 1.0, lambda rank: 0),
        (
            "mean",
            lambda rank, size: sum((r + 1) ** 2 for r in range(size)) / sum(r + 1 for r in range(size)),
            lambda r: 0,
        ),
    ],
)
def test_wait_makes_buffers_equal_as_asked(ranks, buffers, mean, count):
    def program(comm):
        model = Counting()
        ddp = DistributedDataParallel(model, comm, buffers=buffers)
        model.mean, model.count = np.full(2, comm.rank + 1.0), comm.rank
        mg.backward_with_hooks(model.w * 2, ddp.hooks(num_samples=comm.rank + 1))
        ddp.wait()
        np.testing.assert_allclose(model.mean.data, mean(comm.rank, comm.size), rtol=1e-15)
        assert model.count.data == count(comm.rank)

    ranks.run(program)


def test_what_is_no_way_to_treat_buffers_is_refused(ranks):
    def program(comm):
        with pytest.raises(ValueError, match="buffers must be one of own, broadcast, mean, got 'all'"):
            DistributedDataParallel(Counting(), comm, buffers="all")

    ranks.run(program)
