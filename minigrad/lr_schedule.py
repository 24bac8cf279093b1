"""Learning rates as functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable


def warmup_cosine(
    peak: float, *, num_steps: int, num_warmup_steps: int = 0, floor: float = 0.0
) -> Callable[[int], float]:
    """Return a learning rate: linear warmup to `peak`, then half a cosine down.

    It is a function of the step, which ends at `floor`.

        peak       /--.
                  /     `.
        floor    /         `---     steps count from 0; the first one already learns

    Args:
        peak, floor: learning rates, 0 <= floor <= peak.
        num_steps: of the run, warmup included; later steps have the rate `floor`.
        num_warmup_steps: of these the first, from peak / num_warmup_steps up.
    Source: Loshchilov and Hutter 2017 (SGDR), without restarts.
    Raises:
        ValueError: warmup is longer than the run, or a number is negative.
    """
    if not 0 <= num_warmup_steps <= num_steps:
        raise ValueError(f"num_warmup_steps must be between 0 and num_steps, got {num_warmup_steps} and {num_steps}")
    if not 0 <= floor <= peak < math.inf:
        raise ValueError(f"floor must be between 0 and peak, which is finite, got {floor} and {peak}")

    def lr(step: int) -> float:
        if step < num_warmup_steps:
            return peak * (step + 1) / num_warmup_steps
        if step >= num_steps:
            return floor
        progress = (step - num_warmup_steps) / (num_steps - num_warmup_steps)
        return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2

    return lr


def scaled(lr: float | Callable[[int], float], factor: float) -> float | Callable[[int], float]:
    """Return a learning rate times a factor, such as that of a group of parameters.

    Args:
        lr: a number, or a function of the step.
        factor: on it.
    Raises:
        ValueError: the factor is negative or not finite.
    """
    if not 0 <= factor < math.inf:
        raise ValueError(f"the factor of a learning rate must be at least 0 and finite, got {factor}")
    return (lambda step: factor * lr(step)) if callable(lr) else factor * lr
