"""What a training step is, whatever computes its gradients: accumulation, averaging, clipping, update and metrics.

`loss_trainers.py` and `pipeline_trainer.py` have the trainers for losses and for pipelines; gradients may come from
somewhere else too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

import numpy as np

from distributed.comm.communicator import Array, Communicator
from distributed.data_parallel.comm_hooks import CommHook
from distributed.data_parallel.ddp import DistributedDataParallel
from distributed.data_parallel.replicas import broadcast_params
from distributed.protocols import HasParameters
from distributed.trace.recorder import Recorder
from minigrad.autodiff.hooks import Hooks
from minigrad.optim.update_rules import AdamW, LearningRate, Rule
from minigrad.parameter import Parameter
from minigrad.step_guard import MAX_SKIPPED_IN_A_ROW, StepGuard


@dataclass(frozen=True)
class TrainingConfig:
    """How to step.

    Attributes:
        learning_rate: of AdamW: a number, or a function of the step.
        weight_decay: of AdamW, on weights with two or more axes.
        rule: how weights change, in place of that AdamW.
        grad_accum_steps: losses whose gradients are averaged for one step; each weighs by its number of samples.
        max_grad_norm: gradients are clipped to this global norm; infinity does not clip.
        max_skipped_in_a_row: steps that are not finite and may be left out one after the other: see `StepGuard`.
    Raises:
        ValueError: grad_accum_steps is below 1, or max_grad_norm is not positive.
    """

    learning_rate: LearningRate = 3e-4
    weight_decay: float = 0.01
    rule: Rule | None = None
    grad_accum_steps: int = 1
    max_grad_norm: float = math.inf
    max_skipped_in_a_row: int = MAX_SKIPPED_IN_A_ROW

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
        loss: mean over the samples of all ranks and accumulated losses.
        grad_norm: of the whole model, before clipping.
        learning_rate: that it was taken with.
        tokens_per_second: of all ranks, since the last step ended; 0 where no tokens were counted.
        exposed_comm_seconds: that this rank spent waiting for messages with nothing to compute.
        num_skipped: steps so far, this one too, whose loss or gradient was not finite, and which were not taken.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_second: float
    exposed_comm_seconds: float
    num_skipped: int = 0


class ReplicaOptions(TypedDict, total=False):
    """What every trainer can be told of its replicas; see `DistributedDataParallel`."""

    bucket_bytes: int | None
    comm_hook: CommHook
    check_every: int
    zero: int
    whole: Callable[[Parameter], bool] | None


@dataclass
class _Accumulated:
    """What the losses of the step under way have brought so far.

    Attributes:
        weights: of the losses; a loss's gradients are taken times its own over `unit`.
        loss_sum: of the losses, each times its weight.
        num_samples, num_tokens: of all losses.
    """

    weights: list[float] = field(default_factory=list)
    num_samples: int = 0
    loss_sum: float = 0.0
    num_tokens: int = 0

    @property
    def unit(self) -> float:
        """The weight of a loss whose gradients are taken as they are: the first one's, so that one alone is."""
        return next(iter(self.weights), 0.0) or 1.0


