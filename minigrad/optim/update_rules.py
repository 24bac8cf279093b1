"""Update rules on flat arrays: SGD, Adam, AdamW, and what a rule of your own has.

A rule is elementwise and works in place on any slice: it knows nothing of layers, which is why a
sharded optimizer needs no second implementation. Its state is at least float32: in float16 an eps of 1e-8
is 0, and so are squares of small gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from minigrad import habits
from minigrad.backend import Array, widened, xp_of
from minigrad.flat_range import FlatRange
from minigrad.kernels import kernels_of, kernels_of_runs
from minigrad.parameter import Parameter
from minigrad.precision import LossScale

_DIVIDES = "tells parameters apart: give it to an Optimizer, which divides the memory"
LearningRate = float | Callable[[int], float]


class Rule(Protocol):
    """How values change, given gradients.

    `lr` is a number or a function of the step (from 0).
    """

    @property
    def lr(self) -> LearningRate: ...

    def init(self, data: Array) -> dict[str, Array]:
        """Return the state for `data`: arrays of its shape, by name."""

    def update(self, data: Array, grad: Array, state: dict[str, Array], *, lr: float, step: int, decay: bool) -> None:
        """Change `data` and `state` in place.

        Args:
            data, grad: (n,); state: arrays (n,).
            lr: learning rate of this step.
            step: number of updates before this one.
            decay: whether weight decay applies here.
        """


class TakesALearningRate:
    """Base of the rules: refuses parameters in the place of a learning rate.

    They belong to the optimizer; PyTorch's take them there.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        lr = args[0] if args else kwargs.get("lr", 0.0)
        if not callable(lr) and not isinstance(lr, (int, float, np.number)):
            has_groups = isinstance(lr, (list, tuple)) and isinstance((*lr, None)[0], dict)
            way = habits.GROUPS if has_groups else f"Optimizer(parameters, {cls.__name__}(lr=...))"
            raise TypeError(
                f"{cls.__name__} takes a learning rate, a number or a function of the step, got {type(lr).__name__}; "
                f"parameters belong to the optimizer: write {way}"
            )
        return super().__new__(cls)


def check_rates(rule: Any, **rates: Any) -> None:
    """Check what a rule multiplies by.

    Args:
        rule: that has a learning rate, too, and a weight decay or none.
        rates: shares of an average that stay in a step, such as a momentum.
    Raises:
        ValueError: one is negative or not finite, or a share is not below 1.
    """
    name = type(rule).__name__
    for what in ("lr", "weight_decay", "eps"):
        value = getattr(rule, what, 0.0)
        if not callable(value) and not 0 <= value < math.inf:
            raise ValueError(f"{name}: {what} must be at least 0 and finite, got {value}")
    for what, share in rates.items():
        if not 0 <= share < 1:
            raise ValueError(f"{name}: {what} must be from 0 to below 1, got {share}")


@dataclass(frozen=True)
class SGD(TakesALearningRate):
    """Stochastic gradient descent: v = momentum v + g + weight_decay w; w -= lr v.

    Source: Sutskever et al. 2013, as commonly implemented (lr outside the velocity).
    Raises:
        ValueError: a number is negative or not finite, or momentum is not below 1.
    """

    lr: LearningRate
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_rates(self, momentum=self.momentum)

    def init(self, data: Array) -> dict[str, Array]:
        return {"velocity": _zeros(data)} if self.momentum else {}

    def update(self, data: Array, grad: Array, state: dict[str, Array], *, lr: float, step: int, decay: bool) -> None:
        weight_decay = self.weight_decay if decay else 0.0
        kernels = kernels_of_runs(data, grad, *state.values())
        kernels.sgd(data, grad, state.get("velocity"), lr, self.momentum, weight_decay)


