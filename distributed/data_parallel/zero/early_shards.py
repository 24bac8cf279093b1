"""Shards that step as their buckets arrive, and are gathered at once.

    backward   ...|b0|b1|b2|
    messages       ---0--- ---1--- ---2--- -g0- -g1- -g2-
    wait()                 |                               every rank has come to the end of its backward
    step()                 |u0|   |u1|    |u2|             returns when each rank's own is updated

So the last reduction travels beside the updates of what came before, and their gathers beside the updates of what comes
last. Each rank launches all in one order, whatever comes when: collectives match. The bits are those of `sharded.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

from distributed.data_parallel.buckets.arrivals import waiting_for_values
from distributed.data_parallel.buckets.bucket import Bucket, OptimizerOptions
from distributed.data_parallel.buckets.early import EarlyBuckets
from distributed.data_parallel.zero.sharded import ShardedBuckets, ShardedOptimizer, is_trained, runs_to_gather
from distributed.data_parallel.zero.sharded_gradients import GradientShards
from minigrad.habits import own_options
from minigrad.optim import Optimizer
from minigrad.optim.update_rules import Rule


class EarlyShards(EarlyBuckets, ShardedBuckets):
    """Buckets of level 1 that may still be on their way when `wait` returns."""

    def optimizer(self, rule: Rule, **options: Unpack[OptimizerOptions]) -> Optimizer:
        return EarlyShardedOptimizer(self, rule, **options)


class EarlyGradientShards(EarlyShards, GradientShards):
    """Buckets of level 2 likewise."""


class EarlyShardedOptimizer(ShardedOptimizer):
    """Updates each of this rank's shards when its gradients are there, and gathers it."""

    @own_options
    def zero_grad(self) -> None:
        """Mark all gradients fresh; those of a step that was not taken have to come first."""
        self._buckets.finish_untaken()
        super().zero_grad()

    def _updated_runs(self, step: int) -> Iterator[list[Bucket]]:
        trained, frozen = (filter(kind, self._buckets.order.buckets) for kind in (is_trained, _is_frozen))
        for run in runs_to_gather(trained):
            for bucket in run:
                self._update_shard(bucket, step)
            yield run
        for bucket in frozen:
            self._update_shard(bucket, step)
        self._count()

    def _update_shard(self, bucket: Bucket, step: int) -> None:
        with waiting_for_values(bucket.range.params, self._buckets.comm, self._buckets.recorder):
            self._buckets.settle(bucket)
        super()._update_shard(bucket, step)


def _is_frozen(bucket: Bucket) -> bool:
    return not is_trained(bucket)
