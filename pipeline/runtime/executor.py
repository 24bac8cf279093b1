"""PipelineExecutor: runs this rank's program, one task after another.

A program is made of actions (`program`), so this file knows no schedule: it receives, computes and sends as told.
What a step needs beside them is done once, around them:

    begin     one allgather: what every rank was given; bad input raises on all ranks, before any message
    program   receives, forwards, backwards, sends; gradients of parameters are final at their last backward
    end       sends complete; tied weights summed; their hooks fired; the losses told to every rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from distributed.agreement import agree
from distributed.comm.communicator import Communicator
from distributed.trace.recorder import Recorder
from minigrad import rng
from minigrad.backend import Array, xp_of
from minigrad.hooks import Hooks
from minigrad.mode import no_grad
from minigrad.op_hooks import progressing
from minigrad.tensor import Tensor
from pipeline.runtime import microbatch
from pipeline.runtime.boundary import ArraySpec, Bundle
from pipeline.runtime.handshake import Handshake, agree_on_orders, training_orders
from pipeline.runtime.local_stages import LocalStages
from pipeline.runtime.p2p import PointToPoint
from pipeline.runtime.program import Task, program_of
from pipeline.runtime.replicas import Reduces, replicas_of
from pipeline.runtime.step import Batch, Mode, PipelineOutput, StepState
from pipeline.runtime.step_hooks import StepHooks
from pipeline.schedules.action import Action, Kind
from pipeline.schedules.orders import backwards_of, forwards_of
from pipeline.schedules.schedule import Schedule
from pipeline.schedules.whole_step import check_whole_step

Program = tuple[Task, ...]
LossFn = Callable[[Any, Array], Tensor]
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
        stage_ids = [stage.stage_id for stage in stages]
        trains = loss_fn is not None
        orders = agree_on_orders(comm, schedule, stage_ids, num_microbatches=num_microbatches, trains=trains)
        num_stages = schedule.num_stages(comm.size)
        self.comm = comm.duplicate()
        self.stages = stages
        self.num_microbatches = num_microbatches
        self.loss_fn = loss_fn
        self.recorder = Recorder()
        self._schedule = schedule
        self._stage = {stage.stage_id: stage for stage in stages}
        self._xp = xp_of(next((p.data for p in stages.parameters()), None))
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
            xp=self._xp,
            recorder=self.recorder,
        )
        self._training = None if orders is None else self._program(orders)
        self._apart: dict[int, tuple[Program, Program]] = {}  # forwards and backwards of so many micro-batches
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
        """
        return self._train(self._begin(Mode.TRAIN, x, y, weights=weights), hooks).loss

    def step_on_device(self, x: Batch | None, y: Batch | None, *, hooks: Hooks | None = None) -> Array:
        """Run forward and backward of a batch, and ask the device nothing.

        As `step`, but so that a CUDA graph can have it.

        Args:
            x, y, hooks: as in `step`.
        Returns:
            () the mean loss of the batch, on every rank, where the model is: reading it waits for a GPU.
        """
        state = self._begin(Mode.TRAIN, x, y)
        return self._backward(self._training_program(), state, hooks, self._end_on_device)

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

        Otherwise as `step`.

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
        return self._backward(self._programs_apart(state.num_microbatches)[1], state, hooks, self._end)

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
        check_whole_step(replicas, rank_of=self._schedule.rank_of, num_stages=self._last_stage + 1)

    def cancel(self) -> None:
        """Give up a `forward` whose backward will not come, and what it keeps.

        On every rank, or on none. After an exception in a step this is done already. A single rank can then go on with
        the next step; with several, the others may wait for messages of this one, so a new executor is needed.
        """
        self._waiting = None
        for stage in self.stages:
            stage.drop_tapes()
        self.recorder.leave()

    # -- programs -----------------------------------------------------------------------------

    def _program(self, orders: Sequence[Sequence[Action]]) -> Program:
        rank_of = self._schedule.rank_of
        return program_of(orders, self.comm.rank, rank_of=rank_of, num_stages=self._last_stage + 1)

    def _training_program(self) -> Program:
        if self._training is None:  # made without a loss_fn, for sizes that the schedule does not allow: it says so
            self._training = self._program(training_orders(self._schedule, self.comm.size, self.num_microbatches))
        return self._training

    def _programs_apart(self, num_microbatches: int) -> tuple[Program, Program]:
        """Return the programs of forwards and of backwards alone: no rule of the schedule binds their number."""
        if num_microbatches not in self._apart:
            orders = forwards_of(self._schedule.rank_of, self.comm.size, self._last_stage + 1, num_microbatches)
            self._apart[num_microbatches] = self._program(orders), self._program(backwards_of(orders))
        return self._apart[num_microbatches]

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
            hooks=StepHooks(len(self._stage) * len(given.shares), self.stages.tied),
            between_ops=Hooks(between_ops=self.comm.progress) + self.recorder.hooks(),
            keep_outputs=keep_outputs,
            input_grads=input_grads,
            cotangents=given.shares,
        )

    def _forward(self, state: StepState) -> PipelineOutput:
        with nullcontext() if state.mode.keeps_tapes else no_grad(), self._cancelled_on_error():
            self._execute(self._programs_apart(state.num_microbatches)[0], state)
        return self._end(state)

    def _train(self, state: StepState, hooks: Hooks | None) -> PipelineOutput:
        return self._backward(self._training_program(), state, hooks, self._end)

    def _backward(self, program: Program, state: StepState, hooks: Hooks | None, end: Callable[[StepState], T]) -> T:
        """Run a program that has backwards, from what the step before left to gradients that are final.

        Args:
            end: what the step gives.
        """
        hooks = hooks or Hooks()
        with hooks.told_of_errors(), self._cancelled_on_error():
            state.weigh_by(hooks)
            state.hooks.use(hooks + state.between_ops)
            state.tied_before = self.stages.set_tied_aside()
            self._execute(program, state)
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
        if self._last_stage in self._stage:
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

    # -- the program ----------------------------------------------------------------------------

    def _execute(self, program: Program, state: StepState) -> None:
        for task in program:
            self._run(task, state)
            self.comm.progress()
        self.recorder.enter("step", "drain")
        self._p2p.finish()

    def _run(self, task: Task, state: StepState) -> None:
        match task.actions[0].kind:
            case Kind.F:
                self._run_forward(task, state)
            case Kind.B | Kind.BW:
                self._run_backward(task, state)
            case Kind.W:
                self.recorder.enter("compute", *task.actions)
                microbatches = [w.microbatch for w in task.actions]
                self._stage[task.actions[0].stage].backward_weight(microbatches, state.hooks.backward_hooks())
            case _:
                self.recorder.enter("message", *task.actions)
                for message in task.actions:
                    if message.kind in (Kind.RECV_F, Kind.RECV_B):
                        self._p2p.post(message)
                    else:
                        self._p2p.send(message, state.made.pop(message))

    def _run_forward(self, task: Task, state: StepState) -> None:
        (action,) = task.actions
        i = action.microbatch
        if action.stage == 0:
            assert state.given.inputs is not None
            x = Bundle((state.given.inputs[i],), (state.input_grads,), False)
        else:
            x = self._arrived(task, state)
        finish = self._finish_of(i, state) if action.stage == self._last_stage else None
        self.recorder.enter("compute", action)
        # A large message moves only while its sender is inside MPI: between hosts it would wait for this forward's end.
        with rng.offset(state.offsets[i]), progressing(state.between_ops.between_ops):
            output, reached = self._stage[action.stage].forward(i, x, finish=finish, keep_tape=state.mode.keeps_tapes)
        state.hooks.forward_done(reached)
        if task.makes is not None:
            state.made[task.makes] = output

    def _finish_of(self, i: int, state: StepState) -> Callable[[Any], Any]:
        """Return what the last stage does with its output: note it, and go on to the loss where there is one."""

        def finish(output: Any) -> Any:
            if state.keep_outputs:
                if not hasattr(output, "dtype"):
                    raise TypeError(f"outputs are kept of one tensor only, got {type(output).__name__}")
                state.outputs[i] = output.data if isinstance(output, Tensor) else output
            if not state.mode.has_loss:
                return output
            assert self.loss_fn is not None
            assert state.given.targets is not None
            loss = self.loss_fn(output, state.given.targets[i])
            state.losses[i] = loss.data  # read when the step is over: a GPU computes until then, and nobody waits
            return loss

        return finish

    def _run_backward(self, task: Task, state: StepState) -> None:
        (action,) = task.actions
        i = action.microbatch
        stage = self._stage[action.stage]
        if action.stage == self._last_stage:
            cotangents: Sequence[Any] = [state.cotangents[i]]
        else:
            cotangents = self._arrived(task, state).arrays
            if cotangents and task.confirms is not None:
                self._p2p.wait_sent(task.confirms)
        self.recorder.enter("compute", action)
        run = stage.backward if action.kind is Kind.BW else stage.backward_input
        input_grads = run(i, cotangents, state.hooks.backward_hooks())
        if task.makes is not None:
            state.made[task.makes] = Bundle(input_grads, (False,) * len(input_grads), True)
        elif input_grads:
            (state.grads_of_input[i],) = input_grads

    def _arrived(self, task: Task, state: StepState) -> Bundle:
        """Return what the neighbouring stage made: handed over on this rank, or received."""
        if task.receives is None:
            assert task.takes is not None
            return state.made.pop(task.takes)
        self.recorder.enter("wait", task.receives)
        return self._p2p.receive(task.receives)
