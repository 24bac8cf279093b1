"""Trainers over pipelines: what one process does without a trainer, to 1e-12, in every layout."""

import functools
import math
from itertools import pairwise

import numpy as np
import pytest

import minigrad as mg
from distributed import BucketedTrainer, Mesh, PipelineTrainer, SimpleTrainer, TrainingConfig
from distributed.data_parallel import trainer as trainer_module
from minigrad import optim
from minigrad.models import GPT, MLP, gpt
from minigrad.optim.muon import Muon
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage

SIZES = gpt.GPTConfig(vocab_size=13, context=5, num_layers=4, num_heads=2, width=8)
IGNORED = -1
NUM_STEPS = 2  # the second one meets the first one's momentum
RULES = {
    "momentum": optim.SGD(lambda step: 0.3 / (1 + step), momentum=0.9, weight_decay=0.1),
    "adamw": None,
    "muon": Muon(0.05, others=optim.AdamW(0.01)),
}
SAMPLES = {1: (7,), 2: (5, 4), 3: (4, 5, 4), 4: (4, 5, 4, 6)}  # of each replica
LAYOUTS = {  # by number of ranks: pp, schedule
    1: [(1, "1f1b")],
    2: [(1, "1f1b"), (2, "zero_bubble_h1")],
    3: [(1, "gpipe"), (3, "1f1b")],
    4: [(4, "1f1b"), (2, "zbv")],
}
RECIPES = [("adamw", 1, 0), ("momentum", 2, 0), ("adamw", 2, 1), ("momentum", 1, 2), ("muon", 2, 0), ("muon", 1, 1)]


def config_of(rule, accumulate=1):
    return TrainingConfig(0.02, 0.1, rule=RULES[rule], grad_accum_steps=accumulate, max_grad_norm=0.5)


def batch(step, number, num_samples):
    """Return x and y of all replicas; of some samples few targets count."""
    generator = np.random.default_rng([step, number])
    ids = generator.integers(0, SIZES.vocab_size, (num_samples, SIZES.context + 1))
    y = ids[:, 1:].copy()
    y[generator.random(y.shape) < np.linspace(0, 0.7, num_samples)[:, None]] = IGNORED
    y[:, 0] = ids[:, 1]
    return ids[:, :-1], y


def token_loss(logits, y):
    return mg.cross_entropy(logits, y, ignore_index=IGNORED)


def count(y):
    return float((y != IGNORED).sum())


@functools.cache
def train_alone(num_replicas, rule, accumulate):
    """Do in one process, without a trainer, what so many replicas do."""
    model = GPT(SIZES, dtype=np.float64)
    config = config_of(rule)
    optimizer = optim.Optimizer(model.parameters(), config.rule or optim.AdamW(0.02, weight_decay=0.1))
    metrics = []
    for step in range(NUM_STEPS):
        parts = [batch(step, number, sum(SAMPLES[num_replicas])) for number in range(accumulate)]
        x, y = (np.concatenate([part[i] for part in parts]) for i in range(2))
        loss = token_loss(model(x), y)
        mg.backward(loss)
        norm = optim.clip_by_global_norm(optimizer.params, config.max_grad_norm)
        metrics.append((step, loss.item(), norm, optimizer.lr))
        optimizer.step()
        optimizer.zero_grad()
    return metrics, model.state_dict()


