"""ZeRO: the bits of a run without shards, the bytes that the formula says, and what is refused.

Bits are compared where sums have one order: between two ranks, and between threads.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import minigrad as mg
from distributed import DistributedDataParallel, LocalWorld, Mesh, SoloCommunicator, Work, clip_by_global_norm
from distributed.data_parallel.buckets.manager import GradientBucketManager
from distributed.data_parallel.zero.sharded import runs_to_gather
from distributed.data_parallel.zero.shards import average_to_shards, gather_shards, reduce_to_shards
from minigrad import nn, optim, rng
from minigrad.models import gpt
from minigrad.optim.muon import Muon, is_hidden_matrix
from minigrad.optim.param_groups import Group, Groups
from minigrad.precision import use_precision
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage

CONFIG = gpt.GPTConfig(vocab_size=17, context=6, num_layers=2, num_heads=2, width=8, dropout=0.1)
SAMPLES = {1: (9,), 2: (5, 4), 3: (4, 5, 6), 4: (4, 5, 4, 6)}  # of each replica
RULES = {
    "sgd": optim.SGD(0.3),
    "momentum": optim.SGD(lambda step: 0.3 / (1 + step), momentum=0.9, weight_decay=0.1),
    "adamw": optim.AdamW(0.01),
    "muon": Muon(0.02, others=optim.AdamW(0.01)),
    "groups": Groups(
        optim.AdamW(0.01),
        Group(lambda p: p.name.startswith("embed."), optim.AdamW(lambda step: 0.02 / (1 + step), weight_decay=0.0)),
        Group(lambda p: p.name.endswith(".bias"), optim.SGD(0.3, momentum=0.9)),
    ),
}
LEVELS = (1, 2)
deterministic = pytest.mark.ranks(2, 3)


def train(
    comm,
    zero,
    *,
    config=CONFIG,
    pp=1,
    schedule="1f1b",
    rule="adamw",
    max_norm=np.inf,  # None: no norm is asked for, which would wait for all buckets
    num_steps=2,
    accumulate=1,
    frozen=(),
    step_early=False,
):
    """Train a GPT; return losses, norms and the parameters, of this rank."""
    mesh = Mesh(comm, dp=comm.size // pp, pp=pp)
    stages = PipelineStage.of(gpt.layers(config), mesh.pp, SCHEDULES[schedule], dtype=np.float64)
    for p in stages.parameters():
        p.requires_grad = p.name not in frozen
    assert pp > 1 or set(frozen) <= {p.name for p in stages.parameters()}
    ddp = DistributedDataParallel(
        stages,
        mesh.dp,
        bucket_bytes=2000,
        zero=zero,
        whole=getattr(RULES[rule], "chooses", None),
        step_early=step_early,
        check_every=2,
    )
    optimizer = ddp.optimizer(RULES[rule])
    pipe = PipelineExecutor(stages, mesh.pp, SCHEDULES[schedule], num_microbatches=2 * pp, loss_fn=mg.cross_entropy)
    samples = [count * -(-pp // 2) for count in SAMPLES[mesh.dp.size]]  # one a micro-batch at least
    first = sum(samples[: mesh.dp.rank])
    losses, norms = [], []
    for step in range(num_steps):
        ids = np.random.default_rng(step).integers(0, config.vocab_size, (accumulate, sum(samples), 7))
        optimizer.zero_grad()
        for number, part in enumerate(ids):
            own = part[first : first + samples[mesh.dp.rank]]
            last = number == accumulate - 1
            hooks = ddp.hooks(num_samples=len(own)) if last or zero == 2 else None
            with rng.scope(seed=1, step=step, first_sample=first):
                losses.append(pipe.step(own[:, :-1], own[:, 1:], hooks=hooks))
            if hooks is not None:
                ddp.wait()
        if max_norm is not None:
            norms.append(ddp.clip_by_global_norm(max_norm))
        optimizer.step()
    return losses, norms, {p.name: p.data.copy() for p in stages.parameters()}


def has_one_order(ranks):
    return ranks.size == 2 or isinstance(ranks, LocalWorld)


def check_same(with_shards, without, *, exact=True):
    for (losses, norms, values), (plain_losses, plain_norms, plain_values) in zip(with_shards, without, strict=True):
        np.testing.assert_allclose(norms, plain_norms, rtol=1e-12)
        np.testing.assert_allclose(losses, plain_losses, rtol=0 if exact else 1e-10)
        for name, value in values.items():
            np.testing.assert_allclose(
                value, plain_values[name], rtol=0 if exact else 1e-9, atol=0 if exact else 1e-12, err_msg=name
            )


@deterministic
@pytest.mark.parametrize("rule", RULES)
def test_shards_train_to_the_same_bits(ranks, rule):
    without = ranks.run(lambda comm: train(comm, 0, rule=rule))
    for zero in LEVELS:
        check_same(ranks.run(lambda comm, zero=zero: train(comm, zero, rule=rule)), without, exact=has_one_order(ranks))


@deterministic
@pytest.mark.parametrize("rule", RULES)
def test_shards_that_step_early_train_to_the_same_bits(ranks, rule):
    how = {"rule": rule, "max_norm": None, "frozen": ("block0.up.weight", "head.norm.gain")}
    without = ranks.run(lambda comm: train(comm, 0, **how))
    for zero in LEVELS:
        early = ranks.run(lambda comm, zero=zero: train(comm, zero, step_early=True, **how))
        check_same(early, without, exact=has_one_order(ranks))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_shards_of_a_pipeline_train_to_the_same_bits(ranks, schedule):
    options = {"pp": 2, "schedule": schedule, "config": replace(CONFIG, num_layers=4)}
    without = ranks.run(lambda comm: train(comm, 0, **options))
    for zero in LEVELS:
        check_same(ranks.run(lambda comm, zero=zero: train(comm, zero, **options)), without)


@pytest.mark.soak
@pytest.mark.ranks(2, 3, 4, 6, 8, 12)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shards_train_to_the_same_bits_with_every_schedule(ranks, schedule):
    sizes = [pp for pp in (1, 2, 4) if ranks.size % pp == 0 and 1 < ranks.size // pp <= 4]
    rules = RULES if ranks.size <= 4 else ["adamw", "muon"]  # of an element, and of whole matrices
    for rule, pp in itertools.product(rules, sizes):
        num_blocks = max(CONFIG.num_layers, SCHEDULES[schedule].num_stages(pp))  # one a stage at least
        options = {"pp": pp, "schedule": schedule, "rule": rule, "config": replace(CONFIG, num_layers=num_blocks)}
        without = ranks.run(lambda comm, options=options: train(comm, 0, **options))
        for zero in LEVELS:
            check_same(ranks.run(lambda comm, zero=zero, options=options: train(comm, zero, **options)), without)


@pytest.mark.ranks(2, 4)
def test_the_norm_counts_each_parameter_once_and_clips_all_alike(ranks):
    pp = ranks.size // 2
    without = ranks.run(lambda comm: train(comm, 0, pp=pp, max_norm=0.3))
    assert min(without[0][1]) > 0.3
    for zero in LEVELS:
        shards = ranks.run(lambda comm, zero=zero: train(comm, zero, pp=pp, max_norm=0.3))
        check_same(shards, without, exact=False)
        assert len({tuple(norms) for _, norms, _ in shards}) == 1


@pytest.mark.ranks(3)
def test_frozen_parameters_stay_as_they_are(ranks):
    frozen = {"embed.token.weight", "block1.up.weight"}
    without = ranks.run(lambda comm: train(comm, 0, frozen=frozen))
    for zero in LEVELS:
        check_same(
            ranks.run(lambda comm, zero=zero: train(comm, zero, frozen=frozen)), without, exact=has_one_order(ranks)
        )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("step_early", [False, True])
def test_gradients_accumulate_whole_with_level_1_and_in_shards_with_level_2(ranks, step_early):
    """Each time in micro-batches, the first of which add up before the hooks are called."""
    how = {"accumulate": 3, "max_norm": None}
    without = ranks.run(lambda comm: train(comm, 0, **how))
    first, second = (
        ranks.run(lambda comm, zero=zero: train(comm, zero, **how, step_early=step_early)) for zero in LEVELS
    )
    check_same(first, without)
    check_same(second, without, exact=False)  # sums over ranks come first


def test_one_rank_alone_has_everything(ranks):
    if ranks.size == 1:
        check_same(ranks.run(lambda comm: train(comm, 2)), ranks.run(lambda comm: train(comm, 0)))


# What is allocated


def allocated(comm, zero, precision, *, num_steps=2):
    """Return the bytes of parameters, gradients and optimizer that this rank has after some steps, and n."""
    layers = gpt.layers(gpt.GPTConfig(vocab_size=64, context=8, num_layers=2, num_heads=2, width=64))
    param = nn.ParamGetter(0, np.float32)
    model = nn.Sequential(factory(param) for _, factory in layers)
    ddp = DistributedDataParallel(model, comm, bucket_bytes=40_000, zero=zero)
    if precision != "float32":
        use_precision(model.parameters(), precision)
    optimizer = ddp.optimizer(optim.AdamW(0.01))
    for step in range(num_steps):
        ids = np.random.default_rng(step).integers(0, 64, (2, 9))
        optimizer.zero_grad()
        loss = mg.cross_entropy(model(ids[:, :-1]), ids[:, 1:])
        mg.backward_with_hooks(loss, ddp.hooks(num_samples=2))
        del loss
        ddp.wait()
        optimizer.step()
    values = {p.name: p.data.astype(np.float32) for p in model.parameters()}  # all have arrived
    return num_bytes([model.parameters(), ddp.buckets, optimizer]), sum(p.size for p in model.parameters()), values


def num_bytes(roots):
    """Return the bytes of all NumPy memory that can be reached from some objects, each array once."""
    seen, owners, todo = set(), {}, list(roots)
    while todo:
        held = todo.pop()
        if id(held) in seen or isinstance(held, type):
            continue
        seen.add(id(held))
        if isinstance(held, np.ndarray):
            owner = held
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            owners[id(owner)] = owner.nbytes
        elif isinstance(held, dict):
            todo += [*held.keys(), *held.values()]
        elif isinstance(held, (list, tuple, set, frozenset)):
            todo += held
        elif type(held).__module__.startswith(("minigrad", "distributed.data_parallel")):
            todo += vars(held).values() if hasattr(held, "__dict__") else []
            slots = itertools.chain.from_iterable(getattr(kind, "__slots__", ()) for kind in type(held).__mro__)
            todo += [getattr(held, name) for name in slots if not name.startswith("__") and hasattr(held, name)]
    return sum(owners.values())


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_the_bytes_of_a_rank_are_those_of_the_formula(ranks, precision):
    shared_out = {"float32": (16, (8, 8), (4, 12)), "float16": (18, (6, 12), (2, 16))}[precision]
    for zero in (0, *LEVELS):
        for found, n, _ in ranks.run(lambda comm, zero=zero: allocated(comm, zero, precision)):
            whole, shards = (shared_out[0], 0) if zero == 0 else shared_out[zero]
            assert found == pytest.approx((whole + shards / ranks.size) * n, rel=0.02)


@pytest.mark.ranks(2)
def test_half_precision_trains_to_the_same_bits(ranks):
    def as_ops_see_them(zero):
        return [
            {name: value.astype(np.float16).tobytes() for name, value in values.items()}
            for _, _, values in ranks.run(lambda comm: allocated(comm, zero, "float16", num_steps=4))
        ]

    without = as_ops_see_them(0)
    for zero in LEVELS:
        assert as_ops_see_them(zero) == without


@pytest.mark.ranks(2)
def test_what_is_assigned_to_parameters_of_half_precision_is_trained_on(ranks):
    def program(comm):
        model = Toy(4)
        ddp = DistributedDataParallel(model, comm, zero=1)
        use_precision(model.parameters(), "float16")
        optimizer = ddp.optimizer(optim.SGD(1.0))
        model.w.data = np.full((4, 3), 2.0)
        model.step(ddp, np.ones(4), wait=True)
        optimizer.step()
        return model.w.data.copy()

    for values in ranks.run(program):
        np.testing.assert_array_equal(values, np.float16(2 - 1 / 3))


@pytest.mark.ranks(2, 3, 4)
def test_each_whole_matrix_has_one_owner_and_all_are_laden_alike(ranks):
    def program(comm):
        layers = gpt.layers(gpt.GPTConfig(vocab_size=64, context=8, num_layers=6, num_heads=2, width=32))
        param = nn.ParamGetter(0, np.float32)
        model = nn.Sequential(factory(param) for _, factory in layers)
        ddp = DistributedDataParallel(model, comm, bucket_bytes=40_000, zero=1, whole=is_hidden_matrix)
        shards = ddp.buckets.shards
        owned = [p for s in shards for p in s.params if is_hidden_matrix(p)]
        assert all(s.start <= p.start and p.stop <= s.stop for s in shards for p in s.params if is_hidden_matrix(p))
        with pytest.raises(ValueError, match=r"Muon needs whole matrices, but .* is cut: see whole= of the shards"):
            DistributedDataParallel(Toy(4), comm, zero=1).optimizer(Muon(0.1, chooses=lambda p: p.name == "w"))
        return (
            [p.name for p in owned],
            sum(s.stop - s.start for s in shards),
            len([*filter(is_hidden_matrix, ddp.params)]),
        )

    results = ranks.run(program)
    names = [name for owned, _, _ in results for name in owned]
    assert len(names) == len(set(names)) == results[0][2]
    loads = [load for _, load, _ in results]
    assert max(loads) < 1.15 * sum(loads) / len(loads)


# What is refused


class Toy(nn.Module):
    """`y = x @ w + b`."""

    def __init__(self, size):
        self.w = mg.Parameter(np.zeros((size, 3), np.float32), "w")
        self.b = mg.Parameter(np.zeros(3, np.float32), "b")

    def step(self, ddp, x, *, wait):
        mg.backward_with_hooks(
            mg.mean(mg.add(mg.matmul(x[None].astype(np.float32), self.w), self.b)), ddp.hooks(num_samples=1)
        )
        if wait:
            ddp.wait()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("zero", LEVELS)
def test_a_gradient_that_is_elsewhere_cannot_be_read_or_used(ranks, zero):
    def program(comm):
        model = Toy(4)
        ddp = DistributedDataParallel(model, comm, zero=zero)
        plain = optim.Optimizer(model.parameters(), optim.SGD(1.0))
        sharded = ddp.optimizer(optim.SGD(1.0))
        model.step(ddp, np.ones(4), wait=False)
        with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) with 'w': its grad is being reduced"):
            sharded.step()
        ddp.wait()
        for use in (
            lambda: model.w.grad,
            plain.step,
            lambda: optim.clip_by_global_norm(model.parameters(), 1.0),
        ):
            with pytest.raises(RuntimeError, match=r"'w': its grad is .* each rank has the sum of its own shard only"):
                use()
        sharded.step()
        sharded.zero_grad()
        assert model.w.grad is None
        with pytest.raises(RuntimeError, match="its grad is this rank's own, and replicas would drift apart"):
            sharded.step()

    ranks.run(program)


@pytest.mark.ranks(2)
def test_a_backward_that_nobody_reduced_is_not_left_out_in_silence(ranks):
    def program(comm):
        model = Toy(4)
        ddp = DistributedDataParallel(model, comm, zero=2)
        optimizer = ddp.optimizer(optim.SGD(3.0))
        model.step(ddp, np.ones(4), wait=True)
        mg.backward(mg.mean(mg.matmul(np.ones((1, 4), np.float32), model.w)))
        for use in (optimizer.step, lambda: ddp.clip_by_global_norm(1.0)):
            with pytest.raises(
                RuntimeError, match="'w': a backward without the hooks came after the last one with them"
            ):
                use()
        model.step(ddp, np.ones(4), wait=True)
        optimizer.step()
        return model.w.data.copy()

    for w in ranks.run(program):
        np.testing.assert_allclose(w, -3, rtol=1e-6)


@pytest.mark.ranks(2)
def test_a_gradient_that_is_all_here_can_be_read_with_level_1(ranks):
    def program(comm):
        model = Toy(5)  # in memory b, w: rank 0 has all of b, and a part of w, as rank 1
        ddp = DistributedDataParallel(model, comm, zero=1)
        model.step(ddp, np.full(5, 1.0 + comm.rank), wait=True)
        if comm.rank == 0:
            np.testing.assert_allclose(model.b.grad, 1 / 3, rtol=1e-6)

    ranks.run(program)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("zero", LEVELS)
def test_a_step_given_up_by_one_rank_leaves_nothing_behind(ranks, zero):
    def program(comm):
        model = Toy(4)
        ddp = DistributedDataParallel(model, comm, zero=zero)
        optimizer = ddp.optimizer(optim.SGD(3.0))
        hooks = ddp.hooks(num_samples=1)
        if comm.rank == 0:
            ddp.cancel()
        else:
            mg.backward_with_hooks(mg.mean(mg.matmul(np.ones((1, 4), np.float32), model.w)), hooks)
            with pytest.raises(RuntimeError, match="dropped on all ranks"):
                ddp.wait()
        model.step(ddp, np.ones(4), wait=True)
        optimizer.step()
        return model.w.data.copy(), model.b.data.copy()

    for w, b in ranks.run(program):
        np.testing.assert_allclose(w, -1, rtol=1e-6)
        np.testing.assert_allclose(b, -1, rtol=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("step_early", [False, True])
@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_that_are_reduced_a_second_time_are_dropped(ranks, zero, step_early):
    """A backward is refused for want of a zero_grad, and cancelled: that sent them again, and step took what came."""

    def program(comm):
        model = Toy(4)
        ddp = DistributedDataParallel(model, comm, zero=zero, step_early=step_early)
        optimizer = ddp.optimizer(optim.SGD(3.0))
        model.step(ddp, np.ones(4), wait=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"its grad is (already reduced|reduced, and each rank)"):
            model.step(ddp, np.ones(4), wait=True)
        ddp.cancel()
        with pytest.raises(RuntimeError, match="its grad is this rank's own"):
            optimizer.step()
        model.step(ddp, np.ones(4), wait=True)
        optimizer.step()
        return model.w.data.copy()

    for w in ranks.run(program):
        np.testing.assert_allclose(w, -2, rtol=1e-6)


@pytest.mark.ranks(2)
def test_levels_that_do_not_exist_or_differ_are_refused(ranks):
    def program(comm):
        with pytest.raises(ValueError, match="zero must be 0, 1 or 2, got 3"):
            DistributedDataParallel(Toy(4), comm, zero=3)
        with pytest.raises(ValueError, match="which no comm_hook can do"):
            DistributedDataParallel(Toy(4), comm, zero=1, comm_hook=lambda grad, comm: comm.allreduce(grad))
        with pytest.raises(ValueError, match=r"zero=0"):
            DistributedDataParallel(Toy(4), comm, zero=comm.rank)

    ranks.run(program)


@pytest.mark.ranks(2)
def test_stages_of_a_model_are_clipped_by_ddp_only(ranks):
    def program(comm):
        mesh = Mesh(comm, dp=2, pp=1)
        stages = PipelineStage.of(gpt.layers(CONFIG), mesh.pp, SCHEDULES["1f1b"])
        stages.eval()
        ddp = DistributedDataParallel(stages, mesh.dp, zero=1)
        pipe = PipelineExecutor(stages, mesh.pp, SCHEDULES["1f1b"], num_microbatches=1, loss_fn=mg.cross_entropy)
        pipe.step(np.zeros((1, 6), int), np.zeros((1, 6), int), hooks=ddp.hooks(num_samples=1))
        ddp.wait()
        with pytest.raises(RuntimeError, match=r"the norm of .* clip by ddp\.clip_by_global_norm"):
            clip_by_global_norm(stages, 1.0)

    ranks.run(program)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options", [{"zero": 1}, {"zero": 2}, {"step_early": True}, {"zero": 1, "step_early": True}], ids=str
)
def test_values_that_arrive_in_a_forward_count_as_changed_by_the_step_before_it(ranks, options):
    """Noted as they arrived, they made each backward look for a change in all that the forward had kept: 10% of a step.

    And what is frozen has not changed, though it lies in their bucket.
    """

    def program(comm):
        model = Toy(4)
        ddp = DistributedDataParallel(model, comm, **options)
        optimizer = ddp.optimizer(optim.SGD(1.0))
        model.b.requires_grad = False
        model.step(ddp, np.ones(4), wait=True)
        x = mg.Tensor(np.ones(3, np.float32), requires_grad=True)
        of_frozen, of_trained = mg.mean(mg.mul(x, model.b)), mg.mean(mg.matmul(model.w, x))
        optimizer.step()
        newest = model.w.flat.version.newest
        mg.mean(mg.matmul(np.ones((1, 4), np.float32), model.w))
        assert model.w.flat.version.newest == newest
        mg.backward(of_frozen)
        with pytest.raises(RuntimeError, match="changed in place since"):
            mg.backward(of_trained)

    ranks.run(program)


# What travels


def test_a_gather_puts_together_what_the_reduction_took_apart(ranks):
    def program(comm):
        for size in range(12):
            grad = np.arange(size) + 100.0 * comm.rank
            reduce_to_shards(grad, comm).wait()
            gather_shards([(grad, None)], comm).wait()
            expected = comm.size * np.arange(size) + 100.0 * sum(range(comm.size))
            np.testing.assert_array_equal(grad, expected)

    ranks.run(program)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("is_even", [True, False])
def test_replicas_of_equal_shares_have_their_gradients_averaged_on_the_way(ranks, is_even, monkeypatch):
    """Which NCCL does in one call."""
    sizes = []

    def logged(grad, comm):
        sizes.append(grad.size)
        return average_to_shards(grad, comm)

    monkeypatch.setattr("distributed.data_parallel.zero.sharded.average_to_shards", logged)

    def program(comm):
        model = Toy(5)  # 15 + 3 numbers, in equal shares of a bucket and a rest
        ddp = DistributedDataParallel(model, comm, zero=1)
        x = np.ones((1 if is_even else 1 + comm.rank, 5), np.float32)
        loss = mg.sum(mg.add(mg.matmul(x, model.w), model.b))
        mg.backward_with_hooks(loss, ddp.hooks(num_samples=len(x)))
        ddp.wait()
        return ddp.buckets.whole_grads()["b"]

    weighted = [n * n for n in range(1, ranks.size + 1)]  # each by its samples, of which its sum is
    expected = 1.0 if is_even else sum(weighted) / sum(range(1, ranks.size + 1))
    for b in ranks.run(program):
        np.testing.assert_allclose(b, expected, rtol=1e-6)
    assert set(sizes) == ({18} if is_even else set())


def test_small_buckets_of_one_flat_are_gathered_together(monkeypatch):
    monkeypatch.setattr("distributed.data_parallel.zero.sharded.GATHER_BYTES", 100)
    params = [mg.Parameter(np.zeros(n, t), f"{t.__name__} {n}") for t in (np.float32, np.float64) for n in range(4, 10)]
    buckets = GradientBucketManager(params, SoloCommunicator(), bucket_bytes=1).buckets
    runs = list(runs_to_gather(buckets))
    assert [bucket for run in runs for bucket in run] == buckets
    assert len({len(run) for run in runs}) > 1
    for run, following in itertools.pairwise(runs):
        (flat,) = {bucket.range.flat for bucket in run}
        nbytes = [bucket.range.data.nbytes for bucket in run]
        assert sum(nbytes[:-1]) < 100
        assert sum(nbytes) >= 100 or following[0].range.flat is not flat


@pytest.mark.ranks(2)
@pytest.mark.parametrize("step_early", [False, True])
def test_a_second_step_waits_for_the_values_of_the_first(ranks, step_early):
    """Others may still be reading this rank's shard of them."""

    def program(comm):
        model = Toy(4)
        ddp = DistributedDataParallel(model, comm, zero=1, step_early=step_early)
        optimizer = ddp.optimizer(optim.SGD(1.0))
        model.step(ddp, np.ones(4), wait=True)
        log, gather, update = [], ddp.buckets.gather, optimizer._update

        def gathered(parts):
            work = gather(parts)
            return LoggedWork(work, log)

        ddp.buckets.gather = gathered
        optimizer._update = lambda *args: (log.append("update"), update(*args))
        optimizer.step()
        optimizer.step()
        assert log == ["update", "wait", "update"]
        return model.w.data.copy()

    for w in ranks.run(program):
        np.testing.assert_allclose(w, -2 / 3, rtol=1e-6)


class LoggedWork(Work):
    """Work that notes when somebody waits for it."""

    def __init__(self, work, log):
        self.work, self.log = work, log

    def test(self):
        return self.work.test()

    def wait(self):
        self.log.append("wait")
        return self.work.wait()
