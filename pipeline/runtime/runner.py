"""Runs the tasks of one rank, one after another: it receives, computes and sends as they say.

It knows no schedule, and nothing of what comes before and after them in a step; that is the executor's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from distributed.comm.communicator import Communicator
from distributed.trace.recorder import Recorder
from minigrad import rng
from minigrad.autodiff.backprop import to_the_end
from minigrad.autodiff.hooks import Hooks
from minigrad.autodiff.op_hooks import progressing
from minigrad.tensor import Tensor
from pipeline.runtime.alongside import Alongside
from pipeline.runtime.boundary import Bundle
from pipeline.runtime.p2p import PointToPoint
from pipeline.runtime.program import Task
from pipeline.runtime.stage import PipelineStage
from pipeline.runtime.step import StepState
from pipeline.schedules.action import Kind, pair


class TaskRunner:
    """What a rank needs to run its tasks.

    Args:
        stages: this rank's.
        last_stage: the number of the one that ends in the loss.
    """

    def __init__(
        self,
        stages: Iterable[PipelineStage],
        comm: Communicator,
        p2p: PointToPoint,
        recorder: Recorder,
        *,
        last_stage: int,
    ) -> None:
        self._stage = {stage.stage_id: stage for stage in stages}
        self._comm = comm
        self._p2p = p2p
        self._recorder = recorder
        self._last_stage = last_stage

    def run(self, tasks: Iterable[Task], state: StepState) -> None:
        """Run a program to its end, until all that it sent is gone.

        Args:
            tasks: of this rank, in order.
            state: of the step; what the tasks give is kept there.
        """
        for task in tasks:
            self._run(task, state)
            self._comm.progress()
        self._recorder.enter("step", "drain")
        self._p2p.finish()

    def _run(self, task: Task, state: StepState) -> None:
        match task.actions[0].kind:
            case Kind.F if task.beside is not None:
                self._run_pair(task, task.beside, state)
            case Kind.F:
                inputs = self._inputs(task, state)
                self._recorder.enter("compute", *task.actions)
                self._forward(task, inputs, state, state.between_ops.between_ops)
            case Kind.B | Kind.BW:
                cotangents = self._cotangents(task, state)
                self._recorder.enter("compute", *task.actions)
                to_the_end(self._backward(task, cotangents, state))
            case Kind.W:
                self._recorder.enter("compute", *task.actions)
                microbatches = [w.microbatch for w in task.actions]
                self._stage[task.actions[0].stage].backward_weight(microbatches, state.hooks.backward_hooks())
            case _:
                self._recorder.enter("message", *task.actions)
                for message in task.actions:
                    if message.kind.receives:
                        self._p2p.post(message)
                    else:
                        self._p2p.send(message, state.made.pop(message))

    def _run_pair(self, forward: Task, backward: Task, state: StepState) -> None:
        """Run a forward and a backward in turn, an op of one and an op of the other; what is left is run alone."""
        inputs, cotangents = self._inputs(forward, state), self._cotangents(backward, state)
        self._recorder.enter("compute", pair(*forward.actions, *backward.actions))
        other = Alongside(self._backward(backward, cotangents, state))
        between_ops = state.between_ops + Hooks(between_ops=other.step)
        self._forward(forward, inputs, state, between_ops.between_ops)
        other.finish()

    def _inputs(self, task: Task, state: StepState) -> list[Bundle]:
        (action,) = task.actions
        if action.stage == 0:
            assert state.given.inputs is not None
            return [Bundle((state.given.inputs[action.microbatch],), (state.input_grads,), False)]
        return self._arrived(task, state)

    def _forward(
        self, task: Task, inputs: Sequence[Bundle], state: StepState, between_ops: Callable[[], None] | None
    ) -> None:
        (action,) = task.actions
        i = action.microbatch
        finish = self._finish_of(i, state) if action.stage == self._last_stage else None
        # A large message moves only while its sender is inside MPI: between hosts it would wait for this forward's end.
        with rng.offset(state.offsets[i]), progressing(between_ops):
            stage = self._stage[action.stage]
            outputs, reached = stage.forward(i, inputs, finish=finish, keep_tape=state.mode.keeps_tapes)
        state.hooks.forward_done(reached)
        if action.stage != self._last_stage:
            state.made.update(zip(task.makes, outputs, strict=True))
        self._send(task, state)

    def _finish_of(self, i: int, state: StepState) -> Callable[[Any], Any]:
        """Return what the last stage does with its output: note it, and go on to the loss where there is one."""

        def finish(output: Any) -> Any:
            if state.keep_outputs:
                if not hasattr(output, "dtype"):
                    raise TypeError(f"outputs are kept of one tensor only, got {type(output).__name__}")
                state.outputs[i] = output.data if isinstance(output, Tensor) else output
            if not state.mode.has_loss:
                return output
            assert state.loss_fn is not None
            assert state.given.targets is not None
            loss = state.loss_fn(output, state.given.targets[i])
            if not isinstance(loss, Tensor) or loss.ndim:
                got = f"shape {loss.shape}" if isinstance(loss, Tensor) else type(loss).__name__
                raise TypeError(f"loss_fn must return a Tensor without axes, the mean of a micro-batch, got {got}")
            state.losses[i] = loss.data  # read when the step is over: a GPU computes until then, and nobody waits
            return loss

        return finish

    def _cotangents(self, task: Task, state: StepState) -> Sequence[Any]:
        (action,) = task.actions
        if action.stage == self._last_stage:
            return [state.cotangents[action.microbatch]]
        return [g for bundle in self._arrived(task, state) for g in bundle.arrays]

    def _backward(self, task: Task, cotangents: Sequence[Any], state: StepState) -> Iterator[None]:
        """Run a backward one op at a time; the last step keeps and sends what it gives."""
        (action,) = task.actions
        i = action.microbatch
        stage = self._stage[action.stage]
        run = stage.backward_steps if action.kind is Kind.BW else stage.backward_input_steps
        input_grads = yield from run(i, cotangents, state.hooks.backward_hooks())
        if action.stage > 0:
            bundles = (Bundle(grads, (False,) * len(grads), True) for grads in input_grads)
            state.made.update(zip(task.makes, bundles, strict=True))
        elif input_grads[0]:
            state.grads_of_input[i] = input_grads[0][0]
        self._send(task, state)

    def _send(self, task: Task, state: StepState) -> None:
        for send in task.sends:
            self._p2p.send(send, state.made.pop(send))

    def _arrived(self, task: Task, state: StepState) -> list[Bundle]:
        """Return what other stages made for a task: handed over on this rank, or received."""
        bundles = []
        for take in task.takes:
            if take.kind.sends:
                bundles.append(state.made.pop(take))
                continue
            self._recorder.enter("wait", take)
            bundles.append(self._p2p.receive(take))
            if bundles[-1].arrays and take.confirms is not None:
                self._p2p.wait_sent(take.confirms)
        return bundles