def made(comm, pp, schedule, config, *, zero=0, loss_fn=token_loss):
    mesh = Mesh(comm, dp=comm.size // pp, pp=pp)
    stages = PipelineStage.of(gpt.layers(SIZES), mesh.pp, SCHEDULES[schedule], dtype=np.float64)
    pipe = PipelineExecutor(stages, mesh.pp, SCHEDULES[schedule], num_microbatches=4, loss_fn=loss_fn)
    whole = getattr(config.rule, "chooses", None)
    return PipelineTrainer(pipe, mesh.dp, config, bucket_bytes=2000, zero=zero, whole=whole), pipe, mesh


def own_part(mesh, array):
    ends = np.cumsum((0, *SAMPLES[mesh.dp.size]))
    start, stop = list(pairwise(ends))[mesh.dp.rank]
    return array[start:stop]


def train(comm, pp, schedule, rule, accumulate, zero):
    trainer, pipe, mesh = made(comm, pp, schedule, config_of(rule, accumulate), zero=zero)
    metrics = []
    for step in range(NUM_STEPS):
        for number in range(accumulate):
            x, y = (own_part(mesh, array) for array in batch(step, number, sum(SAMPLES[mesh.dp.size])))
            assert trainer.num_accumulated == number
            is_first = mesh.pp.rank == 0  # has the first stage, and with zbv the last one too; others know nothing
            is_last = mesh.pp.rank == (0 if schedule == "zbv" else mesh.pp.size - 1)
            found = trainer.step(
                x if is_first else None,
                y if is_last else None,
                weights=pipe.weigh(y, count) if is_last else None,
                num_tokens=x.size if is_last else 0,
            )
        assert trainer.global_step == step + 1
        metrics.append(found)
    return metrics, {p.name: p.data.copy() for p in pipe.stages.parameters()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_equals_one_process(ranks, recipe):
    """Every other recipe in a world's first layout, and the others in its second one."""
    rule, accumulate, zero = recipe
    layouts = LAYOUTS[ranks.size]
    pp, schedule = layouts[(RECIPES.index(recipe) + ranks.size) % len(layouts)]
    expected_metrics, expected = train_alone(ranks.size // pp, rule, accumulate)
    assert max(norm for _, _, norm, _ in expected_metrics) > 0.5  # clipping is at work
    results = ranks.run(train, pp, schedule, rule, accumulate, zero)
    for metrics, params in results:
        found = [(m.step, m.loss, m.grad_norm, m.learning_rate) for m in metrics]
        np.testing.assert_allclose(found, expected_metrics, rtol=1e-12)
        assert found == [(m.step, m.loss, m.grad_norm, m.learning_rate) for m in results[0][0]]
        for name, value in params.items():
            # AdamW divides a tiny gradient by its size, and with it the rounding of that gradient.
            atol = 1e-13 if rule == "momentum" else 1e-11
            np.testing.assert_allclose(value, expected[name], rtol=1e-12, atol=atol, err_msg=name)


def test_the_mean_over_samples_where_no_weights_are_given(ranks):
    def program(comm, pp, schedule):
        trainer, _, mesh = made(comm, pp, schedule, TrainingConfig(0.1), loss_fn=mg.cross_entropy)
        x, y = batch(0, 0, sum(SAMPLES[mesh.dp.size]))
        y = abs(y)
        metrics = trainer.step(own_part(mesh, x), own_part(mesh, y))
        return metrics.loss, metrics.grad_norm

    for pp, schedule in LAYOUTS[ranks.size]:
        model = GPT(SIZES, dtype=np.float64)
        x, y = batch(0, 0, sum(SAMPLES[ranks.size // pp]))
        loss = mg.cross_entropy(model(x), abs(y))
        mg.backward(loss)
        wanted = (loss.item(), optim.grad_norm(model.parameters()))
        for found in ranks.run(program, pp, schedule):
            np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_a_group_of_batches_that_is_not_full_makes_a_step(ranks):
    def program(comm, pp, schedule, accumulate):
        trainer, pipe, mesh = made(comm, pp, schedule, TrainingConfig(0.1, grad_accum_steps=accumulate))
        for number in range(2):
            x, y = (own_part(mesh, array) for array in batch(0, number, sum(SAMPLES[mesh.dp.size])))
            metrics = trainer.step(x, y, weights=pipe.weigh(y, count))
        if accumulate == 3:
            assert (metrics, trainer.num_accumulated) == (None, 2)
            metrics = trainer.end_step()
        assert (trainer.end_step(), trainer.global_step) == (None, 1)
        return metrics.loss, metrics.grad_norm

    for pp, schedule in LAYOUTS[ranks.size][-1:]:
        for short, full in zip(*(ranks.run(program, pp, schedule, number) for number in (3, 2)), strict=True):
            np.testing.assert_allclose(short, full, rtol=1e-12)


def test_a_step_that_is_not_finite_in_one_replica_is_skipped_on_all_ranks(ranks):
    def program(comm, pp, schedule):
        factor = [1.0]
        trainer, pipe, mesh = made(
            comm,
            pp,
            schedule,
            TrainingConfig(0.1, max_grad_norm=1.0, max_skipped_in_a_row=1),
            loss_fn=lambda logits, y: token_loss(logits, y) * factor[0],
        )
        skipped = []
        for step, value in enumerate((1.0, np.inf, 1.0, np.nan, np.nan)):
            factor[0] = value if mesh.dp.rank == mesh.dp.size - 1 else 1.0
            x, y = (own_part(mesh, array) for array in batch(step, 0, sum(SAMPLES[mesh.dp.size])))
            before = [p.data.copy() for p in pipe.stages.parameters()]
            if step == 4:
                with pytest.raises(FloatingPointError, match="no more than 1 step in a row are skipped"):
                    trainer.step(x, y)
                continue
            skipped.append(trainer.step(x, y).num_skipped)
            same = all((p.data == old).all() for p, old in zip(pipe.stages.parameters(), before, strict=True))
            assert same == (value != 1.0)
        return skipped, trainer.optimizer.num_steps

    with np.errstate(invalid="ignore", over="ignore"):
        for pp, schedule in LAYOUTS[ranks.size][-1:]:
            assert ranks.run(program, pp, schedule) == [([0, 1, 1, 2], 2)] * ranks.size


def test_speed_is_that_of_all_replicas(ranks, monkeypatch):
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: 0.0)  # no time passes but in the trainer's past

    def program(comm, pp, schedule):
        trainer, _, mesh = made(comm, pp, schedule, TrainingConfig())
        trainer._last_end = -0.5
        x, y = (own_part(mesh, array) for array in batch(0, 0, sum(SAMPLES[mesh.dp.size])))
        is_first = mesh.pp.rank == 0
        return trainer.step(x, y, num_tokens=100 * (mesh.dp.rank + 1) if is_first else 0).tokens_per_second

    for pp, schedule in LAYOUTS[ranks.size]:
        dp = ranks.size // pp
        assert ranks.run(program, pp, schedule) == [100 * sum(range(1, dp + 1)) / 0.5] * ranks.size


@pytest.mark.ranks(2, 4)
def test_ranks_of_a_pipeline_that_know_no_or_another_batch_are_refused_together(ranks):
    def program(comm):
        trainer, _, mesh = made(comm, 2, "1f1b", TrainingConfig())
        x, y = (own_part(mesh, array) for array in batch(0, 0, sum(SAMPLES[mesh.dp.size])))
        is_first = mesh.pp.rank == 0
        with pytest.raises(ValueError, match=r"must have those of one batch, got samples \[-1, -1\]"):
            trainer.step(None, None)
        with pytest.raises(ValueError, match=r"must have those of one batch, got samples \[\d, 3\]"):
            trainer.step(x if is_first else None, None if is_first else y[:3])
        with pytest.raises(ValueError, match=r"\[rank 1\] the weights of a batch must sum to more than 0, got 0"):
            trainer.step(x, y, weights=None if is_first else [0, 0])
        with pytest.raises(ValueError, match=r"\[rank 0\] x and y must have as many samples, got \d and 2"):
            trainer.step(x, y[:2])
        assert trainer.num_accumulated == 0
        assert math.isfinite(trainer.step(x, y).loss)

    ranks.run(program)


# Gradients that came from elsewhere.


def gradients_of(model, x, y):
    mg.backward(mg.mse(model(x), y))
    found = {p.name: p.grad.copy() for p in model.parameters()}
    for p in model.parameters():
        p.grad = None
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_step_from_gradients_of_elsewhere_is_that_of_the_losses(ranks, accumulate, zero):
    def program(comm):
        config = TrainingConfig(0.05, grad_accum_steps=accumulate, max_grad_norm=0.5)
        models = [MLP([4, 6, 3], seed=0, dtype=np.float64) for _ in range(2)]
        trainers = [BucketedTrainer(model, comm, config, bucket_bytes=100, zero=zero) for model in models]
        for step in range(2):
            for number in range(accumulate):
                generator = np.random.default_rng([comm.rank, step, number])
                n = 2 + comm.rank + number
                x, y = generator.standard_normal((n, 4)), generator.standard_normal((n, 3))
                elsewhere = MLP([4, 6, 3], seed=0, dtype=np.float64)
                elsewhere.load_state_dict(models[1].state_dict())
                value = mg.mse(elsewhere(x), y).item()
                one = trainers[0].backward_and_step(mg.mse(models[0](x), y), num_samples=n)
                gradients = gradients_of(elsewhere, x, y)
                two = trainers[1].step_from_gradients(gradients, loss=value, num_samples=n)
            assert (one.loss, one.grad_norm) == pytest.approx((two.loss, two.grad_norm), rel=1e-12)
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            np.testing.assert_allclose(p.data, q.data, rtol=1e-12)

    ranks.run(program)


def test_gradients_of_nothing_and_of_another_shape_are_refused():
    model = MLP([2, 3, 1], dtype=np.float64)
    trainer = SimpleTrainer(model, TrainingConfig(grad_accum_steps=2))
    name = model.parameters()[0].name
    with pytest.raises(ValueError, match="there is no parameter 'nowhere' to take a gradient for"):
        trainer.step_from_gradients({"nowhere": np.zeros(2)}, loss=1.0)
    with pytest.raises(ValueError, match=rf"the gradient of '{name}' must be \(2, 3\), got \(3,\)"):
        trainer.step_from_gradients({name: np.zeros(3)}, loss=1.0)
    assert trainer.num_accumulated == 0
    assert not any(p.has_grad for p in model.parameters())


@pytest.mark.ranks(2, 4)
def test_a_pipeline_steps_from_gradients_of_elsewhere(ranks):
    def program(comm):
        trainer, _, mesh = made(comm, 2, "1f1b", config_of("adamw"))
        model = GPT(SIZES, dtype=np.float64)
        x, y = (own_part(mesh, array) for array in batch(0, 0, sum(SAMPLES[mesh.dp.size])))
        loss = token_loss(model(x), y)
        mg.backward(loss)
        own = {p.name: next(q for q in model.parameters() if q.name == p.name).grad for p in trainer.ddp.params}
        metrics = trainer.step_from_gradients(own, loss=loss.item(), num_samples=len(x), weight=count(y))
        return metrics.loss, metrics.grad_norm

    (_, loss, norm, _), *_ = train_alone(ranks.size // 2, "adamw", 1)[0]
    for found in ranks.run(program):
        np.testing.assert_allclose(found, (loss, norm), rtol=1e-12)
