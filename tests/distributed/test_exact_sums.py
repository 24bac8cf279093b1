"""Exact sums: one SHA-256 of the weights for every layout that trains on the same micro-batches."""

import functools
import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest

import minigrad as mg
from distributed import DistributedDataParallel, LocalWorld, Mesh, SoloCommunicator, clip_by_global_norm
from distributed.clipping import PartNorm, global_norm
from distributed.comm.communicator import Communicator
from distributed.data_parallel.buckets.exact import weights_sha256
from minigrad import rng
from minigrad.flat import FlatBuffer
from minigrad.models import gpt
from minigrad.optim import SGD, AdamW
from minigrad.precision import use_precision
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage

PARTS = 8  # micro-batches of a step, over all replicas
CONFIG = gpt.GPTConfig(vocab_size=17, context=8, num_layers=4, num_heads=2, width=16, dropout=0.1)


def train(
    comm,
    dp,
    pp,
    schedule,
    num_steps=2,
    *,
    sums="exact",
    num_samples=2 * PARTS,
    max_norm=0.5,
    zero=0,
    precision="float32",
):
    """Train a GPT; return what its weights hash to, the norms and the losses."""
    mesh = Mesh(comm, dp=dp, pp=pp)
    order = SCHEDULES[schedule]
    stages = PipelineStage.of(gpt.layers(CONFIG), mesh.pp, order, seed=1, dtype=np.float32)
    pipe = PipelineExecutor(stages, mesh.pp, order, num_microbatches=PARTS // dp, loss_fn=mg.cross_entropy)
    ddp = DistributedDataParallel(stages, mesh.dp, bucket_bytes=4096, sums=sums, zero=zero)
    use_precision(stages.parameters(), precision)
    optimizer = ddp.optimizer(AdamW(lr=0.01))
    own = num_samples // dp
    seen = []
    for step in range(num_steps):
        ids = np.random.default_rng(step).integers(0, CONFIG.vocab_size, (num_samples, CONFIG.context + 1))
        batch = ids[mesh.dp.rank * own : (mesh.dp.rank + 1) * own]
        optimizer.zero_grad()
        hooks = ddp.hooks(num_samples=own)
        with rng.scope(seed=3, step=step, first_sample=ddp.first_sample):
            loss = pipe.step(batch[:, :-1], batch[:, 1:], hooks=hooks)
        ddp.wait()
        norm = ddp.clip_by_global_norm(max_norm) if zero else global_norm(stages)
        assert zero or ddp.clip_by_global_norm(max_norm) == norm  # the other door
        optimizer.step()
        seen.append((norm, ddp.mean(loss)))
    return weights_sha256(stages, optimizer), seen


@functools.cache
def in_one_process(num_steps=2):
    return train(SoloCommunicator(), 1, 1, "gpipe", num_steps)


LAYOUTS = [
    (1, 2, "1f1b"),
    (1, 2, "zbv"),
    (1, 4, "zero_bubble_h1"),
    (2, 1, "gpipe"),
    (8, 1, "gpipe"),
    (2, 2, "interleaved_1f1b"),
    (2, 2, "zbv"),
]


@pytest.mark.parametrize(("dp", "pp", "schedule"), LAYOUTS)
def test_the_layout_does_not_show(dp, pp, schedule):
    found = LocalWorld(dp * pp).run(train, dp, pp, schedule)
    assert found == [in_one_process()] * (dp * pp)


@pytest.mark.parametrize(
    ("zero", "dp", "pp", "schedule"), [(1, 2, 1, "gpipe"), (2, 4, 1, "gpipe"), (1, 2, 2, "zbv"), (2, 2, 2, "1f1b")]
)
def test_nor_do_shards(zero, dp, pp, schedule):
    """Buckets are cut inside of parameters, elsewhere in each layout."""
    found = LocalWorld(dp * pp).run(functools.partial(train, zero=zero), dp, pp, schedule)
    assert found == [in_one_process()] * (dp * pp)


def test_nor_do_shards_in_half_precision():
    """Contributions are float32 there too, where a rank's parameters have half values; so is what is hashed."""
    expected = train(SoloCommunicator(), 1, 1, "gpipe", precision="bfloat16")
    for zero in (0, 1, 2):
        found = LocalWorld(2).run(functools.partial(train, zero=zero, precision="bfloat16"), 2, 1, "gpipe")
        assert found == [expected] * 2


@pytest.mark.parametrize("spread", [0, 6, 18])
def test_squares_add_up_to_the_same_bits_however_they_are_cut(spread):
    draw = np.random.default_rng(spread)
    grad = (draw.standard_normal(50_000) * 10.0 ** draw.uniform(-spread, spread, 50_000)).astype(np.float32)
    expected = math.sqrt(sum(Fraction(float(g)) ** 2 for g in grad))
    for num_cuts in (0, 1, 7, 400):
        cuts = sorted(draw.integers(0, grad.size, num_cuts))
        arrays = np.split(draw.permutation(grad), cuts)
        parts = [PartNorm.exact(arrays[i::2]) for i in range(2)]
        assert math.sqrt(math.fsum(parts[0].squares + parts[1].squares)) == expected


def test_plain_sums_show_it():
    plain = [LocalWorld(dp).run(functools.partial(train, sums="plain"), dp, 1, "gpipe")[0][0] for dp in (1, 2, 4)]
    assert len(set(plain)) == 3
    assert in_one_process()[0] not in plain


@pytest.mark.soak
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("dp", "pp"), [(1, 2), (2, 2), (4, 2), (1, 4), (2, 4)])
def test_the_layout_does_not_show_after_200_steps(dp, pp, schedule):
    try:
        SCHEDULES[schedule].orders(pp, PARTS // dp)
    except ValueError as rule:
        pytest.skip(str(rule))
    if SCHEDULES[schedule].num_stages(pp) > CONFIG.num_layers:
        pytest.skip("more stages than blocks")
    found = LocalWorld(dp * pp).run(train, dp, pp, schedule, 200)
    assert found == [in_one_process(200)] * (dp * pp)


@pytest.mark.ranks(2, 4)
def test_processes_have_the_bits_of_threads(ranks):
    found = ranks.run(lambda comm: train(comm, comm.size // 2, 2, "1f1b"))
    assert found == [in_one_process()] * ranks.size


class Part(NamedTuple):
    """Some of a model's parameters: on rank 0 none, on each other one those of its turn."""

    comm: Communicator
    params: list[mg.Parameter]

    @classmethod
    def of(cls, comm, is_exact):
        draw = np.random.default_rng(0)
        params = [mg.Parameter(np.zeros(n, np.float32), f"p{n}") for n in range(1, 30)]
        for p in params:
            (part,) = FlatBuffer.adopt([p])
            if is_exact:
                part.flat.widen_grad(np.float64)
            p.grad = (draw.standard_normal(p.size) * 10.0 ** draw.uniform(-6, 6)).astype(np.float32)
        return cls(comm, params if comm.size == 1 else params[comm.rank - 1 :: comm.size - 1] if comm.rank else [])

    def parameters(self):
        return self.params

    counted_parameters = parameters


@pytest.mark.parametrize("is_exact", [False, True])
def test_a_norm_of_exact_sums_has_the_same_bits_wherever_the_parameters_are(is_exact):
    """Also where a rank has none, and so cannot see of what kind the others' gradients are."""

    def clipped(comm):
        part = Part.of(comm, is_exact)
        return clip_by_global_norm(part, 1.0), {p.name: p.grad.tobytes() for p in part.params}

    norm, grads = clipped(SoloCommunicator())
    found = [LocalWorld(size).run(clipped) for size in (2, 3, 4)]
    norms = {norm} | {own_norm for ranks in found for own_norm, _ in ranks}
    assert (len(norms) == 1) == is_exact  # else these numbers would show nothing
    for ranks in found:
        gathered = {name: bits for _, own in ranks for name, bits in own.items()}
        assert gathered.keys() == grads.keys()
        assert gathered == grads or not is_exact


@pytest.mark.parametrize(
    ("grads", "norm"), [([3.0, 4.0], 5.0), ([np.inf, 1.0], np.inf), ([np.nan, 1.0], np.nan), ([np.inf, np.nan], np.nan)]
)
def test_an_exact_norm_is_as_large_as_it_is(grads, norm):
    def program(comm):
        part = Part.of(comm, True)
        for p in part.params:
            p.grad = np.zeros(p.shape)
            if p.size <= 2:
                p.grad[0] = grads[p.size - 1]
        return clip_by_global_norm(part, 1e9)

    for found in [program(SoloCommunicator()), *LocalWorld(3).run(program)]:
        np.testing.assert_equal(found, norm)


def weighted(comm, weights, sums):
    """One linear layer, a loss a rank of its own weight; return the gradient."""
    w = mg.Parameter(np.linspace(-1, 1, 5, dtype=np.float32), "w")
    ddp = DistributedDataParallel(Holder([w]), comm, sums=sums)
    x = np.random.default_rng(comm.rank).standard_normal(5).astype(np.float32)
    mg.backward_with_hooks((w * x).sum(), ddp.hooks(num_samples=1, weight=weights[comm.rank]))
    ddp.wait()
    return w.grad.copy()


class Holder:
    def __init__(self, params):
        self.params = params

    def parameters(self):
        return self.params


def test_weights_count_in_a_plain_backward_too(ranks):
    weights = [3.0, 5.0, 1.0, 7.0][: ranks.size]
    exact, plain = (ranks.run(weighted, weights, sums) for sums in ("exact", "plain"))
    for ours, theirs in zip(exact, plain, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_gradients_of_the_callers_own_are_weighed_too(ranks):
    def program(comm, sums):
        order = SCHEDULES["gpipe"]
        mesh = Mesh(comm, dp=comm.size, pp=1)
        stages = PipelineStage.of(gpt.layers(CONFIG), mesh.pp, order, dtype=np.float32)
        stages.eval()
        pipe = PipelineExecutor(stages, mesh.pp, order, num_microbatches=2)
        ddp = DistributedDataParallel(stages, mesh.dp, sums=sums)
        ids = np.random.default_rng(comm.rank).integers(0, 17, (4, 8))
        outputs = pipe.forward(ids).outputs
        pipe.backward([np.ones_like(y) for y in outputs], hooks=ddp.hooks(num_samples=comm.rank + 1))
        ddp.wait()
        return ddp.grad_norm()

    exact, plain = (ranks.run(program, sums) for sums in ("exact", "plain"))
    np.testing.assert_allclose(exact, plain, rtol=1e-5)


def test_a_hash_shows_each_bit_and_copies_that_differ():
    class Part(Holder):
        def __init__(self, comm, value):
            super().__init__([mg.Parameter(np.full(3, value, np.float32), "w")])
            self.comm = comm

    one, other = (weights_sha256(Part(SoloCommunicator(), value)) for value in (1, np.nextafter(np.float32(1), 2)))
    assert one != other

    def program(comm):
        assert weights_sha256(Part(comm, 1)) == one
        with pytest.raises(ValueError, match="the weights of 'w' on rank 1 differ"):
            weights_sha256(Part(comm, comm.rank))

    LocalWorld(2).run(program)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sums": "best"}, "sums must be plain or exact, got 'best'"),
        ({"sums": "exact", "step_early": True}, "goes with neither step_early nor a comm_hook, got step_early=True"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    w = mg.Parameter(np.zeros(2, np.float32), "w")
    with pytest.raises(ValueError, match=message):
        DistributedDataParallel(Holder([w]), SoloCommunicator(), **options)


def test_nothing_is_wider_than_float64():
    w = mg.Parameter(np.zeros(2), "w")
    with pytest.raises(ValueError, match="exact sums are of float32 or narrower parameters, got 'w' of float64"):
        DistributedDataParallel(Holder([w]), SoloCommunicator(), sums="exact")


def test_losses_that_add_up_are_told_how():
    w = mg.Parameter(np.zeros(2, np.float32), "w")
    ddp = DistributedDataParallel(Holder([w]), SoloCommunicator(), sums="exact")
    with pytest.raises(ValueError, match=r"start each backward from its own weight / hooks\.mean_over"):
        ddp.hooks(num_samples=4, mean_over=2)


def integers(comm, dp, pp, schedule):
    """Train x -> x (1 + w0) (1 + w1) ... on integers in float64: every sum is exact, so plain sums have to agree."""
    mesh = Mesh(comm, dp=dp, pp=pp)
    order = SCHEDULES[schedule]
    names = [f"fc{i}" for i in range(4)]
    stages = PipelineStage.of([(n, functools.partial(Residual, n)) for n in names], mesh.pp, order, dtype=np.float64)
    pipe = PipelineExecutor(stages, mesh.pp, order, num_microbatches=PARTS // dp, loss_fn=lambda y, t: (y * t).mean())
    ddp = DistributedDataParallel(stages, mesh.dp, bucket_bytes=64)
    optimizer = ddp.optimizer(SGD(lr=1.0))
    for step in range(2):
        generator = np.random.default_rng(step)
        x, y = (generator.integers(-2, 3, (PARTS, 2)).astype(np.float64) for _ in range(2))
        own = slice(mesh.dp.rank * PARTS // dp, (mesh.dp.rank + 1) * PARTS // dp)
        optimizer.zero_grad()
        pipe.step(x[own], y[own], hooks=ddp.hooks(num_samples=PARTS // dp))
        ddp.wait()
        optimizer.step()
        for p in stages.parameters():
            p.data = np.rint(p.data) % 3  # stays small and whole
    return weights_sha256(stages)


class Residual(mg.nn.Module):
    def __init__(self, name, param):
        self.weight = param(f"{name}.weight", (2, 2), lambda generator, shape: generator.integers(-1, 2, shape))

    def __call__(self, x):
        return x @ self.weight + x


@pytest.mark.parametrize(("dp", "pp", "schedule"), LAYOUTS)
def test_on_integers_plain_sums_are_exact_and_so_equal(dp, pp, schedule):
    found = LocalWorld(dp * pp).run(integers, dp, pp, schedule)
    assert set(found) == {integers(SoloCommunicator(), 1, 1, "gpipe")}


def test_a_sum_that_float32_cannot_hold_is_infinite_and_no_warning(ranks):
    def program(comm):
        array, wide = np.zeros(3, np.float32), np.array([1e39, -1e39, 1.0])
        comm.sum_widely(array, wide, np.ones(1, np.uint8)).wait()
        np.testing.assert_array_equal(array, np.float32([np.inf, -np.inf, comm.size]))

    ranks.run(program)
