"""Trainers: one training step in one call. They differ in when gradients are reduced, and in nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from distributed.buckets import DEFAULT_BUCKET_BYTES
from distributed.communicator import Communicator
from distributed.ddp import DistributedDataParallel
from minigrad.backward import Hooks, backward, backward_with_hooks
from minigrad.nn import Module
from minigrad.optim import AdamW, LearningRate, Optimizer, clip_by_global_norm
from minigrad.tensor import Tensor


@dataclass(frozen=True)
class TrainingConfig:
    """How to step.

    Attributes:
        learning_rate: a number, or a function of the step.
        weight_decay: of AdamW, on weights with two or more axes.
        max_grad_norm: gradients are clipped to this global norm; infinity does not clip.
    """

    learning_rate: LearningRate = 3e-4
    weight_decay: float = 0.01
    max_grad_norm: float = float("inf")


@dataclass(frozen=True)
class TrainingMetrics:
    """What one step did: its number from 0, the mean loss over all ranks, the norm before clipping, the rate."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float


class Trainer(ABC):
    """A model, its replicas and its optimizer. Making one is collective.

    Args:
        model: trained in place with AdamW.
        comm: the ranks that hold replicas.
    """

    def __init__(
        self,
        model: Module,
        comm: Communicator,
        config: TrainingConfig,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self.config = config
        self.ddp = DistributedDataParallel(model, comm, bucket_bytes=bucket_bytes)
        rule = AdamW(config.learning_rate, weight_decay=config.weight_decay)
        self.optimizer = Optimizer(model.parameters(), rule)

    @property
    def global_step(self) -> int:
        """Number of steps taken."""
        return self.optimizer.num_steps

    @property
    def num_buckets(self) -> int:
        return self.ddp.buckets.num_buckets

    @property
    def communicator(self) -> Communicator:
        """The ranks that gradients are averaged over."""
        return self.ddp.comm

    def backward_and_step(self, loss: Tensor, *, num_samples: int) -> TrainingMetrics:
        """Compute gradients, average them over ranks, clip, update, and mark them fresh for the next step.

        Collective.

        Args:
            loss: the mean over this rank's samples.
            num_samples: how many they are.
        """
        self.reduce_gradients(loss, self.ddp.hooks(num_samples=num_samples))
        self.ddp.wait()
        params = self.ddp.params
        metrics = TrainingMetrics(
            step=self.global_step,
            loss=self.ddp.mean(loss.item()),
            grad_norm=clip_by_global_norm(params, self.config.max_grad_norm),
            learning_rate=self.optimizer.lr,
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return metrics

    @abstractmethod
    def reduce_gradients(self, loss: Tensor, hooks: Hooks) -> None:
        """Run the backward and launch every bucket."""


class DistributedTrainer(Trainer):
    """Reduces after the backward: nothing overlaps. The plain form, to measure the other against."""

    def reduce_gradients(self, loss: Tensor, hooks: Hooks) -> None:
        backward(loss)
        assert hooks.on_start is not None
        hooks.on_start(())  # no more gradients will come, so every bucket is complete


class BucketedTrainer(Trainer):
    """Reduces inside the backward: each bucket travels while the rest computes."""

    def reduce_gradients(self, loss: Tensor, hooks: Hooks) -> None:
        backward_with_hooks(loss, hooks)
