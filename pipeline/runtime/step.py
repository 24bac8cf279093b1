"""What one pass over a batch gives, and its state while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minigrad.backend import Array
from minigrad.parameter import Parameter
from pipeline.runtime.boundary import ArraySpec, Bundle
from pipeline.runtime.handshake import StepInputs
from pipeline.runtime.step_hooks import StepHooks
from pipeline.schedules.action import Action


@dataclass(frozen=True)
class PipelineOutput:
    """What one pass over a batch gave, by micro-batch.

    Attributes:
        losses: of each micro-batch, on every rank; empty where there was no loss.
        weights: each micro-batch's share of the samples.
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
            RuntimeError: the pass had none, as `forward` and `backward`.
        """
        if not self.losses:
            raise RuntimeError("a pass by pipe.forward() and pipe.backward() has no loss; pipe.run() gives one")
        return float(sum(loss * weight for loss, weight in zip(self.losses, self.weights, strict=True)))


@dataclass
class StepState:
    """The state of one pass over a batch, from its opening to its close.

    Attributes:
        made: outputs and gradients computed here and not yet sent or used, keyed by the send that carries them.
        cotangents: where a backward starts: each micro-batch's weight in the mean loss, or what the caller gives.
        tied_before: the gradients of tied parameters from before this pass, which must not be summed again.
    """

    opening: StepInputs
    weights: list[float]
    cotangents: Sequence[Any]
    readiness: StepHooks
    has_loss: bool
    keep_outputs: bool
    input_grads: bool
    trains: bool
    made: dict[Action, Bundle] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    outputs: dict[int, Array] = field(default_factory=dict)
    output_specs: dict[int, ArraySpec] = field(default_factory=dict)
    grads_of_input: dict[int, Array] = field(default_factory=dict)
    tied_before: list[tuple[Parameter, Array]] = field(default_factory=list)
