"""One step over a batch: what kind it is, what all ranks know of it, its state while it runs, and what it gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from minigrad.autodiff.hooks import Hooks
from minigrad.backend import Array
from minigrad.parameter import Parameter
from minigrad.tensor import Tensor
from pipeline.runtime import microbatch
from pipeline.runtime.boundary import ArraySpec, Bundle
from pipeline.runtime.step_hooks import StepHooks
from pipeline.schedules.action import Action

Batch = Array | Sequence[Array]
LossFn = Callable[[Any, Array], Tensor]


class Mode(Enum):
    """What a step does with a batch.

    Attributes:
        has_loss: whether the last stage goes on from its output to the loss.
        keeps_tapes: whether a backward follows.
    """

    TRAIN = "train", True, True  # forwards and backwards, in the order of the schedule
    EVALUATE = "evaluate", True, False  # forwards to the loss
    PREDICT = "predict", False, False  # forwards to the outputs
    FORWARD = "forward", False, True  # forwards to the outputs; the caller starts their backward

    def __init__(self, word: str, has_loss: bool, keeps_tapes: bool) -> None:
        self.has_loss = has_loss
        self.keeps_tapes = keeps_tapes


@dataclass(frozen=True)
class StepInputs:
    """What was given to a step, and what all ranks agree on.

    Attributes:
        inputs: this rank's micro-batches of x, if it was given x.
        targets: of y, if it was given y.
        specs: shape and dtype of the first stage's micro-batches, known on every rank.
        weights: of the micro-batches, if they were given here.
    """

    inputs: list[Array] | None
    targets: list[Array] | None
    specs: list[ArraySpec]
    weights: list[float] | None = None

    @property
    def sizes(self) -> list[int]:
        """Samples of each micro-batch."""
        return [spec.shape[0] for spec in self.specs]

    @property
    def counts(self) -> Sequence[float]:
        """Over how many things the loss of each micro-batch is the mean.

        As far as this rank knows.
        """
        return self.sizes if self.weights is None else self.weights

    @property
    def shares(self) -> list[float]:
        """What each micro-batch weighs in the mean.

        As far as this rank knows: the last stage's does.
        """
        return microbatch.shares(self.counts)


@dataclass
class StepState:
    """The state of one step, from its handshake to its end.

    It holds all that the step makes, and goes with it.

    Attributes:
        shares: what each micro-batch weighs in the mean; the last stage's rank tells the others at the end.
        offsets: the place of its first sample in the batch.
        hooks: those of the whole step.
        between_ops: what lets messages move while this rank computes.
        cotangents: where a backward starts: each micro-batch's share in the mean loss, or what the caller gives.
        made: outputs and gradients computed here and not yet sent or used, keyed by the send that carries them.
        tied_before: the gradients of tied parameters from before this step, which must not be summed again.
    """

    mode: Mode
    given: StepInputs
    shares: list[float]
    offsets: list[int]
    hooks: StepHooks
    between_ops: Hooks
    keep_outputs: bool
    input_grads: bool
    cotangents: Sequence[Any]
    loss_fn: LossFn | None = None
    made: dict[Action, Bundle] = field(default_factory=dict)
    losses: dict[int, Array] = field(default_factory=dict)
    outputs: dict[int, Array] = field(default_factory=dict)
    grads_of_input: dict[int, Array] = field(default_factory=dict)
    tied_before: list[tuple[Parameter, Array]] = field(default_factory=list)

    def weigh_by(self, hooks: Hooks) -> None:
        """Start each backward from what its micro-batch weighs among all replicas'.

        Only where hooks ask for it.
        """
        if hooks.mean_over is None:
            return
        if self.mode is Mode.TRAIN:
            self.cotangents = [count / hooks.mean_over for count in self.given.counts]
        else:
            self.cotangents = [part * part.dtype.type(hooks.share) for part in self.cotangents]

    @property
    def num_microbatches(self) -> int:
        """In how many parts this batch is cut."""
        return len(self.shares)


@dataclass(frozen=True)
class PipelineOutput:
    """What one step over a batch gave, by micro-batch.

    Attributes:
        losses: of each micro-batch, on every rank; empty where there was no loss.
        weights: each micro-batch's share of the samples, or of what else the mean is over; they sum to 1.
        outputs: of the last stage, on its rank; elsewhere empty.
        input_grads: of the first stage, on its rank, where asked for; elsewhere empty.
    """

    losses: list[float]
    weights: list[float]
    outputs: list[Array]
    input_grads: list[Array]

    @property
    def loss(self) -> float:
        """The mean loss of the batch.

        Raises:
            RuntimeError: there was none, as in `forward` and `backward`.
        """
        if not self.losses:
            raise RuntimeError("a pass by pipe.forward() and pipe.backward() has no loss; pipe.run() gives one")
        return math.fsum(loss * weight for loss, weight in zip(self.losses, self.weights, strict=True))
