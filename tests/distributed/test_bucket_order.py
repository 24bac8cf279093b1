"""The order of launches is learned from rank 0's first backward, where layers are declared as they do not run."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import pytest

import minigrad as mg
from distributed import DistributedDataParallel, LocalWorld, Mesh
from distributed.data_parallel.buckets.launch_order import LaunchOrder
from distributed.data_parallel.comm_hooks import compressed
from minigrad.flat import zero_grad
from minigrad.models import gpt
from minigrad.nn import Module
from minigrad.optim import AdamW
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage

LAYERS = [f"layer{i}" for i in range(6)]
KINDS: list[dict[str, Any]] = [
    {},
    {"zero": 1},
    {"zero": 2},
    {"sums": "exact"},
    {"step_early": True},
    {"comm_hook": compressed(np.float16)},
]


class Chain(Module):
    """Layers that run in the order of `LAYERS`, or on odd ranks with two of them swapped, however declared."""

    def __init__(self, declared: list[str]) -> None:
        for name in declared:
            values = np.random.default_rng(int(name[-1])).standard_normal((5, 5)).astype(np.float32)
            setattr(self, name, mg.Parameter(values, name))

    def loss(self, rank: int, step: int) -> mg.Tensor:
        h = mg.Tensor(np.random.default_rng([rank, step]).standard_normal((4, 5)).astype(np.float32))
        runs = [*LAYERS[:2], LAYERS[3], LAYERS[2], *LAYERS[4:]] if rank % 2 else LAYERS
        for name in runs:
            h = h @ getattr(self, name)
        return (h * h).mean()


def trained(comm: Any, declared: list[str], kind: dict[str, Any]) -> tuple[list[list[int]], list[dict[str, Any]], Any]:
    """Take three steps; return after which launches each gradient came, all gradients, and the order of buckets."""
    model = Chain(declared)
    ddp = DistributedDataParallel(model, comm, bucket_bytes=1, **kind)
    optimizer = ddp.optimizer(AdamW(1e-2))
    launches, grads = [], []
    for step in range(3):
        launched: list[int] = []

        def look(p: mg.Parameter, launched: list[int] = launched) -> None:
            launched.append(ddp.buckets.num_launched)

        hooks = ddp.hooks(num_samples=4) + mg.Hooks(on_grad_ready=look)
        mg.backward_with_hooks(model.loss(comm.rank, step), hooks)
        ddp.wait()
        launches.append(launched)
        grads.append(ddp.buckets.whole_grads())
        optimizer.step()
        optimizer.zero_grad()
    return launches, grads, [p.name for part in ddp.bucket_params for p in part]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind) + str(kind.get("zero", "")) or "plain")
def test_layers_declared_backwards_travel_during_the_second_backward(ranks, kind):
    def program(comm):
        launches, grads, order = trained(comm, LAYERS[::-1], kind)
        _, expected, _ = trained(comm, LAYERS, kind)
        for got, wanted in zip(grads, expected, strict=True):
            for name in LAYERS:
                np.testing.assert_array_equal(got[name], wanted[name])
        # One order on all ranks, rank 0's: on the others layer2 comes too early, and waits for layer3.
        spread = [1, 2, 2, 4, 5, 6] if comm.rank % 2 else [1, 2, 3, 4, 5, 6]
        assert launches == [[0, 0, 0, 0, 0, 6], spread, spread]
        assert order == LAYERS[::-1]

    ranks.run(program)


def test_an_order_is_learned_once_rank_0_has_had_samples_and_last_buckets_stay_last(ranks):
    def program(comm):
        model = Chain(LAYERS[::-1])
        model.tied = [model.layer5, model.layer4]
        ddp = DistributedDataParallel(model, comm, bucket_bytes=1)
        given = [p.name for part in ddp.bucket_params for p in part]
        orders = []
        for step in range(3):
            if step == 0 and comm.rank == 0 and comm.size > 1:
                ddp.reduce_no_samples()
            else:
                mg.backward_with_hooks(model.loss(0, step), ddp.hooks(num_samples=4))
            orders.append([p.name for part in ddp.bucket_params for p in part])
            ddp.wait()
            zero_grad(ddp.params)
        assert given[-2:] == ["layer5", "layer4"]
        learned = [*LAYERS[3::-1], *given[-2:]] if comm.size > 1 else given
        assert orders == [given, given, learned]

    ranks.run(program)


@pytest.mark.ranks(2)
def test_another_order_is_learned_when_two_backwards_in_a_row_have_had_it(ranks):
    def program(comm):
        model, orders = Chain(LAYERS), []
        ddp = DistributedDataParallel(model, comm, bucket_bytes=1)
        for step, is_swapped in enumerate([0, 1, 0, 1, 1, 0, 0]):  # as `Chain.loss` runs on odd ranks
            orders.append("".join(p.name[-1] for part in ddp.bucket_params for p in part))
            mg.backward_with_hooks(model.loss(is_swapped, step), ddp.hooks(num_samples=4))
            ddp.wait()
            zero_grad(ddp.params)
        assert orders == [*["543210"] * 5, "542310", "542310"]
        orders.append("".join(p.name[-1] for part in ddp.bucket_params for p in part))
        assert orders[-1] == "543210"

    ranks.run(program)


SIZES = gpt.GPTConfig(vocab_size=11, context=4, num_layers=4, num_heads=2, width=8)


def trained_in_a_pipeline(comm: Any, name: str) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Take three steps of dp 2 x pp 2; return the gradients of each, and the stages of each bucket as launched."""
    mesh = Mesh(comm, dp=2, pp=2)
    schedule = SCHEDULES[name]
    stages = PipelineStage.of(gpt.layers(SIZES), mesh.pp, schedule, seed=0, dtype=np.float32)
    pipe = PipelineExecutor(stages, mesh.pp, schedule, num_microbatches=4, loss_fn=mg.cross_entropy)
    ddp = DistributedDataParallel(stages, mesh.dp, bucket_bytes=1)
    optimizer = ddp.optimizer(AdamW(1e-2))
    grads = []
    for step in range(3):
        ids = np.random.default_rng([mesh.dp.rank, step]).integers(0, SIZES.vocab_size, (4, SIZES.context + 1))
        optimizer.zero_grad()
        pipe.step(ids[:, :-1], ids[:, 1:], hooks=ddp.hooks(num_samples=4))
        ddp.wait()
        grads.append(ddp.buckets.whole_grads())
        optimizer.step()
        pipe.check_deadlock_free(ddp)  # with what has been learned, too
    holders = {p: [stage.stage_id for stage in stages if p in stage.parameters()] for p in stages.parameters()}
    order = [holders[p][0] for (p,) in ddp.bucket_params if p not in stages.tied and len(holders[p]) == 1]
    return grads, [stage for stage, _ in groupby(order)]


@pytest.mark.parametrize(
    ("name", "learned"),
    [
        ("v_half", [[0, 3], [1, 2]]),  # which ends with the last W of stage 0, and then with that of stage 3
        ("interleaved_1f1b", [[2, 0], [3, 1]]),
    ],
)
def test_a_pipeline_launches_the_buckets_of_its_chunks_as_the_schedule_ends_them(monkeypatch, name, learned):
    found = LocalWorld(4).run(trained_in_a_pipeline, name)
    assert [order for _, order in found] == 2 * learned
    monkeypatch.setattr(LaunchOrder, "learn", lambda order: None)
    given = LocalWorld(4).run(trained_in_a_pipeline, name)
    assert all(order == sorted(order, reverse=True) for _, order in given)
    for (got, _), (wanted, _) in zip(found, given, strict=True):
        for mine, theirs in zip(got, wanted, strict=True):
            assert mine.keys() == theirs.keys()
            for key in mine:
                np.testing.assert_array_equal(mine[key], theirs[key])
