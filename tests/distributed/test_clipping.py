"""A gradient is clipped by the norm of the whole model, in every layout and on every rank alike."""

import numpy as np
import pytest
from toy_pipeline import apply, scale

from distributed import DistributedDataParallel, Mesh, NormOverRanks, SoloCommunicator, clip_by_global_norm
from distributed.clipping import global_norm
from minigrad import backward, cross_entropy, optim
from minigrad.models import gpt
from minigrad.optim import SGD, Optimizer
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage

ONE = SCHEDULES["1f1b"]
CONFIG = gpt.GPTConfig(vocab_size=11, context=4, num_layers=4, num_heads=1, width=4)


def first_and_last(comm):
    """Parameters on the first and the last rank only."""
    middle = [apply(str(i), lambda x: x) for i in range(comm.size - 2)]
    layers = [scale("a"), *middle, scale("b")]
    stages = PipelineStage.of(layers, comm, ONE, dtype=np.float64)
    for p in stages.parameters():
        p.grad = np.float64(3.0 if p.name.startswith("a") else 4.0)
    return stages


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(("max_norm", "factor"), [(1.0, 1 / 5), (10.0, 1.0), (np.inf, 1.0)])
def test_stages_are_clipped_by_the_norm_of_all_of_them(ranks, max_norm, factor):
    """Rank 0 has 3, the last 4, and those between nothing; by stages it would be 1 and 1. torchtitan#596"""

    def program(comm):
        stages = first_and_last(comm)
        assert clip_by_global_norm(stages, max_norm) == 5
        return [float(p.grad) for p in stages.parameters()]

    results = ranks.run(program)
    np.testing.assert_allclose([results[0], results[-1]], [[3 * factor], [4 * factor]])
    assert results[1:-1] == [[]] * (ranks.size - 2)


@pytest.mark.ranks(2, 3, 4)
def test_a_norm_of_one_rank_alone_is_refused(ranks):
    """It would scale each stage by a factor of its own, without a word."""

    def program(comm):
        stages = first_and_last(comm)
        if stages.parameters():
            rule = f"norm of '.*': it is of a pipeline on {comm.size} ranks, .*: distributed.clip_by_global_norm"
            with pytest.raises(RuntimeError, match=rule):
                optim.clip_by_global_norm(stages.parameters(), 1.0)
            assert [float(p.grad) for p in stages.parameters()] == [3.0 if comm.rank == 0 else 4.0]

    ranks.run(program)


def test_a_pipeline_of_one_rank_is_clipped_either_way(ranks):
    def program(comm):
        stages = first_and_last(comm.split(comm.rank))
        assert clip_by_global_norm(stages, 100) == optim.clip_by_global_norm(stages.parameters(), 2.5) == 5
        assert [float(p.grad) for p in stages.parameters()] == [1.5, 2]

    ranks.run(program)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    ("first", "last", "norm"),
    [(3e200, 4e200, 5e200), (3e-200, 4e-200, 5e-200), (np.inf, 1.0, np.inf), (1.0, np.nan, np.nan)],
)
def test_a_norm_is_as_large_as_it_is(ranks, first, last, norm):
    def program(comm):
        stages = first_and_last(comm)
        for p in stages.parameters():
            p.grad = np.float64(first if comm.rank == 0 else last)
        np.testing.assert_allclose(clip_by_global_norm(stages, 1e300), norm, rtol=1e-15)
        own = [float(p.grad) for p in stages.parameters()]
        np.testing.assert_array_equal(own, [first] if comm.rank == 0 else [last] if own else [])

    ranks.run(program)


def test_a_norm_to_clip_to_is_refused_before_any_message(ranks):
    def program(comm):
        stages = first_and_last(comm.split(comm.rank))
        for max_norm in (0.0, -1.0, np.nan):
            with pytest.raises(ValueError, match=f"max_norm must be positive, got {max_norm}"):
                clip_by_global_norm(stages, max_norm)

    ranks.run(program)


def batch():
    generator = np.random.default_rng(0)
    return generator.integers(0, 11, (8, 4)), generator.integers(0, 11, (8, 4))


def clipped_in_one_process():
    model = gpt.GPT(CONFIG, seed=5, dtype=np.float64)
    optimizer = Optimizer(model.parameters(), SGD(0.1))
    x, y = batch()
    backward(cross_entropy(model(x), y))
    norm = optim.clip_by_global_norm(optimizer.params, 0.05)
    return norm, {p.name: p.grad.copy() for p in optimizer.params}


