"""Trainers: both reduce to the same bits, at different times, and end where one process would."""

import numpy as np
import pytest
from test_ddp import BUCKET_BYTES, RECIPES, log_launches, logged_product, loss_of, samples_by_rank

import minigrad as mg
from distributed.trainer import BucketedTrainer, DistributedTrainer, TrainingConfig
from minigrad.lr_schedule import warmup_cosine
from minigrad.nn import Module
from minigrad.optim import AdamW, Optimizer, clip_by_global_norm

NUM_STEPS = 4
TRAINERS = [DistributedTrainer, BucketedTrainer]
CONFIG = TrainingConfig(
    learning_rate=warmup_cosine(1e-2, num_warmup_steps=2, num_steps=NUM_STEPS), weight_decay=0.1, max_grad_norm=0.5
)


def train(comm, kind, recipe):
    """Return the metrics of every step and the parameters at the end."""
    model = recipe.build(comm.rank)
    trainer = kind(model, comm, CONFIG, bucket_bytes=BUCKET_BYTES)
    assert trainer.num_buckets > 2
    metrics = []
    for step in range(NUM_STEPS):
        assert trainer.global_step == step
        counts = samples_by_rank(step, comm.size)
        first = sum(counts[: comm.rank])
        x, y = recipe.batch(step, sum(counts))
        mine = slice(first, first + counts[comm.rank])
        loss = loss_of(model, x[mine], y[mine], step, first)
        metrics.append(trainer.backward_and_step(loss, num_samples=counts[comm.rank]))
    return metrics, model.state_dict()


def train_alone(size, recipe):
    """Do in one process, without a trainer, what `size` ranks do."""
    model = recipe.build(0)
    optimizer = Optimizer(model.parameters(), AdamW(CONFIG.learning_rate, weight_decay=CONFIG.weight_decay))
    metrics = []
    for step in range(NUM_STEPS):
        x, y = recipe.batch(step, sum(samples_by_rank(step, size)))
        loss = loss_of(model, x, y, step)
        mg.backward(loss)
        norm = clip_by_global_norm(optimizer.params, CONFIG.max_grad_norm)
        metrics.append((step, loss.item(), norm, optimizer.lr))
        optimizer.step()
        optimizer.zero_grad()
    return metrics, model.state_dict()


@pytest.mark.parametrize("kind", TRAINERS)
def test_equals_one_process(ranks, kind):
    expected_metrics, expected = train_alone(ranks.size, RECIPES["mlp-adamw"])
    assert max(norm for _, _, norm, _ in expected_metrics) > CONFIG.max_grad_norm  # clipping is at work

    def program(comm):
        metrics, params = train(comm, kind, RECIPES["mlp-adamw"])
        found = [(m.step, m.loss, m.grad_norm, m.learning_rate) for m in metrics]
        np.testing.assert_allclose(found, expected_metrics, rtol=1e-10)
        for name, value in params.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-10, atol=1e-12, err_msg=name)
        return metrics

    results = ranks.run(program)
    assert all(metrics == results[0] for metrics in results)


def test_both_trainers_give_the_same_bits(ranks):
    def program(comm, kind):
        metrics, params = train(comm, kind, RECIPES["gpt-adamw"])
        return metrics, {name: value.tobytes() for name, value in params.items()}

    after, inside = (ranks.run(program, kind) for kind in TRAINERS)
    assert after == inside


class Chain(Module):
    """Two products that write their vjps into a log."""

    def __init__(self, log):
        self.w0, self.w1 = mg.Parameter(np.eye(3), "w0"), mg.Parameter(np.eye(3), "w1")
        self.products = [logged_product("w0", log), logged_product("w1", log)]

    def __call__(self, x):
        return self.products[1](self.products[0](x, self.w0), self.w1)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (DistributedTrainer, ["w1 into x", "w1 into w", "w0 into w", "launch w1", "launch w0", "launch no gradient"]),
        (BucketedTrainer, ["w1 into x", "w1 into w", "launch w1", "w0 into w", "launch w0", "launch no gradient"]),
    ],
)
def test_one_launches_after_the_backward_and_one_inside_it(ranks, kind, expected):
    def program(comm):
        log = []
        model = Chain(log)
        trainer = kind(model, comm, TrainingConfig(), bucket_bytes=1)
        log_launches(trainer.ddp, log)
        trainer.backward_and_step(model(np.ones((2, 3))).sum(), num_samples=2)
        return log

    assert ranks.run(program) == [expected] * ranks.size


def test_without_a_norm_nothing_is_clipped(ranks):
    def program(comm):
        model = Chain([])
        trainer = BucketedTrainer(model, comm, TrainingConfig(learning_rate=0.5, weight_decay=0.0))
        assert (trainer.communicator.rank, trainer.communicator.size) == (comm.rank, comm.size)
        metrics = trainer.backward_and_step(model(np.full((2, 3), 1e6)).sum(), num_samples=2)
        assert metrics.learning_rate == 0.5
        assert metrics.grad_norm == pytest.approx(2e6 * 18**0.5)
        np.testing.assert_allclose(model.w0.data, np.eye(3) - 0.5, rtol=1e-9)  # Adam's first step is the rate
        assert model.w0.grad is None

    ranks.run(program)
