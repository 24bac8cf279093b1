"""PipelineExecutor: a step over a batch, on one rank of a pipeline.

A program is made of actions (`program`) and run one task after another (`runner`), so this file knows no schedule.
What a step needs beside them is done once, around them:

    begin     one allgather: what every rank was given; bad input raises on all ranks, before any message
    program   receives, forwards, backwards, sends; gradients of parameters are final at their last backward
    end       sends complete; tied weights summed; their hooks fired; the losses told to every rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import TypeVar

import numpy as np

from distributed.agreement import agree
from distributed.comm.communicator import Communicator
from distributed.trace.clock import clock_of
from distributed.trace.recorder import Recorder
from minigrad.autodiff.hooks import Hooks
from minigrad.autodiff.mode import no_grad
from minigrad.backend import Array, xp_of
from pipeline.runtime import microbatch
from pipeline.runtime.boundary import ArraySpec
from pipeline.runtime.handshake import Handshake, agree_on_orders, training_orders
from pipeline.runtime.local_stages import LocalStages
from pipeline.runtime.p2p import PointToPoint
from pipeline.runtime.program import Program, Programs
from pipeline.runtime.replicas import Reduces, replicas_of
from pipeline.runtime.runner import TaskRunner
from pipeline.runtime.step import Batch, LossFn, Mode, PipelineOutput, StepState
from pipeline.runtime.step_hooks import StepHooks
from pipeline.schedules.schedule import Schedule, check_schedule
from pipeline.schedules.whole_step import check_whole_step

T = TypeVar("T")


class PipelineExecutor:
    """Trains a model that is spread over the ranks of a pipeline.

    Making one, and every method, is collective over `comm`. A batch `x` is an array of samples or a list of
    `num_microbatches` arrays; only the first stage's rank needs x and only the last one's y, others may pass the
    same or None. A training step takes at least one sample for each micro-batch; where forwards stand alone (evaluate,
    predict, forward) a batch of fewer samples, or a shorter list, makes fewer micro-batches.

    Args:
        stages: this rank's part of the model.
        comm: the ranks of the pipeline.
        schedule: the order of work; see SCHEDULES.
        num_microbatches: parts that a batch is split into.
        loss_fn: (output, y) -> the mean loss over the samples of one micro-batch; needed on the last stage.

    Attributes:
        recorder: notes what runs when inside `with pipe.recorder:`.
    Raises:
        ValueError: num_microbatches < 1, the schedule does not allow these sizes (asked only with a loss_fn: forwards
            alone run with any), stages do not fit it, or ranks were given different ones; the same on every rank.
        TypeError: stages, schedule or loss_fn is something else.
    """

    def __init__(
        self,
        stages: LocalStages,
        comm: Communicator,
        schedule: Schedule,
        *,
        num_microbatches: int,
        loss_fn: LossFn | None = None,
    ) -> None:
        check_schedule(schedule)
        if not isinstance(stages, LocalStages):
            raise TypeError(f"PipelineExecutor takes what PipelineStage.of returns, got {type(stages).__name__}")
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function of an output and y, got {loss_fn!r}")
        stage_ids = [stage.stage_id for stage in stages]
        trains = loss_fn is not None
        orders = agree_on_orders(
            comm, schedule, stage_ids, num_microbatches=num_microbatches, trains=trains, skips=stages.skips
        )
        num_stages = schedule.num_stages(comm.size)
        self.comm = comm.duplicate()
        self.stages = stages
        self.num_microbatches = num_microbatches
        self.loss_fn = loss_fn
        self._schedule = schedule
        self._xp = xp_of(next((p.data for p in stages.parameters()), None))
        self.recorder = Recorder(clock=clock_of(self._xp))
        self._last_stage = num_stages - 1
        self._last_rank = schedule.rank_of(self._last_stage, comm.size)
        self._handshake = Handshake(
            self.comm,
            num_microbatches=num_microbatches,
            first_rank=schedule.rank_of(0, comm.size),
            last_rank=self._last_rank,
        )
        self._p2p = PointToPoint(
            self.comm,
            lambda stage: schedule.rank_of(stage, comm.size),
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            skips=stages.skips,
            xp=self._xp,
            recorder=self.recorder,
        )
        self._runner = TaskRunner(stages, self.comm, self._p2p, self.recorder, last_stage=self._last_stage)
        self._programs = Programs(schedule, self.comm, num_microbatches, orders, stages.skips)
        self._waiting: StepState | None = None  # a forward whose backward is still to come
        self._broke_off = False

    def step(
        self,
        x: Batch | None,
        y: Batch | None,
        *,
        hooks: Hooks | None = None,
        weights: Sequence[float] | None = None,
    ) -> float:
        """Run forward and backward of a batch; gradients add to those of the parameters.

        Args:
            hooks: fired as in one backward over the whole batch: each parameter once, when its gradient is final.
            weights: over how many things the loss of each micro-batch is the mean, where these are no samples: the
                tokens whose target counts, from `weigh`. On the last stage's rank; others may give the same. With
                replicas, `ddp.hooks(weight=sum(weights))`.
        Returns:
            The mean loss of the batch, on every rank.
        Raises:
            ValueError: x, y or weights do not fit on some rank; the same message on every rank.
            RuntimeError: a step before ended in an error on several ranks, or a `forward` still waits for `backward`.
        """
        return self._train(self._begin(Mode.TRAIN, x, y, weights=weights), hooks).loss

    def step_on_device(self, x: Batch | None, y: Batch | None, *, hooks: Hooks | None = None) -> Array:
        """Run forward and backward of a batch, and ask the device nothing.

        It is `step` in a form that a CUDA graph can record.

        Args:
            x, y, hooks: as in `step`.
        Returns:
            () the mean loss of the batch, on every rank, where the model is: reading it waits for a GPU.
        """
        state = self._begin(Mode.TRAIN, x, y)
        return self._backward(self._programs.training(), state, hooks, self._end_on_device)

    def run(
        self,
        x: Batch | None,
        y: Batch | None,
        *,
        hooks: Hooks | None = None,
        weights: Sequence[float] | None = None,
        input_grads: bool = False,
    ) -> PipelineOutput:
        """Run forward and backward of a batch; return what each micro-batch gave.

        It is `step` in all else.

        Args:
            input_grads: whether the gradient of x is wanted too.
        """
        state = self._begin(Mode.TRAIN, x, y, weights=weights, keep_outputs=True, input_grads=input_grads)
        return self._train(state, hooks)

    def evaluate(self, x: Batch | None, y: Batch | None, *, weights: Sequence[float] | None = None) -> float:
        """Return the mean loss of a batch, on every rank.

        Records nothing; `stages.eval()` turns dropout off.

        Args:
            weights: as in `step`.
        """
        return self._forward(self._begin(Mode.EVALUATE, x, y, weights=weights)).loss

    def weigh(self, y: Batch, count: Callable[[Array], float]) -> list[float]:
        """Return what `count` says of each micro-batch of y, for `step`'s weights.

        Not collective.

            weights = pipe.weigh(y, lambda part: (part != IGNORED).sum())

        Args:
            count: of the targets of one micro-batch: over how many things its loss is the mean.
        """
        most = self.num_microbatches
        return [float(count(part)) for part in microbatch.as_microbatches(y, microbatch.num_parts(y, most), "y")]

    def predict(self, x: Batch | None) -> list[Array]:
        """Return the outputs for a batch, by micro-batch.

        They are on the last stage's rank; elsewhere the list is empty.
        """
        return self._forward(self._begin(Mode.PREDICT, x, None, keep_outputs=True)).outputs

    def forward(self, x: Batch | None, *, input_grads: bool = False) -> PipelineOutput:
        """Run the forward of a batch and keep its tapes for `backward`; there is no loss.

        Raises:
            RuntimeError: the last forward has had no backward.
        """
        state = self._begin(Mode.FORWARD, x, None, keep_outputs=True, input_grads=input_grads)
        result = self._forward(state)
        self._waiting = state
        return result

    def backward(self, cotangents: Batch | None, *, hooks: Hooks | None = None) -> PipelineOutput:
        """Run the backward of the last `forward` from the caller's own gradients.

        Args:
            cotangents: of the outputs, on the last stage: a batch or a list of micro-batches. Elsewhere ignored.
        Raises:
            RuntimeError: there was no forward, or its backward is done already.
            ValueError: their shapes or dtypes are not those of the outputs; the same message on every rank.
        """
        state = self._waiting
        if state is None:
            raise RuntimeError("pipe.backward() without pipe.forward(): each micro-batch can be used only once")
        self.recorder.enter("step", "open")
        agree(self.comm, lambda: self._take_cotangents(state, cotangents), num_columns=0)
        self._waiting = None
        self._p2p.begin(state.given.specs)
        return self._backward(self._programs.apart(state.num_microbatches)[1], state, hooks, self._end)

    def check_deadlock_free(self, ddp: Reduces) -> None:
        """Prove that no ranks wait for each other, reductions included.

        Messages and the reductions of `ddp` are taken together. Messages alone are proved when this is made. Collective
        over the ranks of all replicas.

        Args:
            ddp: what reduces the gradients of these stages over replicas.
        Raises:
            ValueError: a bucket has a parameter of no stage here, or the schedule does not allow these sizes.
            ScheduleError: what is stuck, in ranks of all replicas; the same on every rank.
        """
        orders = training_orders(self._schedule, self.comm.size, self.num_microbatches)
        replicas = replicas_of(self.stages, self.comm, ddp, orders)
        num_stages, skips = self._last_stage + 1, self.stages.skips
        check_whole_step(replicas, rank_of=self._schedule.rank_of, num_stages=num_stages, skips=skips)

    def cancel(self) -> None:
        """Give up a `forward` whose backward will not come, and what it keeps.

        On every rank, or on none. After an exception in a step this is done already. A single rank can then go on with
        the next step; with several, the others may wait for messages of this one, so a new executor is needed.
        """
        self._waiting = None
        for stage in self.stages:
            stage.drop_tapes()
        self.recorder.leave()

    # -- around the program -------------------------------------------------------------------

    def _begin(
        self,
        mode: Mode,
        x: Batch | None,
        y: Batch | None,
        *,
        weights: Sequence[float] | None = None,
        keep_outputs: bool = False,
        input_grads: bool = False,
    ) -> StepState:
        if self._waiting is not None and mode.keeps_tapes:
            raise RuntimeError(
                "a forward still waits for pipe.backward(): a new pass would use its micro-batches twice; if none will "
                "come, call pipe.cancel() on every rank"
            )
        if self._broke_off:
            raise RuntimeError(
                "a step of this executor ended in an error, and its messages may still be under way: "
                "make a new PipelineExecutor to go on"
            )
        self.recorder.enter("step", "open")
        given = self._handshake.begin(
            mode,
            x,
            y,
            has_loss_fn=self.loss_fn is not None,
            tied=self.stages.tied_states(),
            input_grads=input_grads,
            weights=weights,
        )
        self._p2p.begin(given.specs)
        return StepState(
            mode=mode,
            given=given,
            shares=given.shares,
            offsets=list(accumulate(given.sizes, initial=0)),
            hooks=StepHooks(len(self.stages) * len(given.shares), self.stages.tied),
            between_ops=Hooks(between_ops=self.comm.progress) + self.recorder.hooks(),
            keep_outputs=keep_outputs,
            input_grads=input_grads,
            cotangents=given.shares,
            loss_fn=self.loss_fn,
        )

    def _forward(self, state: StepState) -> PipelineOutput:
        with nullcontext() if state.mode.keeps_tapes else no_grad(), self._cancelled_on_error():
            self._runner.run(self._programs.apart(state.num_microbatches)[0], state)
        return self._end(state)

    def _train(self, state: StepState, hooks: Hooks | None) -> PipelineOutput:
        return self._backward(self._programs.training(), state, hooks, self._end)

    def _backward(self, program: Program, state: StepState, hooks: Hooks | None, end: Callable[[StepState], T]) -> T:
        """Run a program that has backwards, from what the step before left to gradients that are final.

        Args:
            end: what the step gives.
        """
        hooks = Hooks.of(hooks)
        with hooks.told_of_errors(), self._cancelled_on_error():
            state.weigh_by(hooks)
            state.hooks.use(hooks + state.between_ops)
            state.tied_before = self.stages.set_tied_aside()
            self._runner.run(program, state)
            self.recorder.enter("step", "sum tied")
            self.stages.sum_tied(state.tied_before)
            state.hooks.finish()
            return end(state)

    def _end(self, state: StepState) -> PipelineOutput:
        """Tell every rank the losses, and give what this rank holds."""
        self.recorder.enter("step", "losses")
        told = np.array([[float(state.losses.get(i, 0.0)), share] for i, share in enumerate(state.shares)])
        if state.mode.has_loss:
            self.comm.broadcast(told, root=self._last_rank).wait()
        self.recorder.leave()
        losses, shares = told.T.tolist()
        outputs, input_grads = ([d[i] for i in sorted(d)] for d in (state.outputs, state.grads_of_input))
        return PipelineOutput(losses if state.mode.has_loss else [], shares, outputs, input_grads)

    def _end_on_device(self, state: StepState) -> Array:
        """Give every rank the mean loss, in memory that the host has not read."""
        self.recorder.enter("step", "losses")
        loss = self._xp.zeros((), np.float32)
        for i, part in state.losses.items():
            loss = loss + part * part.dtype.type(state.shares[i])
        if self.comm.size > 1:
            loss = self.comm.broadcast(self._xp.asarray(loss, np.float32), root=self._last_rank).wait()
        self.recorder.leave()
        return loss

    def _take_cotangents(self, state: StepState, cotangents: Batch | None) -> Array:
        if self.comm.rank == self._last_rank:
            if cotangents is None:
                raise ValueError("the last stage needs the cotangents of its outputs, got None")
            parts = microbatch.as_microbatches(cotangents, state.num_microbatches, "cotangents")
            for i, part in enumerate(parts):
                wanted, given = ArraySpec.of(state.outputs[i]), ArraySpec.of(part)
                if given != wanted:
                    raise ValueError(f"cotangents: micro-batch {i} must be as its output, {wanted}, got {given}")
            state.cotangents = parts
        return np.zeros(0, np.int64)

    @contextmanager
    def _cancelled_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._broke_off = self.comm.size > 1
            self.cancel()
            raise
