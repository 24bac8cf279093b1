"""PipelineExecutor: runs this rank's program, one action after another.

A program is a list of actions (`lower`), so this file knows no schedule: it receives, computes and sends as told.
What a step needs beside the actions is done once, around them:

    open      one allgather: what every rank was given; bad input raises on all ranks, before any message
    program   receives, forwards, backwards, sends; gradients of parameters are final at their last backward
    close     sends complete; tied weights summed; their hooks fired; the losses told to every rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
from pipeline.runtime.handshake import Batch, agree_on_orders, shake_hands, training_orders
from pipeline.runtime.p2p import PointToPoint
from pipeline.runtime.stage import LocalStages
from pipeline.runtime.step import PipelineOutput, StepState
from pipeline.runtime.step_hooks import StepHooks, side_by_side
from pipeline.schedules.action import Action, Kind
from pipeline.schedules.deadlock import check_deadlock_free
from pipeline.schedules.lower import lower
from pipeline.schedules.orders import backwards_of, forwards_of
from pipeline.schedules.schedule import Schedule

Program = list[list[Action]]
"""What one rank does, in order; actions of one group run as one."""

LossFn = Callable[[Any, Array], Tensor]


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
        self._stage = {stage.stage_id: stage for stage in stages}
        self._first_rank = schedule.rank_of(0, comm.size)
        self._last_stage = num_stages - 1
        self._last_rank = schedule.rank_of(self._last_stage, comm.size)
        self._p2p = PointToPoint(
            self.comm,
            lambda stage: schedule.rank_of(stage, comm.size),
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            xp=xp_of(next((p.data for p in stages.parameters()), None)),
            recorder=self.recorder,
        )

        self._schedule = schedule
        self._training = None if orders is None else self._program(orders)
        self._apart: dict[int, tuple[Program, Program]] = {}  # forwards and backwards of so many micro-batches
        self._waiting: StepState | None = None  # a forward whose backward is still to come

    def step(self, x: Batch | None, y: Batch | None, *, hooks: Hooks | None = None) -> float:
        """Run forward and backward of a batch; gradients add to those of the parameters.

        Args:
            hooks: fired as in one backward over the whole batch: each parameter once, when its gradient is final.
        Returns:
            The mean loss of the batch, on every rank.
        """
        state = self._open(x, y, has_loss=True, or_fewer=False)
        return self._train(state, hooks).loss

    def run(
        self, x: Batch | None, y: Batch | None, *, hooks: Hooks | None = None, input_grads: bool = False
    ) -> PipelineOutput:
        """Run forward and backward of a batch, as `step`, and return what each micro-batch gave."""
        state = self._open(x, y, has_loss=True, keep_outputs=True, input_grads=input_grads, or_fewer=False)
        return self._train(state, hooks)

    def evaluate(self, x: Batch | None, y: Batch | None) -> float:
        """Return the mean loss of a batch, on every rank. Records nothing; `stages.eval()` turns dropout off."""
        return self._infer(self._open(x, y, has_loss=True, trains=False)).loss

    def predict(self, x: Batch | None) -> list[Array]:
        """Return the outputs for a batch, by micro-batch, on the last stage's rank; elsewhere an empty list."""
        return self._infer(self._open(x, None, has_loss=False, keep_outputs=True, trains=False)).outputs

    def forward(self, x: Batch | None, *, input_grads: bool = False) -> PipelineOutput:
        """Run the forward of a batch and keep its tapes for `backward`; there is no loss.

        Raises:
            RuntimeError: the last forward has had no backward.
        """
        state = self._open(x, None, has_loss=False, keep_outputs=True, input_grads=input_grads)
        with self._cancelled_on_error():
            self._execute(self._forwards_and_backwards(len(state.weights))[0], state)
        self._waiting = state
        return self._result(state)

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
        self._p2p.begin(state.opening.specs)
        return self._run(self._forwards_and_backwards(len(state.weights))[1], state, hooks)

    def cancel(self) -> None:
        """Give up a `forward` whose backward will not come, and what it keeps. On every rank, or on none.

        After an exception in a step this is done already. A single rank can then go on with the next step; with
        several, the others may wait for messages of this one, so all have to start again.
        """
        self._waiting = None
        for stage in self.stages:
            stage.drop_tapes()
        self.recorder.leave()

    # -- programs -----------------------------------------------------------------------------

    def _program(self, orders: Sequence[Sequence[Action]]) -> Program:
        """Return what this rank has to do so that all ranks together compute these orders."""
        rank_of, num_stages = self._schedule.rank_of, self._last_stage + 1
        programs = lower(orders, rank_of=rank_of, num_stages=num_stages)
        check_deadlock_free(programs, rank_of=rank_of, num_stages=num_stages)
        return side_by_side(programs[self.comm.rank])

    def _forwards_and_backwards(self, num_microbatches: int) -> tuple[Program, Program]:
        """Return the programs of a step whose forwards stand alone: no rule of the schedule binds their number."""
        if num_microbatches not in self._apart:
            orders = forwards_of(self._schedule.rank_of, self.comm.size, self._last_stage + 1, num_microbatches)
            self._apart[num_microbatches] = self._program(orders), self._program(backwards_of(orders))
        return self._apart[num_microbatches]

    # -- around the program -------------------------------------------------------------------

    def _open(
        self,
        x: Batch | None,
        y: Batch | None,
        *,
        has_loss: bool,
        keep_outputs: bool = False,
        input_grads: bool = False,
        trains: bool = True,
        or_fewer: bool = True,
    ) -> StepState:
        if self._waiting is not None and trains:
            raise RuntimeError(
                "a forward still waits for pipe.backward(): a new pass would use its micro-batches twice; if none will "
                "come, call pipe.cancel() on every rank"
            )
        self.recorder.enter("step", "open")
        opening = shake_hands(
            self.comm,
            x,
            y,
            num_microbatches=self.num_microbatches,
            needs_x=0 in self._stage,
            needs_y=has_loss and self._last_stage in self._stage,
            has_loss_fn=self.loss_fn is not None,
            first_rank=self._first_rank,
            tied=self.stages.tied_states(),
            input_grads=input_grads,
            or_fewer=or_fewer,
        )
        self._p2p.begin(opening.specs)
        weights = microbatch.weights(opening.sizes)
        readiness = StepHooks(len(self._stage) * len(weights), self.stages.tied)
        return StepState(opening, weights, weights, readiness, has_loss, keep_outputs, input_grads, trains)

    def _infer(self, state: StepState) -> PipelineOutput:
        with no_grad(), self._cancelled_on_error():
            self._execute(self._forwards_and_backwards(len(state.weights))[0], state)
        return self._result(state)

    def _train(self, state: StepState, hooks: Hooks | None) -> PipelineOutput:
        if self._training is None:  # made without a loss_fn, for sizes that the schedule does not allow; says so
            orders = training_orders(self._schedule, self.comm.size, self.num_microbatches)
            self._training = self._program(orders)
        return self._run(self._training, state, hooks)

    def _run(self, program: Program, state: StepState, hooks: Hooks | None) -> PipelineOutput:
        with (hooks or Hooks()).told_of_errors(), self._cancelled_on_error():
            self._start(state, hooks)
            self._execute(program, state)
            return self._finish(state)

    @contextmanager
    def _cancelled_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.cancel()
            raise

    def _start(self, state: StepState, hooks: Hooks | None) -> None:
        state.readiness.use((hooks or Hooks()) + self._between_ops())
        state.tied_before = self.stages.set_tied_aside()

    def _between_ops(self) -> Hooks:
        """Return what lets messages move while this rank computes, and notes when they are there."""
        return Hooks(between_ops=self.comm.progress) + self.recorder.hooks()

    def _finish(self, state: StepState) -> PipelineOutput:
        self.recorder.enter("step", "sum tied")
        self.stages.sum_tied(state.tied_before)
        state.readiness.finish()
        return self._result(state)

    def _result(self, state: StepState) -> PipelineOutput:
        """Tell every rank the losses, and give what this rank holds."""
        self.recorder.enter("step", "losses")
        losses = np.array([state.losses.get(i, 0.0) for i in range(len(state.weights) if state.has_loss else 0)])
        if state.has_loss:
            self.comm.broadcast(losses, root=self._last_rank).wait()
        self.recorder.leave()
        outputs, input_grads = ([d[i] for i in sorted(d)] for d in (state.outputs, state.grads_of_input))
        return PipelineOutput(losses.tolist(), state.weights, outputs, input_grads)

    def _take_cotangents(self, state: StepState, cotangents: Batch | None) -> Array:
        if self._last_stage in self._stage:
            if cotangents is None:
                raise ValueError("the last stage needs the cotangents of its outputs, got None")
            parts = microbatch.as_microbatches(cotangents, len(state.weights), "cotangents")
            for i, part in enumerate(parts):
                wanted, given = state.output_specs[i], ArraySpec.of(part)
                if given != wanted:
                    raise ValueError(f"cotangents: micro-batch {i} must be as its output, {wanted}, got {given}")
            state.cotangents = parts
        return np.zeros(0, np.int64)

    # -- the program ----------------------------------------------------------------------------

    def _execute(self, program: Sequence[Sequence[Action]], state: StepState) -> None:
        for group in program:
            action = group[0]
            match action.kind:
                case Kind.RECV_F | Kind.RECV_B:
                    self.recorder.enter("message", action)
                    self._p2p.post(action)
                case Kind.SEND_F | Kind.SEND_B:
                    self.recorder.enter("message", action)
                    self._p2p.send(action, state.made.pop(action))
                case Kind.F:
                    self._run_forward(action, state)
                case Kind.B | Kind.BW:
                    self._run_backward(action, state)
                case Kind.W:
                    self.recorder.enter("compute", *group)
                    microbatches = [w.microbatch for w in group]
                    self._stage[action.stage].backward_weight(microbatches, state.readiness.backward_hooks())
            self.comm.progress()
        self.recorder.enter("step", "drain")
        self._p2p.finish()

    def _run_forward(self, action: Action, state: StepState) -> None:
        stage_id, i = action.stage, action.microbatch
        is_last = stage_id == self._last_stage
        if stage_id == 0:
            assert state.opening.inputs is not None
            x = Bundle((state.opening.inputs[i],), (state.input_grads,), False)
        else:
            x = self._arrived(Action(Kind.SEND_F, stage_id - 1, i), Action(Kind.RECV_F, stage_id, i), state)
        self.recorder.enter("compute", action)
        finish = self._loss(i, state) if is_last else None
        # A large message moves only while its sender is inside MPI: between hosts it would wait for this forward's end.
        with rng.offset(sum(state.opening.sizes[:i])), progressing(self._between_ops().between_ops):
            output, reached = self._stage[stage_id].forward(i, x, finish=finish, keep_tape=state.trains)
        state.readiness.forward_done(reached)
        if not is_last:
            state.made[Action(Kind.SEND_F, stage_id, i)] = output

    def _loss(self, i: int, state: StepState) -> Callable[[Any], Tensor]:
        """Return what the last stage does with its output: note it, and go on to the loss where there is one."""

        def finish(output: Any) -> Any:
            if state.keep_outputs:
                if not hasattr(output, "dtype"):
                    raise TypeError(f"outputs are kept of one tensor only, got {type(output).__name__}")
                state.outputs[i] = output.data if isinstance(output, Tensor) else output
                state.output_specs[i] = ArraySpec.of(state.outputs[i])
            if not state.has_loss:
                return output
            assert self.loss_fn is not None
            assert state.opening.targets is not None
            loss = self.loss_fn(output, state.opening.targets[i])
            state.losses[i] = loss.item()
            return loss

        return finish

    def _run_backward(self, action: Action, state: StepState) -> None:
        stage_id, i = action.stage, action.microbatch
        stage = self._stage[stage_id]
        if stage_id == self._last_stage:
            cotangents: Sequence[Any] = [state.cotangents[i]]
        else:
            receive = Action(Kind.RECV_B, stage_id, i)
            cotangents = self._arrived(Action(Kind.SEND_B, stage_id + 1, i), receive, state).arrays
            if cotangents:  # the output has arrived where these come from: its send is complete
                self._p2p.wait_sent(Action(Kind.SEND_F, stage_id, i))
        self.recorder.enter("compute", action)
        run = stage.backward if action.kind is Kind.BW else stage.backward_input
        input_grads = run(i, cotangents, state.readiness.backward_hooks())
        if stage_id > 0:
            state.made[Action(Kind.SEND_B, stage_id, i)] = Bundle(input_grads, (False,) * len(input_grads), True)
        elif input_grads:
            (state.grads_of_input[i],) = input_grads

    def _arrived(self, made: Action, receive: Action, state: StepState) -> Bundle:
        """Return what the neighbouring stage made: handed over on this rank, or received."""
        if made.stage in self._stage:
            return state.made.pop(made)
        self.recorder.enter("wait", receive)
        return self._p2p.receive(receive)
