"""A step before all gradients are there: each bucket's parameters are updated when it has arrived.

    backward   ...|b0|b1|b2|
    messages       ---0--- ---1--- ---2---
    wait()                 |                    every rank has come to the end of its backward: nobody gives it up
    step()                 |u0|                 what has arrived; the rest is hidden
    forward                   |..u1..|..u2..|   waits for a bucket where it reads the first parameter of it

The contract is another one than that of the plain step. `wait()` has agreed that all ranks take this step, so that
`cancel` works as ever; what fails after it, a message that never comes, ends the run. `.grad` of a bucket that is still
on its way refuses to be read. A norm needs all buckets, so a step that clips waits for them. The bits are those of the
plain step: the same sums, the same updates, the same numbers of the step.

On a GPU, where NCCL reduces, no host waits for a bucket, so nothing is left for the next forward: updates begin in the
order in which buckets arrive, and the last ones travel beside the first updates. A CUDA graph can have all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Unpack

from distributed.clipping import PartNorm
from distributed.comm.communicator import Communicator
from distributed.data_parallel.buckets.arrivals import Arrival, waiting_for_values
from distributed.data_parallel.buckets.bucket import UNREDUCED, Bucket, BucketOptions, OptimizerOptions
from distributed.data_parallel.buckets.manager import THE_VERDICT, GradientBucketManager
from minigrad.flat_range import TensorSlice
from minigrad.habits import own_options
from minigrad.optim import Optimizer
from minigrad.optim.update_rules import Rule
from minigrad.parameter import Hold, Parameter, check_usable

RESET = Hold(
    "its bucket of the last step is still on its way; a step and the next forward, or ddp.hooks, wait for it",
    is_reset=True,
)
ON_ITS_WAY = Hold(
    "its grad is still on its way: step by ddp.optimizer(rule), clip by ddp.clip_by_global_norm",
    final=True,
    partial=True,
    after_reset=RESET,
)


class EarlyBuckets(GradientBucketManager):
    """Buckets that may still be on their way when `wait` returns.

    Attributes:
        arrivals: parameters that an optimizer updates when their bucket is there.
    """

    def __init__(self, params: Iterable[Parameter], comm: Communicator, **options: Unpack[BucketOptions]) -> None:
        super().__init__(params, comm, **options)
        self.arrivals: list[Arrival] = []

    def finish(self) -> None:
        """Block until every bucket is there, and every parameter updated."""
        self.land_arrivals()
        for bucket in self.buckets:
            if bucket.work is not None:
                self.settle(bucket)

    def land_arrivals(self) -> None:
        """Block until every parameter is updated."""
        for arrival in self.arrivals:
            arrival.land()
        self.arrivals = []

    def finish_untaken(self) -> None:
        if not self.arrivals:
            self.finish()

    def part_norm(self, params: Sequence[Parameter]) -> PartNorm:
        check_usable(params, "the norm of", in_part=True)
        self.finish()
        return super().part_norm(params)

    def optimizer(self, rule: Rule, **options: Unpack[OptimizerOptions]) -> Optimizer:
        return EarlyOptimizer(self, rule, **options)

    def whole_grads(self) -> dict[str, Any]:
        self.finish()
        return super().whole_grads()

    def start(self, reached: Sequence[Parameter], share: float | None = None, *, is_even: bool = False) -> None:
        self.finish()  # where no step was taken, and where nobody has read a parameter since
        super().start(reached, share, is_even=is_even)

    def reset(self, share: float | None = None) -> None:
        self.finish()
        super().reset(share)

    def _wait_for_step(self) -> list[str] | None:
        with self.comm.waiting_for(THE_VERDICT):
            unused = self._verdict.wait()
        return self._wait_for_all() if unused is None else unused

    def _land(self, bucket: Bucket) -> None:
        super()._land(bucket)
        for p in bucket.range.params:
            if p.hold is ON_ITS_WAY:
                p.hold = super()._final_hold(p)
            elif p.hold is RESET:
                p.hold = UNREDUCED

    def _final_hold(self, p: Parameter) -> Hold:
        return super()._final_hold(p) if self._bucket_of[p].is_landed else ON_ITS_WAY


class EarlyOptimizer(Optimizer):
    """Updates each bucket's parameters when its gradients are there, some of them in the next forward.

    Args:
        buckets: of a DistributedDataParallel with step_early=True.
        rule, options: see `Optimizer`.
    """

    def __init__(self, buckets: EarlyBuckets, rule: Rule, **options: Unpack[OptimizerOptions]) -> None:
        super().__init__(buckets.params, rule, parts=[bucket.range for bucket in buckets.buckets], **options)
        self._buckets = buckets

    def step(self) -> None:
        """Update what is there, and let the rest follow.

        Raises:
            RuntimeError: somebody holds one of the gradients.
        """
        check_usable(self.params, "optimizer.step() with", in_part=True)
        if self.max_norm is not None:
            self._buckets.finish()
            super().step()
            return
        self._buckets.land_arrivals()  # of a step before, if nobody has read them
        step = self.num_steps
        if self._whole_step is not None:
            if not self.is_captured:
                self.advance()
            self._whole_step.prepare([])
        else:
            self.num_steps += 1
        for bucket in self._buckets.order.buckets:
            wait, update = self._parts_of_step(bucket, step)
            if bucket.work is None or bucket.is_landed or bucket.work.done_event is not None or bucket.work.test():
                wait()
                update()
            else:
                self._buckets.arrivals.append(Arrival(bucket.range.params, wait, update))
            bucket.range.note_step("the optimizer", copied=True)

    def state_slices(self) -> Iterator[tuple[str, TensorSlice]]:
        self._buckets.land_arrivals()
        return super().state_slices()

    @own_options
    def zero_grad(self) -> None:
        """Mark all gradients fresh; those of a step that was not taken have to come first."""
        self._buckets.finish_untaken()
        super().zero_grad()

    def finish(self) -> None:
        self._buckets.finish()

    def _parts_of_step(self, bucket: Bucket, step: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return what waits for a bucket, and what updates its parameters."""
        part, buckets = bucket.range, self._buckets

        def wait() -> None:
            if bucket.work is not None and not bucket.is_landed:
                with waiting_for_values(part.params, buckets.comm, buckets.recorder):
                    buckets.settle(bucket)

        def update() -> None:
            # Not `part.grad`: zero_grad has come in between, perhaps, and would have it filled with zeros.
            grad = part.flat.grad_slice(part.start, part.stop)
            if self._whole_step is None:
                self._update(part, part.data, grad, step)
                part.refresh_copy()
                return
            for arrays in self._on_device(part, grad):
                self._whole_step.update(*arrays)

        return wait, update
