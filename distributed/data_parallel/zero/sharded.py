"""ZeRO: what replicas need only to step, each rank keeps for its own shard of the model.

    a bucket's gradients   | rank 0 | rank 1 | rank 2 |   a reduce_scatter in the backward, where an allreduce was
    its optimizer state    |  m, v  |  m, v  |  m, v  |   each rank steps its own shard
    its parameters         | rank 0 | rank 1 | rank 2 |   gathered, in the order that the next forward needs them

    level   shared out               bytes a rank, AdamW in float32   in half precision    n parameters, N ranks
    0       nothing                  16 n                             18 n
    1       the optimizer's state    8 n + 8 n / N                    6 n + 12 n / N
    2       that, and gradients      4 n + 12 n / N                   2 n + 16 n / N

In half precision the float32 values are part of the optimizer's state, and what is gathered is their half copy;
gradients are float32. A reduce_scatter and a gather send what an allreduce sends: memory is saved, and no more is paid.
A bucket's values are hidden from `step` until its gather is over: whoever reads one waits for it (`Parameter.defer`).

With level 2 memory for a bucket's gradients is there from the first contribution until it is reduced. A backward with
the hooks adds to the shards, until zero_grad; one without them, and the micro-batches of a pipeline, add up whole
gradients first: then the whole is there until the last one, and one reduction is paid for.

Sums are those of an allreduce, so a step has the same bits as without shards where both are taken in rank order. Only a
norm is added up in another order, shard by shard: where it clips, the factor may differ in its last bit; not with exact
sums (`buckets/exact.py`), whose norm has no order.

Source: Rajbhandari et al. 2020, ZeRO, sections 5.1, 5.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NoReturn, Unpack

import numpy as np

from distributed.clipping import ModelPart, PartNorm, check_held_everywhere
from distributed.comm.communicator import Array, Communicator, Work
from distributed.data_parallel.buckets.arrivals import Arrival, waiting_for_values
from distributed.data_parallel.buckets.bucket import UNREDUCED, Bucket, BucketOptions, OptimizerOptions
from distributed.data_parallel.buckets.manager import GradientBucketManager
from distributed.data_parallel.comm_hooks import CommHook
from distributed.data_parallel.zero.shards import (
    average_to_shards,
    even_bounds,
    gather_shards,
    reduce_to_shards,
    whole_bounds,
)
from minigrad.backend import xp_of
from minigrad.flat import FlatBuffer
from minigrad.flat_range import FlatRange, TensorSlice, slices_in
from minigrad.optim import Optimizer
from minigrad.optim.clipping import NormOver, clip_arrays, norm_of, norm_of_parts
from minigrad.optim.update_rules import Rule, divided
from minigrad.parameter import Hold, Parameter, check_usable

IN_SHARDS = "each rank has the sum of its own shard only: step by ddp.optimizer(rule), clip by ddp.clip_by_global_norm"
GATHER_BYTES = 1 << 20  # of small buckets that are gathered together: a gather costs calls, and hides behind few ops
GPU_GATHER_BYTES = 48 << 20  # there it hides behind the updates of other shards, and a long one is faster
SHARDED = Hold(f"its grad is reduced, and {IN_SHARDS}", final=True, partial=True, after_reset=UNREDUCED)


class ShardedBuckets(GradientBucketManager):
    """Buckets of which each rank gets the sum of its shard: level 1, where it lies in memory for whole gradients.

    Args:
        whole: which parameters no shard may cut: each has one owner, chosen so that ranks are laden alike. Buckets with
            such a parameter travel by `comm_hook`, and others by `reduce_to_shards`.
        options: see `GradientBucketManager`.

    Attributes:
        shards: this rank's share of each bucket, in their order.
        shards_by_rank: of each bucket, those of all ranks.
    """

    def __init__(
        self,
        params: Iterable[Parameter],
        comm: Communicator,
        *,
        whole: Callable[[Parameter], bool] | None = None,
        **options: Unpack[BucketOptions],
    ) -> None:
        super().__init__(params, comm, **options)
        self._moved: dict[FlatBuffer, Array] = {}  # values, where they live for the communicator's sake
        self._shard_hook = self.recorder.comm_hook(reduce_to_shards)
        self._averages[self._shard_hook] = self.recorder.comm_hook(average_to_shards)
        self._bounds: list[list[int] | None] = []  # of each bucket, where shares are not equal
        loads = [0] * comm.size
        for bucket in self.buckets:
            has_whole = whole is not None and any(map(whole, bucket.range.params))
            self._bounds.append(whole_bounds(bucket.range, whole, loads) if whole is not None and has_whole else None)
        self.shards_by_rank = [
            [bucket.range.cut(*ends) for ends in pairwise(uneven or even_bounds(bucket.range, comm.size))]
            for bucket, uneven in zip(self.buckets, self._bounds, strict=True)
        ]
        self.shards = [by_rank[comm.rank] for by_rank in self.shards_by_rank]
        self._whole_here = {
            p for shard in self.shards for p in shard.params if shard.start <= p.start and p.stop <= shard.stop
        }

    def part_here(self, bucket: Bucket) -> FlatRange:
        return self.shards[bucket.number]

    def check_reduced(self, what: str) -> None:
        """Raise RuntimeError if a gradient is held by somebody, or has what no other rank has seen."""
        check_usable(self.params, what, in_part=True)

    def shard_grad(self, number: int) -> Array:
        """Return the gradients of this rank's share of a bucket, a view."""
        shard = self.shards[number]
        return shard.flat.grad_slice(shard.start, shard.stop)

    def part_norm(self, params: Sequence[Parameter]) -> PartNorm:
        own = self.own_grads(params, "the norm of")
        is_exact = any(shard.flat.is_widened for shard in self.shards)
        return (PartNorm.exact(own) if is_exact else PartNorm(norm_of(own))).over(self.comm)

    def own_grads(self, params: Iterable[Parameter], what: str) -> list[Array]:
        """Return this rank's shards of some gradients, which `what` is about."""
        self.check_reduced(what)
        return [grad for _, grad in self._own(params)]

    def norm_over(self, part: ModelPart) -> NormOver:
        return NormOverShards(self, part)

    def optimizer(self, rule: Rule, **options: Unpack[OptimizerOptions]) -> Optimizer:
        return ShardedOptimizer(self, rule, **options)

    def whole_grads(self) -> dict[str, Array]:
        self.check_reduced("gathering")
        return self.whole(map(self.shard_grad, range(self.num_buckets)))

    def whole(self, shards: Iterable[Array | None]) -> dict[str, Array]:
        """Return what the shards of all ranks are together, by parameter. Collective.

        Args:
            shards: this rank's of each bucket; None leaves a bucket out, on all ranks.
        """
        arrays: dict[str, Array] = {}
        for bucket, own, shard in zip(self.buckets, self.shards, shards, strict=True):
            if shard is not None:
                part = bucket.range
                whole = xp_of(shard).zeros(part.stop - part.start, shard.dtype)
                whole[own.start - part.start : own.stop - part.start] = shard
                self.gather([(bucket, whole)]).wait()
                arrays |= {p.name: held.array for p, held in slices_in(part, whole)}
        return arrays

    def move_values(self) -> None:
        """Let parameters live where the communicator gathers them fastest, unless they do. Collective."""
        for flat in dict.fromkeys(bucket.range.flat for bucket in self.buckets):
            if flat.data is not self._moved.get(flat) and xp_of(flat.data) is np:
                flat.move_data(self.comm.buffer(flat.data.size, flat.data.dtype))
                self._moved[flat] = flat.data

    def gather(self, buckets: Sequence[tuple[Bucket, Array]]) -> Work:
        """Launch what brings every rank's share of some buckets to all, each into the array beside it."""

        def bounds(bucket: Bucket) -> list[int] | None:
            uneven = self._bounds[bucket.number]
            return None if uneven is None else [bound - bucket.range.start for bound in uneven]

        return gather_shards([(values, bounds(bucket)) for bucket, values in buckets], self.comm)

    def scale_to_norm(self, params: Iterable[Parameter], norm: float, max_norm: float) -> None:
        clip_arrays((grad for _, grad in self._own(params)), norm, max_norm)

    def _own(self, params: Iterable[Parameter]) -> Iterator[tuple[FlatRange, Array]]:
        """Yield what this rank has of some parameters, and its gradients."""
        chosen = set(params)
        for number, shard in enumerate(self.shards):
            grad = self.shard_grad(number)
            for is_chosen, run in groupby(shard.params, chosen.__contains__):
                if is_chosen:
                    inside = list(run)
                    start, stop = max(inside[0].start, shard.start), min(inside[-1].stop, shard.stop)
                    yield shard.cut(start, stop), grad[start - shard.start : stop - shard.start]

    def has_even_shards(self, bucket: Bucket) -> bool:
        """Return whether no parameter of a bucket must stay whole, so that ranks have equal shares of it."""
        return self._bounds[bucket.number] is None

    def _hook_of(self, bucket: Bucket) -> CommHook:
        return self._shard_hook if self.has_even_shards(bucket) else self._comm_hook

    def _final_hold(self, p: Parameter) -> Hold:
        return self._reduced if p in self._whole_here else SHARDED


