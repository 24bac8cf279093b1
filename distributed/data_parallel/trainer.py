"""Trainers: one training step in one call. They differ in when gradients are reduced, and in nothing else."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from distributed.comm.communicator import Communicator
from distributed.comm.solo import SoloCommunicator
from distributed.data_parallel.buckets import DEFAULT_BUCKET_BYTES
from distributed.data_parallel.comm_hooks import CommHook, allreduce
from distributed.data_parallel.ddp import DistributedDataParallel, broadcast_params
from minigrad.backprop import backward_with_grad, reached_parameters
from minigrad.hooks import Hooks
from minigrad.nn import Module
from minigrad.optim import AdamW, LearningRate, Optimizer, clip_by_global_norm
from minigrad.tensor import Tensor


@dataclass(frozen=True)
class TrainingConfig:
    """How to step.

    Attributes:
        learning_rate: a number, or a function of the step.
        weight_decay: of AdamW, on weights with two or more axes.
        grad_accum_steps: losses whose gradients are averaged for one step, over equal numbers of samples each.
        max_grad_norm: gradients are clipped to this global norm; infinity does not clip.
    Raises:
        ValueError: grad_accum_steps is below 1, or max_grad_norm is not positive.
    """

    learning_rate: LearningRate = 3e-4
    weight_decay: float = 0.01
    grad_accum_steps: int = 1
    max_grad_norm: float = math.inf

    def __post_init__(self) -> None:
        if self.grad_accum_steps < 1:
            raise ValueError(f"grad_accum_steps must be at least 1, got {self.grad_accum_steps}")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive, got {self.max_grad_norm}")


@dataclass(frozen=True)
class TrainingMetrics:
    """What one step did; the same on every rank, but for the last two.

    Attributes:
        step: its number, from 0.
        loss: mean over all ranks and accumulated losses.
        grad_norm: of the whole model, before clipping. Where it is not finite the step was skipped.
        learning_rate: that it was taken with.
        tokens_per_second: of all ranks, since the last step ended; 0 where no tokens were counted.
        exposed_comm_seconds: that this rank spent waiting for messages with nothing to compute.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_second: float
    exposed_comm_seconds: float


class Trainer(ABC):
    """A model, its replicas and its optimizer. Making one is collective.

    Args:
        model: trained in place with AdamW.
        comm: the ranks that hold replicas.
        bucket_bytes, comm_hook: see `GradientBucketManager`.

    Attributes:
        global_step: number of steps so far, skipped ones too.
    """

    def __init__(
        self,
        model: Module,
        comm: Communicator,
        config: TrainingConfig,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        comm_hook: CommHook = allreduce,
    ) -> None:
        self.config = config
        self.ddp = DistributedDataParallel(model, comm, bucket_bytes=bucket_bytes, comm_hook=comm_hook)
        rule = AdamW(config.learning_rate, weight_decay=config.weight_decay)
        self.optimizer = Optimizer(model.parameters(), rule)
        self.global_step = 0
        self._losses: list[float] = []  # of the step that is being accumulated
        self._num_samples = self._num_tokens = 0
        self._last_end = time.perf_counter()

    @property
    def num_buckets(self) -> int:
        return self.ddp.buckets.num_buckets

    @property
    def communicator(self) -> Communicator:
        """The ranks that gradients are averaged over."""
        return self.ddp.comm

    def broadcast_params(self) -> None:
        """Overwrite the parameters of every rank with rank 0's, for example after loading them there. Collective."""
        broadcast_params(self.ddp.params, self.ddp.comm)

    def backward_and_step(self, loss: Tensor, *, num_samples: int = 1, num_tokens: int = 0) -> TrainingMetrics | None:
        """Compute gradients; at the last loss of a step average them over ranks, clip and update.

        Collective at the last loss of a step.

        Args:
            loss: the mean over this rank's samples.
            num_samples: how many they are: ranks weigh by it. Equal by default.
            num_tokens: for the speed.
        Returns:
            None while gradients are accumulated.
        """
        self._losses.append(loss.item())
        self._num_samples += num_samples
        self._num_tokens += num_tokens
        part = 1 / self.config.grad_accum_steps
        if len(self._losses) < self.config.grad_accum_steps:
            backward_with_grad(loss, part)
            return None
        self._reduce(loss, part, self.ddp.hooks(num_samples=self._num_samples))
        return self._step()

    def _step(self) -> TrainingMetrics:
        before_wait = time.perf_counter()
        self.ddp.wait()
        exposed = time.perf_counter() - before_wait
        norm = clip_by_global_norm(self.ddp.params, self.config.max_grad_norm)
        learning_rate = self.optimizer.lr
        if math.isfinite(norm):  # the same number on every rank, since the averaged gradients are
            self.optimizer.step()
        self.optimizer.zero_grad()
        loss = sum(self._losses) / len(self._losses)
        sums = np.array([loss * self.ddp.share, self._num_tokens])
        mean_loss, num_tokens = self.ddp.comm.allreduce(sums).wait().tolist()
        now = time.perf_counter()
        speed = num_tokens / (now - self._last_end)
        metrics = TrainingMetrics(self.global_step, mean_loss, norm, learning_rate, speed, exposed)
        self.global_step += 1
        self._losses = []
        self._num_samples = self._num_tokens = 0
        self._last_end = now
        return metrics

    @abstractmethod
    def _reduce(self, loss: Tensor, part: float, hooks: Hooks) -> None:
        """Run the backward, weighted by `part`, and launch every bucket."""


class DistributedTrainer(Trainer):
    """Reduces after the backward: nothing overlaps. The plain form, to measure the other against."""

    def _reduce(self, loss: Tensor, part: float, hooks: Hooks) -> None:
        reached = reached_parameters(loss)
        backward_with_grad(loss, part)
        assert hooks.on_start is not None
        assert hooks.on_grad_ready is not None
        hooks.on_start(reached)
        for p in reached:
            hooks.on_grad_ready(p)


class BucketedTrainer(Trainer):
    """Reduces inside the backward: each bucket travels while the rest computes."""

    def _reduce(self, loss: Tensor, part: float, hooks: Hooks) -> None:
        backward_with_grad(loss, part, hooks=hooks)


class SimpleTrainer(DistributedTrainer):
    """Trains in one process."""

    def __init__(self, model: Module, config: TrainingConfig) -> None:
        super().__init__(model, SoloCommunicator(), config)
