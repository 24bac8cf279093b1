"""Data parallelism: every rank holds the model, takes its own samples, and averages gradients with the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import SupportsFloat, TypeVar

import numpy as np

from distributed.agreement import same_on_all
from distributed.clipping import ModelPart, WholeModel, clip_by_global_norm, global_norm
from distributed.comm.communicator import Array, Communicator
from distributed.data_parallel.buckets.bucket import Bucket
from distributed.data_parallel.comm_hooks import CommHook, allreduce
from distributed.data_parallel.join import until_all_are_through
from distributed.data_parallel.reduction import Reduction
from distributed.data_parallel.replicas import (
    BUFFERS,
    broadcast_params,
    check_buckets,
    check_equal,
    check_layout,
    sync_buffers,
)
from distributed.data_parallel.shares import NO_SAMPLES, Share, count
from distributed.protocols import HasParameters
from distributed.trace.clock import clock_of
from distributed.trace.recorder import Recorder
from minigrad import habits
from minigrad.autodiff.hooks import Hooks
from minigrad.autodiff.mode import check_told_again
from minigrad.backend import xp_of
from minigrad.nn import Buffer
from minigrad.optim import Optimizer, is_matrix
from minigrad.optim.update_rules import Rule
from minigrad.parameter import Parameter

T = TypeVar("T")


class DistributedDataParallel:
    """Keeps a model's replicas equal.

    Rank 0's parameters are broadcast once, then gradients are averaged inside each backward.

        hooks = ddp.hooks(num_samples=len(x))
        with rng.scope(seed=seed, step=step, first_sample=ddp.first_sample):    # only where layers draw
            loss = loss_fn(model(x), y)                                         # the mean over this rank's samples
        backward_with_hooks(loss, hooks)
        ddp.wait()
        optimizer.step()

    A backward without the hooks accumulates on this rank alone. On several ranks its gradients cannot be used until a
    backward with the hooks has averaged the sum: a step with them is an error. Making one is collective.

    After an exception in a backward that the caller goes on from, Ctrl-C in a notebook for one, a single rank needs
    nothing: the gradients of that step are gone, and the next `hooks` or zero_grad starts clean. With several ranks,
    the one that failed calls `cancel` first; what the others do is said there. A rank that has ended, or that waits
    inside a pipeline, cannot be gone on from: start again from a checkpoint.

    Args:
        model: its parameters are all reduced, frozen ones too. Where it has `tied` parameters (stages of a pipeline),
            these get the last buckets.
        comm: the ranks that hold replicas.
        bucket_bytes, comm_hook: see `GradientBucketManager`.
        zero: what ranks share out among them and no longer hold each: 0 nothing, 1 the optimizer's state, 2 that and
            gradients; see `zero/sharded.py`. Make the optimizer by `ddp.optimizer(rule)`. One rank alone has all, as
            with 0.
        whole: which parameters no shard cuts: with zero, what a rule needs whole, such as `is_hidden_matrix` of
            `minigrad.optim.muon`.
        step_early: let `wait` return, and a step begin, before all buckets are there; the next forward waits only for
            the layers that it needs: see `buckets/early.py`. Make the optimizer by `ddp.optimizer(rule)`.
        sums: "exact" adds gradients, norm and mean up so that every layout with the same micro-batches has the same
            bits: see `buckets/exact.py`. Twice the bytes travel between hosts, and on one host of gradients that are
            sums of several micro-batches.
        check_every: backwards with the hooks from one `check_replicas` to the next; 0 never checks.
        buffers: what `wait` does with buffers that training changes, such as running means: see `BUFFERS`.
        recorder: of the pipeline that the model is in, so that one timeline has all of it.

    Attributes:
        recorder: notes what runs when inside `with ddp.recorder:`, which goes around one step: forward, backward,
            buckets on their way, waits, optimizer.
        first_sample: index of this rank's first sample in the batch of all ranks, as of the last `hooks`.
        share: this rank's weight over that of all ranks, likewise.
        launched_buckets: as the last backward with the hooks launched them.
        is_awaited: other ranks count on a backward of this one, which took the hooks for it and has not called `wait`.

    Raises:
        ValueError: the ranks' parameters differ in name, shape or dtype, or their buckets do: by bucket_bytes, or by
            an optimizer made before that placed parameters otherwise. The same message on every rank. Or check_every
            is negative, buffers is none of `BUFFERS`, or one of them is not the same on all.
        TypeError: model or comm is something else, or an option is none of these.
    """

    @habits.own_options
    def __init__(
        self,
        model: HasParameters,
        comm: Communicator,
        *,
        bucket_bytes: int | None = None,
        comm_hook: CommHook = allreduce,
        zero: int = 0,
        whole: Callable[[Parameter], bool] | None = None,
        step_early: bool = False,
        sums: str = "plain",
        check_every: int = 0,
        buffers: str = "own",
        recorder: Recorder | None = None,
    ) -> None:
        if not hasattr(model, "parameters"):
            raise TypeError(f"DistributedDataParallel takes a model with parameters(), got {type(model).__name__}")
        if not isinstance(comm, Communicator):
            raise TypeError(f"DistributedDataParallel takes a communicator, such as world(), got {type(comm).__name__}")
        if check_every < 0:
            raise ValueError(f"check_every must not be negative, got {check_every}")
        if buffers not in BUFFERS:
            raise ValueError(f"buffers must be one of {', '.join(BUFFERS)}, got {buffers!r}")
        reduction = Reduction(bucket_bytes, comm_hook, zero, whole, step_early, sums)
        self.model = model
        self.params = list(model.parameters())
        self._part: ModelPart = model if isinstance(model, ModelPart) else WholeModel(self.params)
        self.comm = comm.duplicate()  # launches inside a backward must not meet the caller's own collectives
        check_layout("parameter", self.params, self.comm)
        settings = {
            "check_every": check_every,
            "zero": zero,
            "step_early": step_early,
            "sums": sums,
            "buffers": buffers,
        }
        same_on_all(self.comm, "setting", [f"{name}={value}" for name, value in settings.items()])
        self._is_exact = reduction.is_exact
        self._is_whole_step = recorder is None  # or the pipeline says what is computed
        if recorder is None:
            xp = xp_of(next((p.data for p in self.params), None))
            recorder = Recorder(first=("compute", "forward"), clock=clock_of(xp))
        self.recorder = recorder
        last = getattr(model, "tied", ())
        self.buckets = reduction.buckets(self.params, self.comm, last=last, recorder=self.recorder)
        check_buckets([bucket.range for bucket in self.buckets.buckets], self.comm)
        self.buckets.move_gradients()
        self.first_sample = 0
        self.share = 1 / comm.size
        self._check_every = check_every
        self._buffers = buffers
        self._num_backwards = 0
        self.is_awaited = False
        self.launched_buckets: Sequence[Bucket] = ()
        broadcast_params(self.params, self.comm)
        sync_buffers(self._own_buffers(), self.comm, None)

    def hooks(self, *, num_samples: int, weight: float | None = None, mean_over: float | None = None) -> Hooks:
        """Return the hooks for one backward over this rank's samples.

        Collective, and blocks for one small message: ranks weigh in the mean by their number of samples.

        Args:
            num_samples: of this rank in this step. Ranks hold consecutive samples.
            weight: over how many things the loss of this rank is the mean, where these are no samples: the tokens
                whose target counts, 0 where none does. num_samples by default; given on all ranks or on none.
            mean_over: where this backward is the last of some that add up: the weight of a loss that is taken as it
                is; each other one is multiplied by its own weight over this. `weight` by default: one loss alone.
        Raises:
            ValueError: num_samples is below 1 on some rank, or a weight is negative or not finite, or all are 0; the
                same message on every rank. Or mean_over of this one is not above 0 and finite.
            RuntimeError: the last backward is not over. Or another rank has left this step out, in `join`.
        """
        if mean_over is not None or (weight is not None and self.comm.size > 1):
            check_told_again("the weight of a loss", by_shapes=False)
        if self._is_exact and mean_over is not None:
            raise ValueError(
                "with sums='exact' each loss weighs by itself: give `weight`, of all losses of this rank, and start "
                "each backward from its own weight / hooks.mean_over"
            )
        if mean_over is not None and not 0 < mean_over < math.inf:
            raise ValueError(f"mean_over must be above 0 and finite, got {mean_over}")
        return self.hooks_for(self.count_samples(num_samples, weight), mean_over=mean_over)

    def count_samples(self, num_samples: int, weight: float | None = None) -> Array:
        """Return the numbers of samples, and the weights, of all ranks. Collective.

        (size, 2); a weight is NOT_GIVEN where there is none. See `hooks`.

        Args:
            num_samples: of this rank; see `hooks`.
            weight: of this rank's loss; see `hooks`.
        Raises:
            RuntimeError: the last backward is not over.
        """
        self.buckets.check_idle()
        self.buckets.finish_untaken()  # micro-batches add to gradients before the last of them calls `start`
        if self.comm.size > 1:
            check_told_again("how many samples they have")
        waiting = self.comm.waiting_for("the number of samples of each rank, in ddp.hooks")
        with self.recorder.span("wait", "sample counts"), waiting:
            return self.comm.allgather(count(num_samples, weight)).wait()

    def hooks_for(self, counts: Array, *, mean_over: float | None = None) -> Hooks:
        """Return the hooks for one backward, where `count_samples` has been called.

        See `hooks`. Collective where the weights are checked.

        Args:
            counts: what `count_samples` returned.
            mean_over: see `hooks`.
        """
        own = Share.of(self.comm.rank, counts)
        self._num_backwards += 1
        if self._check_every and self._num_backwards % self._check_every == 0:
            self.check_replicas()
        self.first_sample, self.share = own.first_sample, own.fraction
        # Exact sums are of what is weighted already: no factor after a sum, which would be another in each layout.
        factor = 1.0 if self._is_exact else (own.weight if mean_over is None else mean_over) / own.total
        weighted = {"weight": own.weight, "mean_over": own.total} if self._is_exact else {}
        is_even = own.is_even and mean_over is None and not self._is_exact  # as all ranks see alike
        self.is_awaited = True
        is_recorded = self.recorder.is_on

        def on_start(reached: Sequence[Parameter]) -> None:
            if is_recorded and self._is_whole_step:
                self.recorder.enter("compute", "backward")
            self.launched_buckets = self.buckets.order.buckets
            self.buckets.start(reached, factor, is_even=is_even)

        def on_grad_ready(param: Parameter) -> None:
            self.recorder.note_ready(param.name)
            self.buckets.mark_ready(param)

        mark_ready = on_grad_ready if is_recorded else self.buckets.mark_ready
        hooks = Hooks(on_start, mark_ready, self.comm.progress, on_error=self.buckets.fail, **weighted)
        return hooks + self.recorder.hooks() if self._is_whole_step else hooks

    def join(self, batches: Iterable[T]) -> Iterator[T | None]:
        """Yield this rank's batches, then None while other ranks have some left.

        Collective.

            for batch in ddp.join(batches):
                optimizer.zero_grad()
                if batch is None:
                    ddp.reduce_no_samples()
                else:
                    backward_with_hooks(loss_fn(*batch), ddp.hooks(num_samples=len(batch[0])))
                ddp.wait()
                optimizer.step()                # on every rank: replicas stay equal

        So all ranks take as many steps, and a mean is over the samples that there are, as in one process. Blocks for
        one small message a step.

        Raises:
            ValueError: the model is part of a pipeline, whose stages need all their micro-batches.
            RuntimeError: a rank has left a step out; the same message on every rank.
        """
        if self._part.comm.size > 1:
            raise ValueError("join is for replicas in one process each: in a pipeline all ranks need as many batches")
        return until_all_are_through(batches, self.comm)

    def reduce_no_samples(self) -> None:
        """Take part in a step with no samples, in place of `hooks` and a backward.

        Collective.

        Raises:
            RuntimeError: a backward without the hooks has left gradients here, which would be lost.
            ValueError: no rank has samples.
        """
        held = next((p for p in self.params if p.has_grad), None)
        if held is not None:
            raise RuntimeError(f"reduce_no_samples() with a gradient of {held.label}: call optimizer.zero_grad() first")
        hooks = self.hooks_for(self.count_samples(0, NO_SAMPLES))
        assert hooks.on_start is not None
        hooks.on_start(())

    def wait(self) -> None:
        """Block until all gradients are averaged over ranks.

        Call it before clipping and stepping.

        Raises:
            RuntimeError: no backward ran with the hooks, or not to its end; or another rank gave it up, and then all
                ranks have: see `cancel`.
        """
        began = self.buckets.under_way
        self.recorder.enter("wait", "buckets")
        try:
            self.buckets.wait()
            if self._buffers != "own":
                self.recorder.enter("wait", "buffers")
                self.sync_buffers()
        except BaseException:
            self.recorder.leave()
            raise
        finally:
            if began and not self.buckets.under_way:
                self.is_awaited = False
        if self._is_whole_step:
            self.recorder.enter("compute", "optimizer")
        else:
            self.recorder.leave()

    @property
    def bucket_params(self) -> list[list[Parameter]]:
        """The parameters of each bucket, in the order in which all ranks launch them."""
        return [list(bucket.range.params) for bucket in self.buckets.order.buckets]

    def optimizer(
        self, rule: Rule, *, decays: Callable[[Parameter], bool] = is_matrix, max_norm: float | None = None
    ) -> Optimizer:
        """Return an optimizer of the model.

        Where ranks share its state out it is of this rank's shards. Collective.

        Args:
            rule, decays: see `Optimizer`.
            max_norm: clip by the norm of the whole model in each step, and take none where that is infinite or nan; see
                `Optimizer`. Where it is given a step is collective. None: clip by `clip_by_global_norm`, or not at all.
        Raises:
            ValueError: max_norm is not positive, or some rank of a pipeline holds no parameter, or sums are exact, by
                whose exact norm `clip_by_global_norm` clips.
        """
        if max_norm is not None and self._is_exact:
            raise ValueError("an optimizer clips by no exact norm: with sums='exact' call ddp.clip_by_global_norm")
        norm_over = None if max_norm is None else self.buckets.norm_over(self._part)
        return self.buckets.optimizer(rule, decays=decays, max_norm=max_norm, norm_over=norm_over)

    def clip_by_global_norm(self, max_norm: float) -> float:
        """Scale all gradients so that their norm is at most `max_norm`. Collective.

        They are multiplied by max_norm / norm where the norm of the whole model is larger. In any layout: over the
        stages of a pipeline, over shards, and in one process; with sums="exact" exactly.
        `distributed.clip_by_global_norm` is this for gradients that no rank has in shards.

        Args:
            max_norm: above 0; infinity only measures.
        Returns:
            The norm before clipping, the same on every rank.
        Raises:
            ValueError: max_norm is not positive.
            RuntimeError: gradients are not averaged yet: call it after `wait`.
        """
        return clip_by_global_norm(self._part, max_norm, self.buckets)

    def grad_norm(self) -> float:
        """Return the gradient norm of the whole model, the same on every rank.

        Collective; after `wait`.
        """
        return global_norm(self._part, self.buckets)

    def cancel(self) -> None:
        """Give up the step that an exception has ended.

        Its gradients are dropped, and the next one starts clean.

            try:
                backward_with_hooks(model_loss(x), ddp.hooks(num_samples=len(x)))
                ddp.wait()
            except (MemoryError, RuntimeError):     # of this rank, or because another one has cancelled
                ddp.cancel()
                continue                            # all ranks leave this step out
            optimizer.step()

        On several ranks, each rank that had the exception calls it, before anything else of this DDP; the others get
        a RuntimeError from `wait`. Where there is nothing to give up it does nothing.

        Raises:
            RuntimeError: on several ranks, `wait` has begun: the others may take this step.
        """
        if self.is_awaited and not self.buckets.under_way and self.comm.size > 1:
            self.buckets.reset()  # the exception came before the backward, which the others wait for all the same
        self.buckets.cancel()
        self.is_awaited = False

    def sync_buffers(self) -> None:
        """Give every rank the same buffers. Collective.

        They are rank 0's, or with `buffers="mean"` the mean of all. Rank 0's are taken once when this is made. After
        that each rank's are its own, unless `buffers` says otherwise, since only their module knows what they mean:
        call this before evaluating or saving if training changes them. The model is asked anew which buffers it has: a
        module may have assigned others.

        Raises:
            ValueError: the ranks have different buffers; the same message on every rank.
        """
        sync_buffers(self._own_buffers(), self.comm, self.share if self._buffers == "mean" else None)

    def _own_buffers(self) -> list[Buffer]:
        return list(getattr(self.model, "buffers", tuple)())

    def check_replicas(self) -> None:
        """Check that the weights of all ranks are equal, bit by bit. Collective.

        See `check_every`.

        Raises:
            RuntimeError: names the first parameter that differs, and where; the same message on every rank.
        """
        with self.comm.waiting_for("the fingerprints of all ranks' weights"):
            check_equal(self.params, self.comm)

    def mean(self, value: SupportsFloat) -> float:
        """Average a number over ranks, weighted as the gradients of the last `hooks`.

        Collective: every rank calls it, in the same place of the step, also those that will not print the result.

        Args:
            value: a number, or a loss.
        """
        total = np.array([float(value) * self.share])
        waiting = self.comm.waiting_for("ddp.mean(...), which every rank has to call")
        with self.recorder.span("wait", "mean"), waiting:
            if self._is_exact:  # rounded to what a loss has: no order of the sum shows
                return float(np.float32(math.fsum(self.comm.allgather(total).wait()[:, 0])))
            return float(self.comm.allreduce(total).wait()[0])


habits.teach(DistributedDataParallel, habits.REPLICATED)