class Trainer:
    """A model, its replicas and its optimizer. Making one is collective.

        for x, y in batches:
            metrics = trainer.backward_and_step(loss_fn(model(x), y), num_samples=len(x))
        metrics = trainer.end_step()        # with what is left, where losses are accumulated

    A step whose loss or gradient norm is infinite or nan is skipped on all ranks alike, and counted.

    After an exception, Ctrl-C included, the step under way is given up as a whole, accumulated losses too, and a
    single rank goes on with the next one. Of several ranks, those that had it call `cancel` first: see
    `DistributedDataParallel.cancel`.

    Args:
        model: trained in place.
        comm: the ranks that hold replicas.
        recorder: of the pipeline that the model is in.
        options: see `ReplicaOptions`.

    Attributes:
        global_step: number of steps so far, skipped ones too.
    Raises:
        TypeError: there is no such option.
        ValueError: as `DistributedDataParallel`; the same message on every rank.
    """

    def __init__(
        self,
        model: HasParameters,
        comm: Communicator,
        config: TrainingConfig,
        *,
        recorder: Recorder | None = None,
        **options: Unpack[ReplicaOptions],
    ) -> None:
        known = ReplicaOptions.__annotations__
        unknown = [name for name in options if name not in known]
        if unknown:  # some that DistributedDataParallel has would change what a step adds up
            raise TypeError(f"{type(self).__name__} takes the options {', '.join(known)}, got {', '.join(unknown)}")
        self.config = config
        self.ddp = DistributedDataParallel(model, comm, recorder=recorder, **options)
        rule = config.rule or AdamW(config.learning_rate, weight_decay=config.weight_decay)
        self.optimizer = self.ddp.optimizer(rule)
        self.global_step = 0
        self.guard = StepGuard(config.max_skipped_in_a_row)
        self._open = _Accumulated()
        self._last_end = time.perf_counter()
        self._is_whole_step = recorder is None  # or the pipeline says what is computed

    @property
    def num_buckets(self) -> int:
        return self.ddp.buckets.num_buckets

    @property
    def num_accumulated(self) -> int:
        """How many losses the step under way has; 0 between two steps."""
        return len(self._open.weights)

    @property
    def recorder(self) -> Recorder:
        """Notes what runs when inside `with trainer.recorder:`.

        The `with` may go around as many steps as wanted.
        """
        return self.ddp.recorder

    @property
    def communicator(self) -> Communicator:
        """The ranks that gradients are averaged over."""
        return self.ddp.comm

    def broadcast_params(self) -> None:
        """Overwrite the parameters of every rank with rank 0's. Collective.

        It is for weights that were loaded there, for example.
        """
        broadcast_params(self.ddp.params, self.ddp.comm)

    def step_from_gradients(
        self,
        gradients: Mapping[str, Array],
        *,
        loss: float,
        num_samples: int = 1,
        weight: float | None = None,
        num_tokens: int = 0,
    ) -> TrainingMetrics | None:
        """Take gradients that something else has computed for those of one loss.

        It goes on as `backward_and_step` does.

        Args:
            gradients: of the mean loss over this rank's samples, by name of the parameter; zeros where there is none.
                In a pipeline those of this rank's stages: of a parameter on several of them the sum, on each.
            loss: that mean.
            num_samples, weight, num_tokens: see `backward_and_step`.
        Raises:
            ValueError: a name is of no parameter, or a gradient has another shape; nothing has been added then. Or as
                in `backward_and_step`.
        """
        params = {p.name: p for p in self.ddp.params}
        for name, gradient in gradients.items():
            if name not in params:
                raise ValueError(f"there is no parameter {name!r} to take a gradient for")
            if tuple(gradient.shape) != params[name].shape:
                raise ValueError(f"the gradient of {name!r} must be {params[name].shape}, got {tuple(gradient.shape)}")

        def add(factor: float, hooks: Hooks | None) -> float:
            for name, gradient in gradients.items():
                before = params[name].grad
                params[name].grad = factor * gradient if before is None else before + factor * gradient
            if hooks is not None:
                mark_ready([p for p in self.ddp.params if p.has_grad], hooks)
            return loss

        return self._take(add, num_samples, weight, num_tokens)

    def end_step(self) -> TrainingMetrics | None:
        """Step with the losses accumulated so far.

        It is for the end of an epoch, where the last group may not be full. Collective: every rank calls it, or is at
        the last loss of this step. Each rank needs a loss in the group.

        Returns:
            None where no rank has a loss of a step under way.
        Raises:
            ValueError: some ranks have losses and others have none; the same message on every rank.
        """
        with self._given_up_on_error():
            counts = self._count()
            if not counts.any():
                return None
            hooks = self.ddp.hooks_for(counts, mean_over=self._open.unit)
            mark_ready([p for p in self.ddp.params if p.has_grad], hooks)
            return self._step()

    def cancel(self) -> None:
        """Give up the step under way, with its accumulated losses and gradients.

        The next loss begins a new one. On several ranks, those call it that had an exception and go on: see
        `DistributedDataParallel.cancel`.
        """
        self.ddp.cancel()
        self.optimizer.zero_grad()
        self._open = _Accumulated()

    def _take(
        self,
        contribute: Callable[[float, Hooks | None], float],
        num_samples: int,
        weight: float | None,
        num_tokens: int,
    ) -> TrainingMetrics | None:
        """Take a loss into the step, and step if it is the last one.

        Args:
            contribute: adds the loss's gradients times a factor, which for the first loss is 1, so that a single one is
                not scaled; with hooks, reduces them all. Returns the loss.
        """
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        weight = num_samples if weight is None else weight
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight must be at least 0 and finite, got {weight}")
        step = self._open
        with self._given_up_on_error():
            step.weights.append(weight)
            step.num_samples += num_samples
            step.num_tokens += num_tokens
            is_last = len(step.weights) == self.config.grad_accum_steps
            hooks = self.ddp.hooks_for(self._count(), mean_over=step.unit) if is_last else None
            step.loss_sum += contribute(weight / step.unit, hooks) * weight
            return self._step() if is_last else None

    def _count(self) -> Array:
        return self.ddp.count_samples(self._open.num_samples, sum(self._open.weights))

    def _step(self) -> TrainingMetrics:
        before_wait = time.perf_counter()
        self.ddp.wait()
        exposed = time.perf_counter() - before_wait
        own = self._open
        sums = np.array([own.loss_sum / (sum(own.weights) or 1) * self.ddp.share, own.num_tokens])
        with self.recorder.span("wait", "loss"):
            loss, num_tokens = self.ddp.comm.allreduce(sums).wait().tolist()
        norm = self.ddp.clip_by_global_norm(self.config.max_grad_norm)
        learning_rate = self.optimizer.lr
        if self.guard.allows(norm, loss):  # the same numbers on every rank
            self.optimizer.step()
        self.optimizer.zero_grad()
        now = time.perf_counter()
        speed = num_tokens / (now - self._last_end)
        metrics = TrainingMetrics(self.global_step, loss, norm, learning_rate, speed, exposed, self.guard.num_skipped)
        self.global_step += 1
        self._open = _Accumulated()
        self._last_end = now
        if self._is_whole_step:
            self.recorder.enter("compute", "forward")  # of the next step
        return metrics

    @contextmanager
    def _given_up_on_error(self) -> Iterator[None]:
        """Give the step up if what runs inside the `with` fails, unless other ranks count on this one's part in it."""
        try:
            yield
        except BaseException:
            if self.ddp.comm.size == 1 or not self.ddp.is_awaited:
                self.cancel()
            raise


def mark_ready(params: Sequence[Parameter], hooks: Hooks) -> None:
    """Reduce gradients that are all there already."""
    assert hooks.on_start is not None
    assert hooks.on_grad_ready is not None
    hooks.on_start(params)
    for p in params:
        hooks.on_grad_ready(p)