@dataclass(frozen=True)
class NormOverShards:
    """The whole model, of which this rank has shards, for an optimizer that clips by its norm.

    Making one is collective.

    Raises:
        ValueError: some rank holds no parameter.
    """

    buckets: ShardedBuckets
    part: ModelPart

    def __post_init__(self) -> None:
        check_held_everywhere(self.part)

    def counted_grads(self) -> Sequence[Array]:
        self.buckets.finish()
        return self.buckets.own_grads(self.part.counted_parameters(), "the norm of")

    def add_up(self, squares: Array) -> None:
        for comm in (self.buckets.comm, self.part.comm):
            comm.allreduce(squares).wait()


class ShardedOptimizer(Optimizer):
    """Steps this rank's shards, and lets the parameters be gathered while the next forward runs.

    Making one is collective: parameters move into memory that ranks of one host share.

    Args:
        buckets: of a DistributedDataParallel with zero=1 or 2.
        rule, options: see `Optimizer`.

    Where ops see another precision, `use_precision` comes before this is made.
    """

    def __init__(self, buckets: ShardedBuckets, rule: Rule, **options: Unpack[OptimizerOptions]) -> None:
        for shard in (shard for by_rank in buckets.shards_by_rank for shard in by_rank):
            list(divided(shard, rule))  # what a rule refuses, it refuses on every rank
        super().__init__(buckets.params, rule, parts=buckets.shards, **options)
        # In half precision what is trained is here, in shards, and the parameters have the copy that ops see.
        self._masters = [part.data.copy() if part.copy is not None else None for part in buckets.shards]
        self._master_dtypes = {part.flat: part.data.dtype for part in buckets.shards if part.copy is not None}
        for flat in self._master_dtypes:
            flat.drop_master()
        buckets.move_values()
        self._buckets = buckets
        self._ranges = FlatBuffer.ranges_of(self.params)
        self._arrivals: list[Arrival] = []
        self._has_all = True

    def step(self) -> None:
        """Update this rank's shards, and launch what brings everybody's to all. Collective.

        Raises:
            RuntimeError: somebody holds one of the gradients.
        """
        self._buckets.check_reduced("optimizer.step() with")
        self._land_arrivals()
        step = self.num_steps
        if self._whole_step is not None:
            if not self.is_captured:
                self.advance()
            self._prepare_whole_step()
        elif not self._may_step():
            return
        self._has_all = False
        runs = self._updated_runs(step)
        try:
            self._arrivals = [self._gather(run) for run in runs]
        finally:
            for _ in runs:  # where a gather fails, as a rank is dead: no shard is left behind
                pass
        for whole in self._ranges:
            whole.note_step("the optimizer")
        if self.is_captured:
            self._land_arrivals()  # a graph has all that it begins; no host waits

    def _updated_runs(self, step: int) -> Iterator[list[Bucket]]:
        """Update this rank's shards, and yield the buckets that are gathered together, as one after the other can be.

        Those of the first layers come first.
        """
        for bucket in self._buckets.buckets:
            self._update_shard(bucket, step)
        self._count()
        yield from runs_to_gather(filter(is_trained, reversed(self._buckets.order.buckets)))

    def _count(self) -> None:
        """Count a step once all shards are updated, whether others can be told or not; a GPU's is counted already."""
        if self._whole_step is None:
            self.num_steps += 1

    def _update_shard(self, bucket: Bucket, step: int) -> None:
        """Update this rank's share of a bucket."""
        part, master = self._parts[bucket.number], self._masters[bucket.number]
        grad = self._buckets.shard_grad(bucket.number)
        if self._whole_step is not None:
            ((values, *arrays, copy, kinds),) = self._on_device(part, grad)
            if master is None:
                self._whole_step.update(values, *arrays, copy, kinds)
            else:
                self._whole_step.update(master, *arrays, values, kinds, follows=True)
        elif master is None:
            self._update(part, part.data, grad, step)
        else:
            _follow(master, part.data)
            self._update(part, master, grad, step)
            part.data[...] = master

    def _gather(self, run: Sequence[Bucket]) -> Arrival:
        """Launch what brings the parameters of some buckets to all ranks."""
        comm, recorder = self._buckets.comm, self._buckets.recorder
        params = [p for bucket in run for p in bucket.range.params]
        parts = [(bucket, bucket.range.data) for bucket in run]
        size = f"{sum(values.nbytes for _, values in parts) / 2**20:.2f} MiB"
        work = recorder.watch("gather", size, lambda: self._buckets.gather(parts))

        def bring() -> None:
            with waiting_for_values(params, comm, recorder):
                work.wait()

        return Arrival(params, bring)

    def finish(self) -> None:
        self._land_arrivals()
        self._buckets.finish()

    def _land_arrivals(self) -> None:
        """Block until all parameters are there."""
        for arrival in self._arrivals:
            arrival.land()
        self._has_all |= bool(self._arrivals)  # none where it failed to launch them
        self._arrivals = []

    def _clip(self, norm_over: NormOver | None, max_norm: float) -> float:
        assert norm_over is not None
        norm = norm_of_parts(norm_over)
        self._buckets.scale_to_norm(self.params, norm, max_norm)
        return norm

    def state_arrays(self) -> NoReturn:
        """Refuse: there are only shards here.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("this rank has its own shards of the optimizer's state only: see state_slices")

    def master_slices(self) -> Iterator[tuple[Parameter, TensorSlice]]:
        for part, master in zip(self._parts, self._masters, strict=True):
            if master is not None:
                yield from slices_in(part, master)

    def whole_masters(self) -> dict[str, Array]:
        return self._buckets.whole(self._masters)

    def master_dtype(self, p: Parameter) -> np.dtype[Any] | None:
        return None if p.flat is None else self._master_dtypes.get(p.flat)

    def value_slices(self) -> Iterator[tuple[Parameter, TensorSlice]]:
        """Yield masters, this rank's shards of parameters that are being gathered, and all of others."""
        yield from self.master_slices()
        for p in self.params if self._has_all else ():
            if self.master_dtype(p) is None:
                yield p, TensorSlice.whole(p.data)
        for part, master in zip(self._parts, self._masters, strict=True):
            if master is None and not self._has_all:
                yield from slices_in(part, part.data)


def is_trained(bucket: Bucket) -> bool:
    """Return whether a step changes values of a bucket."""
    return any(p.requires_grad for p in bucket.range.params)


def runs_to_gather(buckets: Iterable[Bucket]) -> Iterator[list[Bucket]]:
    """Yield buckets in this order, as many as are gathered together."""
    run: list[Bucket] = []
    for bucket in buckets:
        if run and bucket.range.flat is not run[0].range.flat:
            yield run
            run = []
        run.append(bucket)
        values = [b.range.data for b in run]
        if sum(v.nbytes for v in values) >= (GATHER_BYTES if xp_of(values[0]) is np else GPU_GATHER_BYTES):
            yield run
            run = []
    if run:
        yield run


def _follow(master: Array, values: Array) -> None:
    """Take over into `master` what somebody assigned to the parameters, which have its values in half precision."""
    bits = f"u{values.dtype.itemsize}"  # so that nan equals itself
    assigned = master.astype(values.dtype).view(bits) != values.view(bits)
    if assigned.any():
        master[assigned] = values[assigned]