@dataclass(frozen=True)
class AdamW(TakesALearningRate):
    """Adam with decoupled weight decay.

    m += (1 - b1)(g - m); v += (1 - b2)(g^2 - v); w -= lr (m' / (sqrt(v') + eps) + weight_decay w),
    m' = m / (1 - b1^t), v' = v / (1 - b2^t).

    Source: Loshchilov and Hutter 2019, algorithm 2.
    Raises:
        ValueError: a number is negative or not finite, or a beta is not below 1.
    """

    lr: LearningRate
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        beta1, beta2 = self.betas
        check_rates(self, beta1=beta1, beta2=beta2)

    def init(self, data: Array) -> dict[str, Array]:
        return {"m": _zeros(data), "v": _zeros(data)}

    def update(self, data: Array, grad: Array, state: dict[str, Array], *, lr: float, step: int, decay: bool) -> None:
        beta1, beta2 = self.betas
        correction1, correction2 = 1 - beta1 ** (step + 1), (1 - beta2 ** (step + 1)) ** 0.5
        # w -= lr/c1 m / (sqrt(v)/c2 + eps), with both corrections folded into two numbers
        rate, eps = lr / correction1 * correction2, self.eps * correction2
        keep = 1 - lr * self.weight_decay if decay else 1.0
        m, v = state["m"], state["v"]
        kernels_of_runs(data, grad, m, v).adamw(data, grad, m, v, beta1, beta2, rate, eps, keep)

    def whole_step(self, data: Array, max_norm: float | None, loss_scale: LossScale | None) -> Any:
        """Return what does whole steps on the device of `data`, or None.

        See `reference.adamw_step`.

        Args:
            data: (n,) what is updated.
            max_norm: to which gradients are clipped on the way; None does not clip.
            loss_scale: what the gradients were multiplied by; None for 1.
        """
        return kernels_of(data).adamw_step(self.betas, self.eps, self.weight_decay, max_norm, loss_scale)


@dataclass(frozen=True)
class Adam(AdamW):
    """`AdamW`, but weight decay, 0 by default, is added to the gradient: g + weight_decay w.

    Source: Kingma and Ba 2015, algorithm 1.
    """

    weight_decay: float = 0.0

    def update(self, data: Array, grad: Array, state: dict[str, Array], *, lr: float, step: int, decay: bool) -> None:
        if decay and self.weight_decay:
            grad = widened(grad) + self.weight_decay * widened(data)
        super().update(data, grad, state, lr=lr, step=step, decay=False)

    def whole_step(self, data: Array, max_norm: float | None, loss_scale: LossScale | None) -> Any:
        """Return what does whole steps, if there is no weight decay.

        On a GPU they decay weights as AdamW does, so with weight decay there is none.

        Args:
            data, max_norm, loss_scale: see `AdamW.whole_step`.
        """
        return None if self.weight_decay else super().whole_step(data, max_norm, loss_scale)


class DividingRule:
    """A rule made of several, which says what part of the memory each updates: `Groups`, `Muon`."""

    @property
    def lr(self) -> LearningRate:
        raise NotImplementedError

    def divide(self, part: FlatRange) -> Iterable[tuple[FlatRange, Rule]]:
        """Cut a range of memory into parts, each with its rule.

        A rule may divide its part further.
        """
        raise NotImplementedError

    def check(self, params: Sequence[Parameter]) -> None:
        """Raise ValueError if it does not fit all parameters of an optimizer.

        `divide` may see only a share of these.
        """

    def init(self, data: Array) -> dict[str, Array]:
        raise TypeError(f"{type(self).__name__} {_DIVIDES}")

    def update(self, data: Array, grad: Array, state: dict[str, Array], *, lr: float, step: int, decay: bool) -> None:
        raise TypeError(f"{type(self).__name__} {_DIVIDES}")


def divided(part: FlatRange, rule: Rule) -> Iterator[tuple[FlatRange, Rule]]:
    """Cut a part of the memory into what one rule each updates.

    Args:
        part: of one flat.
        rule: that it is for; one that is several is asked.
    """
    if isinstance(rule, DividingRule):
        for own_part, own in rule.divide(part):
            yield from divided(own_part, own)
    else:
        yield part, rule


def _zeros(data: Array) -> Array:
    return xp_of(data).zeros_like(widened(data[:0]), shape=data.shape)
