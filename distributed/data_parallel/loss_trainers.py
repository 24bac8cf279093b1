"""Trainers of losses that the caller computes. They differ in how many processes there are, and in when these reduce.

SimpleTrainer        one process
DistributedTrainer   replicas, which reduce after the backward
BucketedTrainer      replicas, which reduce inside it
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from distributed.comm.solo import SoloCommunicator
from distributed.data_parallel.trainer import Trainer, TrainingConfig, TrainingMetrics, mark_ready
from minigrad.autodiff.backprop import backward_with_grad, reached_parameters
from minigrad.autodiff.hooks import Hooks
from minigrad.nn import Module
from minigrad.tensor import Tensor


class LossTrainer(Trainer, ABC):
    """Trains from losses that the caller has computed.

    The model is whole on each rank.
    """

    def backward_and_step(
        self, loss: Tensor, *, num_samples: int = 1, weight: float | None = None, num_tokens: int = 0
    ) -> TrainingMetrics | None:
        """Compute gradients; at the last loss of a step average, clip and update.

        Collective at the last loss of a step.

        Args:
            loss: the mean over this rank's samples, or over `weight` things.
            num_samples: how many they are: ranks and accumulated losses weigh by it. Equal by default.
            weight: what they weigh by instead, such as the number of tokens whose target counts; 0 is fine where
                another loss of the step has more, on any rank.
            num_tokens: for the speed.
        Returns:
            None while gradients are accumulated.
        Raises:
            ValueError: num_samples is below 1, or a weight is negative or not finite, or all are 0.
            FloatingPointError: too many steps in a row were not finite; the same on every rank.
        """

        def contribute(factor: float, hooks: Hooks | None) -> float:
            value = loss.item()
            if hooks is None:
                with self.recorder.span("compute", "backward"):
                    backward_with_grad(loss, factor)
            else:
                self._reduce(loss, factor, hooks)
            return value

        return self._take(contribute, num_samples, weight, num_tokens)

    @abstractmethod
    def _reduce(self, loss: Tensor, factor: float, hooks: Hooks) -> None:
        """Run the backward of the loss times `factor`, and launch every bucket."""


class DistributedTrainer(LossTrainer):
    """Reduces after the backward: nothing overlaps.

    The plain form, to measure the other against.
    """

    def _reduce(self, loss: Tensor, factor: float, hooks: Hooks) -> None:
        reached = reached_parameters(loss)
        self.recorder.enter("compute", "backward")
        with hooks.told_of_errors():
            backward_with_grad(loss, factor)
            mark_ready(reached, hooks)


class BucketedTrainer(LossTrainer):
    """Reduces inside the backward: each bucket travels while the rest computes."""

    def _reduce(self, loss: Tensor, factor: float, hooks: Hooks) -> None:
        backward_with_grad(loss, factor, hooks=hooks)


class SimpleTrainer(DistributedTrainer):
    """Trains in one process."""

    def __init__(self, model: Module, config: TrainingConfig) -> None:
        super().__init__(model, SoloCommunicator(), config)