@pytest.mark.ranks(2, 4)
def test_every_layout_clips_as_one_process_does(ranks):
    """The table is tied to the head, and so lies on two ranks: it counts once."""
    norm, grads = clipped_in_one_process()
    assert norm > 0.1  # so that there is something to clip

    def program(comm):
        for dp in range(1, comm.size + 1):
            if comm.size % dp:
                continue
            mesh = Mesh(comm, dp=dp, pp=comm.size // dp)
            stages = PipelineStage.of(gpt.layers(CONFIG), mesh.pp, ONE, seed=5, dtype=np.float64)
            ddp = DistributedDataParallel(stages, mesh.dp)
            pipe = PipelineExecutor(stages, mesh.pp, ONE, num_microbatches=2, loss_fn=cross_entropy)
            x, y = (np.split(part, dp)[mesh.dp.rank] for part in batch())
            pipe.step(x, y, hooks=ddp.hooks(num_samples=len(x)))
            with pytest.raises(RuntimeError, match="norm of"):
                global_norm(stages)  # what is still being averaged has no norm
            ddp.wait()
            np.testing.assert_allclose(clip_by_global_norm(stages, 0.05), norm, rtol=1e-12)
            for p in stages.parameters():
                np.testing.assert_allclose(p.grad, grads[p.name], rtol=1e-9, atol=1e-15)
            np.testing.assert_allclose(global_norm(stages), 0.05, rtol=1e-12)

    ranks.run(program)


@pytest.mark.ranks(2, 4)
def test_an_optimizer_of_a_stage_clips_by_the_norm_of_all(ranks):
    """Also a tied table, which two ranks hold, counts once: parameters are those of one process."""
    ids = np.random.default_rng(0).integers(0, 11, (3, 4, 5))

    def train(comm):
        stages = PipelineStage.of(gpt.layers(CONFIG), comm, ONE, dtype=np.float64)
        pipe = PipelineExecutor(stages, comm, ONE, num_microbatches=2, loss_fn=cross_entropy)
        optimizer = Optimizer(stages.parameters(), SGD(1.0), max_norm=0.1, norm_over=NormOverRanks(stages))
        norms = []
        for batch in ids:
            optimizer.zero_grad()
            pipe.step(batch[:, :-1], batch[:, 1:])
            optimizer.step()
            norms.append(optimizer.grad_norm)
        return norms, {p.name: p.data for p in stages.parameters()}

    norms, values = train(SoloCommunicator())
    assert min(norms) > 0.1
    for found, own in ranks.run(train):
        np.testing.assert_allclose(found, norms, rtol=1e-12)
        for name, value in own.items():
            np.testing.assert_allclose(value, values[name], rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.ranks(3)
def test_a_rank_without_parameters_could_not_take_part(ranks):
    def program(comm):
        stages = first_and_last(comm)
        with pytest.raises(ValueError, match=r"needs parameters on each, got \[1, 0, 1\] by rank"):
            NormOverRanks(stages)
        with pytest.raises(ValueError, match="norm_over is for clipping"):
            Optimizer(stages.parameters(), SGD(1.0), norm_over=stages)

    ranks.run(program)


@pytest.mark.ranks(6)
@pytest.mark.parametrize("zero", [0, 1])
def test_shards_of_a_rank_without_parameters_could_not_either(ranks, zero):
    """On a GPU the others would add up squares with NCCL, and it on the host: nobody would come to the other's sum."""

    def program(comm):
        mesh = Mesh(comm, dp=2, pp=3)
        ddp = DistributedDataParallel(first_and_last(mesh.pp), mesh.dp, zero=zero)
        with pytest.raises(ValueError, match=r"needs parameters on each, got \[1, 0, 1\] by rank"):
            ddp.optimizer(SGD(1.0), max_norm=1.0)

    ranks.run(program)


KINDS = [{"zero": zero, "step_early": early} for zero in (0, 1, 2) for early in (False, True)]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_optimizer_of_buckets_clips_as_ddp_does_and_takes_no_step_without_a_norm(ranks, kind):
    """In replicas of two stages where there are ranks for it; the last step has a gradient that is nan."""
    ids = np.random.default_rng(0).integers(0, 11, (3, 4, 5))

    def train(comm, *, by_optimizer, **kind):
        mesh = Mesh(comm, dp=2, pp=comm.size // 2)
        stages = PipelineStage.of(gpt.layers(CONFIG), mesh.pp, ONE, dtype=np.float64)
        ddp = DistributedDataParallel(stages, mesh.dp, bucket_bytes=2000, **kind)
        optimizer = ddp.optimizer(SGD(1.0), max_norm=0.1 if by_optimizer else None)
        pipe = PipelineExecutor(stages, mesh.pp, ONE, num_microbatches=2, loss_fn=cross_entropy)
        norms = []
        for batch in ids:
            optimizer.zero_grad()
            own = batch[2 * mesh.dp.rank : 2 * mesh.dp.rank + 2]
            pipe.step(own[:, :-1], own[:, 1:], hooks=ddp.hooks(num_samples=2))
            ddp.wait()
            if not by_optimizer:
                norms.append(ddp.clip_by_global_norm(0.1))
            optimizer.step()
            if by_optimizer:
                norms.append(optimizer.grad_norm)
                assert optimizer.was_taken()
        values = {p.name: p.data.copy() for p in stages.parameters()}
        if by_optimizer:
            optimizer.zero_grad()
            before = optimizer.num_steps
            loss_hooks = ddp.hooks(num_samples=2)
            stages.parameters()[0].data[...] = np.nan if comm.rank == 0 else 0.0
            pipe.step(own[:, :-1], own[:, 1:], hooks=loss_hooks)
            ddp.wait()
            optimizer.step()
            assert not optimizer.was_taken()
            assert optimizer.num_steps == before
            for p in stages.parameters()[1:]:
                np.testing.assert_array_equal(p.data, values[p.name])
        return norms, values

    plain = ranks.run(lambda comm: train(comm, by_optimizer=False))
    found = ranks.run(lambda comm: train(comm, by_optimizer=True, **kind))
    for (norms, values), (plain_norms, plain_values) in zip(found, plain, strict=True):
        assert min(plain_norms) > 0.1
        np.testing.assert_allclose(norms, plain_norms, rtol=1e-12)
        for name, value in values.items():
            np.testing.assert_allclose(value, plain_values[name], rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.ranks(2)
def test_an_optimizer_of_exact_sums_does_not_clip(ranks):
    def program(comm):
        stages = PipelineStage.of(gpt.layers(CONFIG), SoloCommunicator(), ONE, dtype=np.float32)
        ddp = DistributedDataParallel(stages, comm, sums="exact")
        with pytest.raises(ValueError, match=r"with sums='exact' call ddp\.clip_by_global_norm"):
            ddp.optimizer(SGD(1.0), max_norm=1.0)

    ranks.run(program)
