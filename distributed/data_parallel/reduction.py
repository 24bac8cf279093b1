"""Which buckets a model's gradients go into: all that may be asked of them, what goes with what, and the kind for it.

    asked for       buckets                 what a rank has after `wait`
    nothing         GradientBucketManager   all gradients
    sums="exact"    ExactBuckets            all, added up exactly
    step_early      EarlyBuckets            those that are there; the others follow
    zero=1          ShardedBuckets          its shard of each
    zero=2          GradientShards          its shard of each, and memory for no more
    early, zero=1   EarlyShards             those shards that are there; with zero=2 EarlyGradientShards
    exact, zero=1   ExactShards             its shard of each, added up exactly; with zero=2 ExactGradientShards

One rank alone has nothing to share out or to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from distributed.comm.communicator import Array, Communicator, Work
from distributed.comm.work import JoinedWork
from distributed.data_parallel.buckets.bucket import Bucket, BucketOptions
from distributed.data_parallel.buckets.early import EarlyBuckets
from distributed.data_parallel.buckets.exact import ExactBuckets
from distributed.data_parallel.buckets.manager import GradientBucketManager
from distributed.data_parallel.comm_hooks import CommHook, allreduce
from distributed.data_parallel.zero.early_shards import EarlyGradientShards, EarlyShards
from distributed.data_parallel.zero.sharded import ShardedBuckets
from distributed.data_parallel.zero.sharded_gradients import GradientShards
from distributed.trace.recorder import Recorder
from minigrad.arguments import as_int
from minigrad.parameter import Parameter


class ExactShards(ShardedBuckets, ExactBuckets):
    """Buckets of which each rank gets the exact sum of its shard."""

    def _sum_widely(self, bucket: Bucket, grad: Array, sums: Array, has_sums: Array) -> Work:
        if not self.has_even_shards(bucket):
            return super()._sum_widely(bucket, grad, sums, has_sums)
        even = grad.size - grad.size % self.comm.size
        works = []
        if even:
            works.append(self.comm.sum_widely(grad[:even], sums[:even], has_sums, everywhere=False))
        if even < grad.size:
            works.append(self.comm.sum_widely(grad[even:], sums[even:], has_sums))
        return JoinedWork(works, lambda _: grad)


class ExactGradientShards(GradientShards, ExactShards):
    """Buckets of which each rank gets the exact sum of its shard, and keeps nothing else."""


_PLAIN, _EXACT, _EARLY = range(3)
_SHARDED: dict[tuple[int, int], type[ShardedBuckets]] = {  # by level and kind
    (1, _PLAIN): ShardedBuckets,
    (1, _EXACT): ExactShards,
    (1, _EARLY): EarlyShards,
    (2, _PLAIN): GradientShards,
    (2, _EXACT): ExactGradientShards,
    (2, _EARLY): EarlyGradientShards,
}


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced: `DistributedDataParallel` says what each of these is.

    Raises:
        ValueError: one of them has no such value, or two do not go together.
        TypeError: bucket_bytes is no integer, or comm_hook no function.
    """

    bucket_bytes: int | None = None
    comm_hook: CommHook = allreduce
    zero: int = 0
    whole: Callable[[Parameter], bool] | None = None
    step_early: bool = False
    sums: str = "plain"

    def __post_init__(self) -> None:
        if self.bucket_bytes is not None and as_int(self.bucket_bytes) is None:
            raise TypeError(f"bucket_bytes must be an integer, got {self.bucket_bytes!r}")
        if not callable(self.comm_hook):
            raise TypeError(f"a comm_hook is a function of a bucket and a communicator, got {self.comm_hook!r}")
        if self.zero not in (0, 1, 2):
            raise ValueError(f"zero must be 0, 1 or 2, got {self.zero!r}")
        if self.sums not in ("plain", "exact"):
            raise ValueError(f"sums must be plain or exact, got {self.sums!r}")
        has_hook = self.comm_hook is not allreduce
        if self.zero and has_hook:
            raise ValueError(f"gradients are reduced to shards with zero={self.zero}, which no comm_hook can do")
        if self.is_exact and (self.step_early or has_hook):
            raise ValueError(
                f"sums='exact' goes with neither step_early nor a comm_hook, got step_early={self.step_early}, "
                f"comm_hook={getattr(self.comm_hook, '__name__', self.comm_hook)}"
            )

    @property
    def is_exact(self) -> bool:
        return self.sums == "exact"

    def buckets(
        self, params: Sequence[Parameter], comm: Communicator, *, last: Sequence[Parameter], recorder: Recorder
    ) -> GradientBucketManager:
        """Return the buckets; see `GradientBucketManager`.

        Args:
            params: of the model, in its order.
            comm: the ranks that hold replicas.
            last: parameters whose buckets are launched after all others.
            recorder: notes when buckets travel.
        """
        options = BucketOptions(bucket_bytes=self.bucket_bytes, last=last, comm_hook=self.comm_hook, recorder=recorder)
        return self._kind(comm.size)(params, comm, **options)

    def _kind(self, num_ranks: int) -> Callable[..., GradientBucketManager]:
        if self.zero and num_ranks > 1:
            kind = _EXACT if self.is_exact else _EARLY if self.step_early else _PLAIN
            return partial(_SHARDED[self.zero, kind], whole=self.whole)
        if self.is_exact:
            return ExactBuckets
        return EarlyBuckets if self.step_early and num_ranks > 1 else GradientBucketManager
