"""Gradient buckets: slices of the flat gradients that are reduced while backward still runs. `plan.py` cuts them.

A bucket is launched from inside the hook that brings its last gradient, but never before the buckets in front of it:
ranks match collectives by call order, and another rank may finish its gradients in another order. That order is the
model's, backwards, until `LaunchOrder` takes the one in which rank 0's backward completes them. Buckets stay as cut.

The mean over ranks is weighted here and nowhere else: each rank multiplies by its share of the samples
just before the launch, so that the sum over ranks is the mean. Where all have the same share and gradients travel as
they are, the communicator does both.

How a bucket travels is a parameter, the comm hook. What a rank has of it afterwards, all or a shard, and when, is said
by what a subclass may override: `_launch` and `_land` one bucket, the hold that `_final_hold` gives a gradient, and the
optimizer that steps with it. `reduction.py` chooses among them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import numpy as np

from distributed.clipping import ModelPart, NormOverRanks, PartNorm
from distributed.comm.communicator import Communicator, Work
from distributed.data_parallel.buckets.bucket import BROKEN, REDUCING, UNREDUCED, Bucket, OptimizerOptions
from distributed.data_parallel.buckets.launch_order import LaunchOrder
from distributed.data_parallel.buckets.plan import default_bucket_bytes, plan_buckets
from distributed.data_parallel.buckets.verdict import Verdict
from distributed.data_parallel.comm_hooks import CommHook, allreduce, average
from distributed.trace.recorder import Recorder
from minigrad.backend import xp_of
from minigrad.flat_range import FlatRange
from minigrad.optim import Optimizer
from minigrad.optim.clipping import NormOver, scale_to_norm
from minigrad.optim.update_rules import Rule
from minigrad.parameter import Hold, Parameter, check_resettable

THE_VERDICT = "which parameters the other ranks reached"  # what a rank waits for once all buckets are there


class GradientBucketManager:
    """Packs gradients into buckets and averages each over ranks as soon as it is complete.

    In a backward it is driven by `start` and `mark_ready`, as hooks. It can also be used alone, with gradients that
    somebody else computes: give (name, size, dtype) triples in model order, write into `grad(name)`, and call
    `reset()`, `mark_ready(name)` for each, `wait()`.

    After an exception in a backward, `fail` is called as a hook; the way back is `cancel`, which says what it costs.

    Args:
        params: parameters, or triples, in model order: backward finishes them in reverse.
        comm: the ranks to average over; every rank gives the same layout.
        bucket_bytes: a bucket is closed when the next gradient would exceed this; one gradient may be larger. None: a
            sixteenth of all gradients, within 512 KiB and 25 MiB.
        last: parameters among `params` that are final only after the backward; each gets a bucket, at the end.
        comm_hook: how a bucket travels; the same on every rank.
        recorder: notes when a bucket is under way.

    Attributes:
        buckets: in model order, backwards.
        order: in which all ranks launch them.
        under_way: a backward has begun, and neither `wait` nor `cancel` has ended it.
        num_launched: buckets of this backward that are on their way, or there.
        unused: names of parameters that require grad and that no rank's backward reached, as of the last `wait`.

    Raises:
        ValueError: bucket_bytes is not positive, or a name is given twice.
    """

    def __init__(
        self,
        params: Iterable[Parameter | tuple[str, int, Any]],
        comm: Communicator,
        *,
        bucket_bytes: int | None = None,
        last: Sequence[Parameter] = (),
        comm_hook: CommHook = allreduce,
        recorder: Recorder | None = None,
    ) -> None:
        if bucket_bytes is not None and bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
        self.comm = comm
        self.params = list(dict.fromkeys(p if isinstance(p, Parameter) else _from_triple(*p) for p in params))
        limit = default_bucket_bytes(self.params) if bucket_bytes is None else bucket_bytes
        parts = plan_buckets(self.params, limit, last)
        self.buckets = [
            Bucket(i, f"bucket {i} of {len(parts)}, {part.params[0].name} ...", part) for i, part in enumerate(parts)
        ]
        self.order = LaunchOrder(self.buckets, len(set(last)), comm)
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.range.params}
        self._by_name = {p.name: p for p in self.params}
        self.recorder = Recorder() if recorder is None else recorder
        self._comm_hook = self.recorder.comm_hook(comm_hook)
        self._averages: dict[CommHook, CommHook] = {}  # what does the same, and multiplies by equal shares
        if comm_hook is allreduce:
            self._averages[self._comm_hook] = self.recorder.comm_hook(average)
        self.unused: list[str] = []
        self._verdict = Verdict(self.params, comm)
        self.under_way = False
        self.num_launched = 0
        self._share = 1.0
        self._is_even = False  # whether all ranks have the same share
        self._unreduced = UNREDUCED if comm.size > 1 else None  # one rank has nobody to drift away from
        self._reduced = Hold(
            "its grad is already reduced over ranks; call zero_grad() first", final=True, after_reset=self._unreduced
        )
        for p in self.params:
            if p.hold is None:
                p.hold = self._unreduced

    @property
    def num_buckets(self) -> int:
        return len(self.buckets)

    @property
    def grad_bytes(self) -> int:
        """Memory that this rank has for gradients between two steps."""
        return sum(
            bucket.range.flat.grad.itemsize * (bucket.range.stop - bucket.range.start) for bucket in self.buckets
        )

    def grad(self, name: str) -> Any:
        """Return the gradient called `name`: a view into its bucket, averaged in place by `wait`."""
        return self._by_name[name].grad_view()

    def move_gradients(self) -> None:
        """Let the gradients live where the communicator reduces them fastest. Collective.

        Every rank must have them in the same places of its flats: see `check_buckets`.
        """
        for flat in dict.fromkeys(bucket.range.flat for bucket in self.buckets):
            if self.comm.size > 1 and xp_of(flat.grad) is np:
                flat.move_grad(self.comm.buffer(flat.grad.size, flat.grad.dtype))

    def reset(self, share: float | None = None) -> None:
        """Expect every gradient anew.

        Args:
            share: this rank's weight in the mean; the shares of all ranks sum to 1. Equal by default.
        Raises:
            RuntimeError: the last reduction was not waited for.
        """
        self.check_idle()
        self._begin(share, [True] * len(self.params), is_even=False)

    def start(self, reached: Sequence[Parameter], share: float | None = None, *, is_even: bool = False) -> None:
        """Begin a backward that will reach these parameters; the others are ready at once, as zeros without a grad.

        Args:
            share: see `reset`.
            is_even: whether all ranks are known to have the same share; all know it or none.
        Raises:
            ValueError: a parameter is reached that is not among those to reduce.
            RuntimeError: the last reduction was not waited for, or its result is still there: no zero_grad since.
        """
        self.check_idle()
        for p in reached:
            if p not in self._bucket_of:
                rule = f"backward reaches {p.label}, which is not among the parameters to reduce"
                raise ValueError(self._message(rule))
        used = set(reached)
        for p in self.params:
            if p.hold is not None and not p.hold.open:
                self._open_again(p, is_reached=p in used)
        self._begin(share, [p in used or self._was_reached(p) for p in self.params], is_even=is_even)
        for p in self._bucket_of.keys() - reached:
            self._close(p)
        if reached:  # or it is no backward, and shows no order
            self.order.completed = [bucket.number for bucket in self.buckets if not bucket.pending]
        self._launch_complete()

    def _open_again(self, p: Parameter, *, is_reached: bool) -> None:
        """Refuse a gradient that is reduced already: the sum over ranks would count it once for each of them.

        Of a frozen parameter it is of an earlier step, and travels as zeros.
        """
        if is_reached or p.requires_grad:
            p.refuse_grad("backward into" if is_reached else "a second reduction of")
        p.grad = None

    def _begin(self, share: float | None, reached: Sequence[bool], *, is_even: bool) -> None:
        """Expect the gradients; `reached` says of each parameter whether this rank adds to it, or has."""
        for bucket in self.buckets:
            bucket.pending = set(bucket.range.params)
            bucket.work, bucket.is_landed = None, False
        self._share = 1 / self.comm.size if share is None else share
        self._is_even = is_even and self.comm.size > 1
        self._verdict.reset(reached)
        self.num_launched = 0
        self.order.completed = []
        self.under_way = True

    def mark_ready(self, param: Parameter | str) -> None:
        """Note that a gradient is final; launch what is complete and next in line.

        Raises:
            RuntimeError: no backward is under way, or it was marked before.
            KeyError: no such parameter.
        """
        p = self._by_name[param] if isinstance(param, str) else param
        if not self.under_way:
            raise RuntimeError(self._message(f"on_grad_ready({p.name!r}) outside a backward; call reset() first"))
        bucket = self._bucket_of[p]
        if p not in bucket.pending:
            raise RuntimeError(self._message(f"on_grad_ready({p.name!r}) called twice in one backward"))
        self._close(p)
        if not bucket.pending:
            self.order.completed.append(bucket.number)
            self._launch_complete()

    def wait(self) -> None:
        """Block until every gradient is averaged.

        Raises:
            RuntimeError: nothing is being reduced, or a gradient was never marked ready, or another rank gave this
                backward up by `cancel`: then it is given up here too.
        """
        if not self.under_way:
            raise RuntimeError(self._message("wait() without a reduction; run a backward with the hooks first"))
        if self.num_launched < self.num_buckets:
            rule = "wait() before every gradient was ready; after an exception in the backward call cancel() instead"
            raise RuntimeError(self._message(rule))
        if not self._verdict.is_sent and self.order.is_outdated():  # a wait() may be the second one
            self._verdict.ask_for_order()
        unused = self._wait_for_step()
        if unused is None:
            self._drop()
            rule = "the backward of another rank ended with an exception: this step's gradients are dropped"
            raise RuntimeError(self._message(f"{rule} on all ranks, which can go on with the next one"))
        for p in self.params:
            p.hold = self._final_hold(p)
        self.under_way = False
        if self._verdict.wants_order:
            self.order.learn()
        if unused and unused != self.unused:
            warnings.warn(f"no rank's loss depends on {', '.join(unused)}: their gradients are zeros", stacklevel=3)
        self.unused = unused

    def fail(self) -> None:
        """Note that an exception has ended the backward: a hook, `on_error`.

        One rank alone gives the backward up: see `cancel`. One of several cannot, since the others wait for its
        part; until `cancel` nobody can use its gradients.
        """
        if self.comm.size == 1:
            self._drop()
        elif (self.under_way and self.num_launched < self.num_buckets) or self._has_unreduced():
            for p in self.params:
                p.hold = BROKEN

    def cancel(self) -> None:
        """Give up the backward under way, if there is one: its gradients are dropped, the next one starts clean.

        On several ranks, those call it whose backward ended with an exception, before they go on. It sends what the
        others wait for, and tells them: their `wait` raises, and drops this step's gradients there. So no rank takes
        this step, and all can go on. Blocks until the others have come that far.

        Raises:
            RuntimeError: on several ranks, `wait` has begun: the others may take this step.
        """
        if self.under_way and self.comm.size > 1:
            if self._verdict.is_sent and not self._verdict.is_given_up:
                raise RuntimeError(
                    self._message("cancel() inside wait(): other ranks may take this step; wait() again")
                )
            for bucket in self.buckets:
                bucket.pending.clear()
            self._launch_complete()
            self._verdict.give_up()
            self._wait_for_all()
        if self.under_way or any(p.hold is BROKEN for p in self.params):
            self._drop()

    def part_norm(self, params: Sequence[Parameter]) -> PartNorm:
        """Measure some gradients, after `wait`. Collective where ranks hold shards of them.

        Raises:
            RuntimeError: somebody holds one of them.
        """
        return PartNorm.of(params)

    def whole_grads(self) -> dict[str, Any]:
        """Return copies of all gradients after `wait`, by name. Collective where ranks hold shards of them."""
        return {p.name: p.grad_view().copy() for p in self.params}

    def scale_to_norm(self, params: Iterable[Parameter], norm: float, max_norm: float) -> None:
        """Scale some gradients as `minigrad.optim.clipping.scale_to_norm` does."""
        scale_to_norm(params, norm, max_norm)

    def norm_over(self, part: ModelPart) -> NormOver | None:
        """Return what an optimizer of these gradients clips by: the norm of the whole model. Collective.

        Args:
            part: that they are of.
        """
        return NormOverRanks(part) if part.comm.size > 1 else None

    def optimizer(self, rule: Rule, **options: Unpack[OptimizerOptions]) -> Optimizer:
        """Return what steps with these gradients; see `Optimizer`."""
        return Optimizer(self.params, rule, **options)

    def finish(self) -> None:
        """Block until nothing is on its way: a subclass may let `wait` return earlier."""

    def finish_untaken(self) -> None:
        """Block until nothing is on its way but what a step waits for that was taken: likewise."""

    def check_idle(self) -> None:
        """Raise RuntimeError if a backward is under way."""
        if self.under_way:
            rule = "a new backward before the last one was reduced to the end; call wait()"
            raise RuntimeError(self._message(f"{rule}, or after an exception cancel()"))

    def _wait_for_all(self) -> list[str] | None:
        """Block until every bucket is there, and the ranks' verdict on this step: see `Verdict.wait`."""
        self._verdict.send()
        awaited: Bucket | None = None

        def what() -> str:
            if awaited is None:
                return THE_VERDICT
            return awaited.name

        with self.comm.waiting_for(what):
            for awaited in self.order.buckets:
                self.settle(awaited)
            awaited = None
            return self._verdict.wait()

    def _wait_for_step(self) -> list[str] | None:
        """Block until this step can be taken, or is given up, on all ranks: see `Verdict.wait`."""
        return self._wait_for_all()

    def _drop(self) -> None:
        """Forget the backward under way and what it left in the gradients."""
        sent = {p for b in self.buckets if self.under_way and b.work is not None for p in b.range.params}
        self.under_way = False
        for bucket in self.buckets:
            bucket.work, bucket.is_landed = None, False
        for p in self.params:
            # Final ones are of the step before, and whole, unless they have been reduced a second time since.
            if p.hold is None or not p.hold.final or p in sent:
                p.hold = self._unreduced
                p.grad = None

    def _has_unreduced(self) -> bool:
        """Return whether a gradient holds what no other rank has seen."""
        return any(p.hold is UNREDUCED and p.has_grad for p in self.params)

    def _was_reached(self, p: Parameter) -> bool:
        """Return whether a gradient needs no backward any more: it is there from before, or none is wanted."""
        return p.has_grad or p.hold is self._final_hold(p) or not p.requires_grad

    def _launch_complete(self) -> None:
        """Launch buckets in their order, up to the first that is not complete."""
        while self.num_launched < self.num_buckets and not self.order.buckets[self.num_launched].pending:
            bucket = self.order.buckets[self.num_launched]
            with self.comm.calls_about(bucket.name):
                bucket.work = self._launch(bucket)
            self.num_launched += 1

    def _launch(self, bucket: Bucket) -> Work:
        """Send a bucket on its way."""
        grad, hook = bucket.range.grad, self._hook_of(bucket)  # zeros where no backward reached
        if self._is_even and hook in self._averages:
            return self._averages[hook](grad, self.comm)
        if self._share != 1:
            grad *= grad.dtype.type(self._share)
        return hook(grad, self.comm)

    def _hook_of(self, bucket: Bucket) -> CommHook:
        """Return how a bucket travels."""
        return self._comm_hook

    def part_here(self, bucket: Bucket) -> FlatRange:
        """Return the part of a bucket whose sum this rank has once it has landed."""
        return bucket.range

    def settle(self, bucket: Bucket) -> None:
        """Block until a bucket that was launched is there."""
        if not bucket.is_landed:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.is_landed = True
            self._land(bucket)

    def _land(self, bucket: Bucket) -> None:
        """Take what has come of a bucket: called once, when its reduction is over."""

    def _final_hold(self, p: Parameter) -> Hold:
        """Return what a gradient is once it is reduced."""
        return self._reduced

    def _close(self, p: Parameter) -> None:
        """Take a final gradient: from here on nothing may be added to it."""
        check_resettable([p], "a second reduction of")
        p.hold = REDUCING
        self._bucket_of[p].pending.remove(p)

    def _message(self, rule: str) -> str:
        pending = [p.name for bucket in self.buckets for p in bucket.range.params if p in bucket.pending]
        return f"[rank {self.comm.rank}] {rule}" + (f"; pending: {', '.join(pending)}" if pending else "")


def _from_triple(name: str, size: int, dtype: Any) -> Parameter:
    return Parameter(np.zeros(size, dtype), name)
