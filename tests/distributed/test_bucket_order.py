"""The order of launches is learned from rank 0's first backward, where layers are declared as they do not run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import minigrad as mg
from distributed import DistributedDataParallel
from distributed.data_parallel.comm_hooks import compressed
from minigrad.flat import zero_grad
from minigrad.nn import Module
from minigrad.optim import AdamW

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
