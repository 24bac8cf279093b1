"""Trainers: both reduce to the same bits, at different times, and end where one process would."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from test_ddp import BUCKET_BYTES, RECIPES, log_launches, logged_product, loss_of, samples_by_rank

import minigrad as mg
from distributed import SoloCommunicator
from distributed.data_parallel import trainer as trainer_module
from distributed.data_parallel.loss_trainers import BucketedTrainer, DistributedTrainer, SimpleTrainer
from distributed.data_parallel.trainer import TrainingConfig
from minigrad.lr_schedule import warmup_cosine
from minigrad.models import MLP
from minigrad.nn import Module
from minigrad.optim import SGD, AdamW, Optimizer, clip_by_global_norm

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
        return found  # without the times

    results = ranks.run(program)
    assert all(metrics == results[0] for metrics in results)


def test_both_trainers_give_the_same_bits(ranks):
    def program(comm, kind):
        metrics, params = train(comm, kind, RECIPES["gpt-adamw"])
        numbers = [(m.step, m.loss, m.grad_norm, m.learning_rate) for m in metrics]  # without the times
        return numbers, {name: value.tobytes() for name, value in params.items()}

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


def test_accumulated_losses_count_as_one_batch(ranks):
    recipe = RECIPES["mlp-adamw"]

    def program(comm):
        def train(parts):
            model = recipe.build(0)
            model.eval()  # its dropout would be drawn for other samples
            config = replace(CONFIG, grad_accum_steps=parts)
            trainer = BucketedTrainer(model, comm, config, bucket_bytes=BUCKET_BYTES)
            for step in range(NUM_STEPS):
                x, y = recipe.batch(step, 4 * comm.size)
                own = slice(4 * comm.rank, 4 * comm.rank + 4)
                results = []
                for x_part, y_part in zip(np.split(x[own], parts), np.split(y[own], parts), strict=True):
                    loss = loss_of(model, x_part, y_part, step)
                    results.append(trainer.backward_and_step(loss, num_samples=len(x_part)))
                assert results[:-1] == [None] * (parts - 1)
                assert trainer.global_step == step + 1
            return results[-1], model.state_dict()

        (whole, expected), (parts, found) = train(1), train(4)
        assert parts.loss == pytest.approx(whole.loss, rel=1e-10)
        assert parts.grad_norm == pytest.approx(whole.grad_norm, rel=1e-8)
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-8, atol=1e-12)

    ranks.run(program)


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_step_that_is_not_finite_is_skipped_on_all_ranks(ranks, kind):
    def program(comm):
        model = MLP([2, 3, 1], dtype=np.float64)
        trainer = kind(model, comm, TrainingConfig())
        before = model.state_dict()
        x = np.full((2, 2), np.nan if comm.rank == comm.size - 1 else 1.0)  # one rank alone has a bad sample
        metrics = trainer.backward_and_step(mg.mean(model(x)))
        assert np.isnan(metrics.grad_norm)
        assert (trainer.global_step, trainer.optimizer.num_steps) == (1, 0)
        for name, values in model.state_dict().items():
            np.testing.assert_array_equal(values, before[name])
        metrics = trainer.backward_and_step(mg.mean(model(np.ones((2, 2)))))
        assert np.isfinite(metrics.grad_norm)
        assert (metrics.step, trainer.optimizer.num_steps) == (1, 1)

    ranks.run(program)


def test_tokens_and_exposed_time_are_counted(ranks):
    def program(comm):
        model = MLP([2, 3, 1])
        trainer = BucketedTrainer(model, comm, TrainingConfig())
        time.sleep(0.1)
        metrics = trainer.backward_and_step(mg.mean(model(np.ones((2, 2), np.float32))), num_tokens=5)
        assert 0 < metrics.tokens_per_second < 5 * comm.size / 0.1
        assert 0 <= metrics.exposed_comm_seconds < 30
        assert trainer.communicator.size == comm.size

    ranks.run(program)


def test_broadcast_params_repeats_rank_0(ranks):
    def program(comm):
        model = MLP([2, 3, 1])
        trainer = DistributedTrainer(model, comm, TrainingConfig())
        for p in model.parameters():
            p.data = np.full(p.shape, float(comm.rank))
        trainer.broadcast_params()
        assert all((p.data == 0).all() for p in model.parameters())

    ranks.run(program)


def test_one_process_needs_no_communicator():
    models = [MLP([2, 3, 1], dtype=np.float64) for _ in range(2)]
    trainers = [SimpleTrainer(models[0], CONFIG), BucketedTrainer(models[1], SoloCommunicator(), CONFIG)]
    for _ in range(3):
        losses = [mg.mean(model(np.ones((2, 2)))) for model in models]
        one, two = (trainer.backward_and_step(loss) for trainer, loss in zip(trainers, losses, strict=True))
        assert (one.loss, one.grad_norm) == (two.loss, two.grad_norm)
    for name, values in models[0].state_dict().items():
        np.testing.assert_array_equal(models[1].state_dict()[name], values)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"grad_accum_steps": 0}, "grad_accum_steps must be at least 1, got 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive, got 0.0"),
        ({"max_grad_norm": math.nan}, "max_grad_norm must be positive, got nan"),
    ],
)
def test_wrong_configurations_are_refused(wrong, rule):
    with pytest.raises(ValueError, match=rule):
        TrainingConfig(**wrong)


class Line(Module):
    """w x, whose gradient is the mean of x."""

    def __init__(self):
        self.w = mg.Parameter(1.0, "w")

    def __call__(self, x):
        return (self.w * np.asarray(x, float)).mean()


def steps_of(trainer, groups, num_parts):
    """Feed groups of micro-batches; return loss and gradient norm of each step."""
    found = []
    for group in groups:
        for part in group:
            metrics = trainer.backward_and_step(trainer.ddp.model(part), num_samples=len(part))
            if metrics is not None:
                found.append(metrics)
        if len(group) < num_parts:
            assert trainer.num_accumulated == len(group)
            found.append(trainer.end_step())
        assert trainer.num_accumulated == 0
    return [(m.step, m.loss, m.grad_norm) for m in found]


UNEVEN = [
    [[[1.0, 2, 3], [10.0]]],
    [[[1.0], [2.0, 3]], [[10.0], [10.0]]],
    [[[1.0], [2.0, 3]], [[10.0], [10.0]], [[4.0, 1], [2.0, 2, 2, 2]]],
]


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.ranks(2, 3)
def test_accumulated_losses_weigh_by_their_samples(ranks, kind):
    by_rank = UNEVEN[ranks.size - 1]
    means = [np.mean([x for rank in by_rank for part in rank for x in part]), 7.0]

    def program(comm):
        trainer = kind(Line(), comm, TrainingConfig(1e-9, grad_accum_steps=2))
        return steps_of(trainer, [by_rank[comm.rank], [[7.0], [7.0]]], 2)

    for found in ranks.run(program):
        np.testing.assert_allclose(found, [(step, mean, mean) for step, mean in enumerate(means)], rtol=1e-6)


@pytest.mark.parametrize("kind", [SimpleTrainer, *TRAINERS])
def test_in_one_process_they_weigh_so_too_and_the_last_group_may_be_short(kind):
    comm = () if kind is SimpleTrainer else (SoloCommunicator(),)
    trainer = kind(Line(), *comm, TrainingConfig(1e-9, grad_accum_steps=2))
    assert trainer.end_step() is None
    found = steps_of(trainer, [UNEVEN[0][0], [[3.0], [5.0]], [[2.0, 6.0, 4.0]]], 2)
    np.testing.assert_allclose(found, [(0, 4, 4), (1, 4, 4), (2, 4, 4)], rtol=1e-6)
    assert (trainer.end_step(), trainer.global_step) == (None, 3)


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.ranks(2, 3)
def test_a_short_group_meets_the_last_loss_of_a_full_one(ranks, kind):
    def program(comm):
        trainer = kind(Line(), comm, TrainingConfig(1e-9, grad_accum_steps=2))
        parts = [[1.0, 2, 3], [10.0]] if comm.rank == 0 else [[4.0, 4.0]]
        return [*steps_of(trainer, [parts], 2), trainer.end_step()]

    mean = (16 + 8 * (ranks.size - 1)) / (4 + 2 * (ranks.size - 1))
    for (step, loss, norm), nothing in ranks.run(program):
        assert (step, loss, norm, nothing) == (0, pytest.approx(mean), pytest.approx(mean), None)


@pytest.mark.ranks(2, 3)
def test_a_rank_with_nothing_in_the_last_group_is_an_error_on_all(ranks):
    def program(comm):
        trainer = BucketedTrainer(Line(), comm, TrainingConfig(grad_accum_steps=2))
        if comm.rank > 0:
            trainer.backward_and_step(trainer.ddp.model([1.0, 2.0]), num_samples=2)
        with pytest.raises(ValueError, match=r"every rank needs num_samples of at least 1, got \[0, 2"):
            trainer.end_step()
        assert trainer.num_accumulated == 0

    ranks.run(program)


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_on_one_rank_is_skipped_and_counted_on_all(ranks, kind, bad, where):
    def program(comm):
        trainer = kind(Line(), comm, TrainingConfig(0.1, max_grad_norm=1.0, max_skipped_in_a_row=2))
        w = trainer.ddp.model.w

        def step(value):
            mine = value if comm.rank == comm.size - 1 else 1.0

            @mg.op
            def times(x):  # in the backward only: the loss stays finite
                return x.copy(), (lambda g: g * mine,)

            return trainer.backward_and_step(w.sum() + mine if where == "loss" else times(w).sum())

        skipped = []
        for value in (1.0, bad, bad, 2.0, bad):
            before = w.data.copy()
            skipped.append(step(value).num_skipped)
            assert (w.data == before) == (value is bad)
            assert np.isfinite(w.data)
        assert skipped == [0, 1, 2, 2, 3]
        step(bad)
        with pytest.raises(FloatingPointError, match="no more than 2 steps in a row are skipped"):
            step(bad)
        assert (trainer.optimizer.num_steps, np.isfinite(w.data)) == (2, True)

    with np.errstate(invalid="ignore"):
        ranks.run(program)


@pytest.mark.parametrize("kind", TRAINERS)
def test_speed_is_that_of_all_ranks(ranks, kind, monkeypatch):
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: 0.0)  # no time passes but in the trainer's past

    def program(comm):
        trainer = kind(Line(), comm, TrainingConfig(grad_accum_steps=2))
        speeds = []
        for _ in range(2):
            trainer._last_end = -0.5
            for part in ([1.0], [2.0]):
                metrics = trainer.backward_and_step(trainer.ddp.model(part), num_tokens=10 * (comm.rank + 1))
            speeds.append(metrics.tokens_per_second)
            assert trainer._last_end == 0.0  # the next step's time begins where this one's ends
        return speeds

    speed = 2 * 10 * sum(range(1, ranks.size + 1)) / 0.5
    assert ranks.run(program) == [[speed, speed]] * ranks.size


@pytest.mark.parametrize("option", [{"step_early": True}, {"sums": "exact"}, {"bucket_byte": 100}])
def test_what_only_ddp_may_be_told_is_refused(option):
    """With exact sums, say, losses that add up to one step would weigh wrongly."""
    (name,) = option
    with pytest.raises(TypeError, match=f"^BucketedTrainer takes the options bucket_bytes, .*, got {name}$"):
        BucketedTrainer(Line(), SoloCommunicator(), CONFIG, **option)


@pytest.mark.parametrize("num_samples", [0, -3])
def test_a_loss_of_no_samples_is_refused_before_any_work(num_samples):
    trainer = SimpleTrainer(Line(), TrainingConfig())
    with pytest.raises(ValueError, match=f"num_samples must be at least 1, got {num_samples}"):
        trainer.backward_and_step(trainer.ddp.model([1.0]), num_samples=num_samples)
    assert trainer.ddp.model.w.grad is None


IGNORED = -1


def token_batches(size):
    """Return per rank two micro-batches of ids and targets, of which different numbers count."""
    generator = np.random.default_rng(3)
    batches = []
    for rank in range(size):
        parts = []
        for part in range(2):
            y = generator.integers(0, 5, (2 + part, 4))
            y.reshape(-1)[: 1 + 3 * part + rank] = IGNORED
            parts.append((generator.standard_normal((2 + part, 4, 3)), y))
        batches.append(parts)
    return batches


def token_model():
    return MLP([3, 8, 5], seed=0, dtype=np.float64)


def token_loss(model, x, y):
    return mg.cross_entropy(model(x), y, ignore_index=IGNORED)


def in_one_process(batches):
    """Return the loss over all tokens at once, and a model with its gradients."""
    x, y = (np.concatenate([part[i] for parts in batches for part in parts]) for i in range(2))
    model = token_model()
    loss = token_loss(model, x, y)
    mg.backward(loss)
    return loss, model


@pytest.mark.parametrize("kind", TRAINERS)
def test_the_mean_over_tokens_that_count_is_that_of_one_process(ranks, kind):
    batches = token_batches(ranks.size)
    loss, model = in_one_process(batches)

    def program(comm):
        replica = token_model()
        trainer = kind(replica, comm, TrainingConfig(grad_accum_steps=2, max_grad_norm=1e9))
        before = replica.parameters()[0].data.copy()
        for x, y in batches[comm.rank]:
            weight = int((y != IGNORED).sum())
            metrics = trainer.backward_and_step(token_loss(replica, x, y), num_samples=len(x), weight=weight)
        assert metrics.loss == pytest.approx(loss.item(), rel=1e-12)
        assert metrics.grad_norm == pytest.approx(clip_by_global_norm(model.parameters(), 1e9), rel=1e-12)
        assert trainer.ddp.first_sample == 5 * comm.rank
        assert (replica.parameters()[0].data != before).any()

    ranks.run(program)


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("empty", [0, 1])
def test_a_loss_in_which_nothing_counts_weighs_nothing(ranks, kind, empty):
    batches = token_batches(ranks.size)
    for parts in batches[-1:]:  # the last rank's, whose loss of `empty` is over nothing; with one rank its only one
        parts[empty][1][:] = IGNORED
    loss, model = in_one_process(batches)

    def program(comm):
        replica = token_model()
        trainer = kind(replica, comm, TrainingConfig(rule=SGD(0.0), grad_accum_steps=2))
        for x, y in batches[comm.rank]:
            weight = int((y != IGNORED).sum())
            own = mg.cross_entropy(replica(x), y, ignore_index=IGNORED, reduction="sum") / max(1, weight)
            metrics = trainer.backward_and_step(own, num_samples=len(x), weight=weight)
        assert metrics.loss == pytest.approx(loss.item(), rel=1e-12)
        assert metrics.grad_norm == pytest.approx(clip_by_global_norm(model.parameters(), np.inf), rel=1e-12)

    ranks.run(program)


def test_a_step_in_which_nothing_counts_anywhere_is_refused_before_any_work():
    trainer = SimpleTrainer(Line(), TrainingConfig())
    with pytest.raises(ValueError, match=r"one of them above 0, .* got \[0\.0\] by rank"):
        trainer.backward_and_step(trainer.ddp.model([1.0]), weight=0)
    assert trainer.ddp.model.w.grad is None


@pytest.mark.parametrize("weight", [-1.0, np.inf, np.nan])
def test_a_weight_that_cannot_be_one_is_refused_before_any_work(weight):
    trainer = SimpleTrainer(Line(), TrainingConfig())
    with pytest.raises(ValueError, match=f"weight must be at least 0 and finite, got {weight}"):
        trainer.backward_and_step(trainer.ddp.model([1.0]), weight=weight)
    assert trainer.ddp.model.w.grad is None
