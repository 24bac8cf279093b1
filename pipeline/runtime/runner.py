"""Runs the tasks of one rank, one after another: it receives, computes and sends as they say.

It knows no schedule, and nothing of what comes before and after them in a step; that is the executor's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from distributed.comm.communicator import Communicator
from distributed.trace.recorder import Recorder
from minigrad import rng
from minigrad.op_hooks import progressing
from minigrad.tensor import Tensor
from pipeline.runtime.boundary import Bundle
from pipeline.runtime.p2p import PointToPoint
from pipeline.runtime.program import Task
from pipeline.runtime.stage import PipelineStage
from pipeline.runtime.step import StepState
from pipeline.schedules.action import Kind


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
        """Run a program to its end, until all that it sent is gone."""
        for task in tasks:
            self._run(task, state)
            self._comm.progress()
        self._recorder.enter("step", "drain")
        self._p2p.finish()

    def _run(self, task: Task, state: StepState) -> None:
        match task.actions[0].kind:
            case Kind.F:
                self._run_forward(task, state)
            case Kind.B | Kind.BW:
                self._run_backward(task, state)
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

    def _run_forward(self, task: Task, state: StepState) -> None:
        (action,) = task.actions
        i = action.microbatch
        if action.stage == 0:
            assert state.given.inputs is not None
            x = Bundle((state.given.inputs[i],), (state.input_grads,), False)
        else:
            (x,) = self._arrived(task, state)
        finish = self._finish_of(i, state) if action.stage == self._last_stage else None
        self._recorder.enter("compute", action)
        # A large message moves only while its sender is inside MPI: between hosts it would wait for this forward's end.
        with rng.offset(state.offsets[i]), progressing(state.between_ops.between_ops):
            output, reached = self._stage[action.stage].forward(i, x, finish=finish, keep_tape=state.mode.keeps_tapes)
        state.hooks.forward_done(reached)
        for departure in task.makes:
            state.made[departure] = output

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
            state.losses[i] = loss.data  # read when the step is over: a GPU computes until then, and nobody waits
            return loss

        return finish

    def _run_backward(self, task: Task, state: StepState) -> None:
        (action,) = task.actions
        i = action.microbatch
        stage = self._stage[action.stage]
        cotangents: Sequence[Any]
        if action.stage == self._last_stage:
            cotangents = [state.cotangents[i]]
        else:
            cotangents = [g for bundle in self._arrived(task, state) for g in bundle.arrays]
        self._recorder.enter("compute", action)
        run = stage.backward if action.kind is Kind.BW else stage.backward_input
        input_grads = run(i, cotangents, state.hooks.backward_hooks())
        for departure in task.makes:
            state.made[departure] = Bundle(input_grads, (False,) * len(input_grads), True)
        if action.stage == 0 and input_grads:
            (state.grads_of_input[i],) = input_grads

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
