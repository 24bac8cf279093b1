"""Muon: momentum whose matrices are made orthogonal before they are added to the weights.

A matrix is whole or nothing here: its update depends on all of its gradient. What is no hidden matrix (gains, biases,
embeddings, the head) is trained by another rule.

Source: Jordan et al. 2024, Muon: an optimizer for hidden layers (kellerjordan.github.io/posts/muon); the scale of the
update is that of torch.optim.Muon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from minigrad.backend import Array, widened, xp_of
from minigrad.flat_range import FlatRange
from minigrad.optim.update_rules import AdamW, DividingRule, LearningRate, Rule, TakesALearningRate, check_rates
from minigrad.parameter import Parameter

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of x -> a x + b x^3 + c x^5, steep at 0; singular values end in 0.7 to 1.2
EPS = 1e-7


def is_hidden_matrix(p: Parameter) -> bool:
    """Return whether a parameter is a matrix inside the model.

    It has two axes and is, by its name, neither an embedding's nor the head's.
    """
    return p.ndim == 2 and p.name.partition(".")[0] not in ("embed", "head")


def orthogonalized(g: Array, *, num_iterations: int = 5) -> Array:
    """Return about U V^T, where g = U S V^T: all singular values become about 1.

    Args:
        g: (m, n).
    """
    a, b, c = NEWTON_SCHULZ
    x = widened(g)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / max(float(xp_of(x).linalg.norm(x)), EPS)
    for _ in range(num_iterations):
        gram = x @ x.T  # of the shorter side
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if is_tall else x


@dataclass(frozen=True)
class Muon(TakesALearningRate, DividingRule):
    """Momentum whose matrices are orthogonalized.

    v += (1 - momentum)(g - v); w -= lr (s orthogonalized(g + momentum (v - g)) + weight_decay w). s = sqrt(max(1,
    outputs / inputs)) of a (inputs, outputs) matrix.

    Attributes:
        lr: a number or a function of the step (from 0), of matrices.
        momentum: of the average that is made orthogonal, Nesterov's.
        weight_decay: of matrices.
        num_iterations: of Newton and Schulz.
        others: the rule of all other parameters, with its own learning rate.
        chooses: which parameters are matrices to this rule; each must have two axes.
    Raises:
        ValueError: num_iterations is below 1, a number is negative or not finite, or momentum is not below 1.
    """

    lr: LearningRate = 0.02
    momentum: float = 0.95
    weight_decay: float = 0.1
    num_iterations: int = 5
    others: Rule = field(default_factory=lambda: AdamW(3e-4))
    chooses: Callable[[Parameter], bool] = is_hidden_matrix

    def __post_init__(self) -> None:
        if self.num_iterations < 1:
            raise ValueError(f"num_iterations must be at least 1, got {self.num_iterations}")
        check_rates(self, momentum=self.momentum)

    def divide(self, part: FlatRange) -> Iterator[tuple[FlatRange, Rule]]:
        """Cut a range of memory into single matrices and what lies between them.

        Each comes with its rule.

        Raises:
            ValueError: a matrix is cut, or has not two axes.
        """
        for is_chosen, run in groupby(part.params, self.chooses):
            params = tuple(run)
            if not is_chosen:
                start, stop = max(params[0].start, part.start), min(params[-1].stop, part.stop)
                yield FlatRange(part.flat, start, stop, params), self.others
                continue
            for p in params:
                if p.ndim != 2:
                    raise ValueError(f"Muon trains matrices, but {p.label} has shape {p.shape}: see chooses")
                if p.start < part.start or part.stop < p.stop:
                    raise ValueError(f"Muon needs whole matrices, but {p.label} is cut: see whole= of the shards")
                yield FlatRange.over((p,)), MatrixRule(self, (p.shape[0], p.shape[1]))


@dataclass(frozen=True)
class MatrixRule:
    """What Muon does with one matrix, as a rule on its memory."""

    muon: Muon
    shape: tuple[int, int]

    @property
    def lr(self) -> LearningRate:
        return self.muon.lr

    def init(self, data: Array) -> dict[str, Array]:
        return {"momentum": xp_of(data).zeros_like(widened(data[:0]), shape=data.shape)}

    def update(self, data: Array, grad: Array, state: dict[str, Array], *, lr: float, step: int, decay: bool) -> None:
        muon, average = self.muon, state["momentum"]
        grad = widened(grad)
        average += (1 - muon.momentum) * (grad - average)
        direction = grad + muon.momentum * (average - grad)
        change = orthogonalized(direction.reshape(self.shape), num_iterations=muon.num_iterations)
        rate = lr * math.sqrt(max(1.0, self.shape[1] / self.shape[0]))
        keep = 1 - lr * muon.weight_decay if decay else 1.0
        data[...] = keep * widened(data) - rate * change.reshape(-1)
