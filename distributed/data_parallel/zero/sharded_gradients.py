"""Level 2 of ZeRO: each rank keeps gradients of its own shards only; `sharded.py` has the levels.

Memory for the whole gradients of a bucket comes with the first contribution, and goes when the bucket is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Unpack

from distributed.comm.communicator import Array, Communicator, Work
from distributed.data_parallel.buckets.bucket import UNREDUCED, Bucket, BucketOptions
from distributed.data_parallel.zero.sharded import IN_SHARDS, ShardedBuckets
from minigrad.backend import xp_of
from minigrad.parameter import Hold, Parameter

KEPT = Hold(f"its grad is kept in shards, and {IN_SHARDS}", open=True, final=True, partial=True, after_reset=UNREDUCED)


class GradientShards(ShardedBuckets):
    """Buckets of which each rank keeps its shard, and nothing else, from one step to the next.

    Args:
        whole, options: see `ShardedBuckets`.
    """

    def __init__(
        self,
        params: Iterable[Parameter],
        comm: Communicator,
        *,
        whole: Callable[[Parameter], bool] | None = None,
        **options: Unpack[BucketOptions],
    ) -> None:
        super().__init__(params, comm, whole=whole, **options)
        for flat in dict.fromkeys(bucket.range.flat for bucket in self.buckets):
            flat.cut_grad([bucket.range for bucket in self.buckets if bucket.range.flat is flat])
        self._grads = [xp_of(s.data).zeros(s.stop - s.start, s.flat.grad.dtype) for s in self.shards]
        self._kept: set[Parameter] = set()  # whose shards hold a sum that this backward adds to

    @property
    def grad_bytes(self) -> int:
        return sum(grad.nbytes for grad in self._grads)

    def check_reduced(self, what: str) -> None:
        super().check_reduced(what)
        for p in self.params:
            if p.hold is KEPT and p.has_grad:
                raise RuntimeError(f"{what} {p.label}: a backward without the hooks came after the last one with them")

    def shard_grad(self, number: int) -> Array:
        return self._grads[number]

    def move_gradients(self) -> None:
        """Let gradients be reduced fast, though their memory comes and goes. Collective."""
        self.comm.stage_reductions()

    def _begin(self, share: float | None, reached: Sequence[bool], *, is_even: bool) -> None:
        self._kept = {p for p in self.params if p.hold is KEPT}
        super()._begin(share, reached, is_even=is_even)

    def _launch(self, bucket: Bucket) -> Work:
        for other in self.buckets:  # memory that is done with can go
            if other.work is not None and not other.is_landed and other.work.test():
                self.settle(other)
        return super()._launch(bucket)

    def _land(self, bucket: Bucket) -> None:
        super()._land(bucket)
        shard, grad = self.shards[bucket.number], self._grads[bucket.number]
        arrived = shard.flat.grad_slice(shard.start, shard.stop)
        if self._kept.isdisjoint(shard.params):
            grad[...] = arrived
        else:
            for p in shard.params:
                if p not in self._kept:  # reset since the last one
                    grad[max(p.start - shard.start, 0) : p.stop - shard.start] = 0
            grad += arrived
        shard.flat.close_grad(bucket.range)

    def _drop(self) -> None:
        super()._drop()
        for p in self.params:  # what was kept has been added to, perhaps
            p.hold = self._unreduced
            p.grad = None

    def _final_hold(self, p: Parameter) -> Hold:
        return KEPT
