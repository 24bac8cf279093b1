"""Clipping by the norm of the whole model, also where no rank holds all of it.

A rank that clips by the norm of its own parameters scales them by another factor than its neighbours do, and nothing
shows it but a model that learns worse. So `minigrad.optim.clipping.clip_by_global_norm` refuses parameters of a part.

Where gradients are exact sums (`data_parallel/buckets/exact.py`) their norm is one too: the same bits in every layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from distributed.comm.communicator import Array, Communicator
from distributed.comm.solo import SoloCommunicator
from minigrad.flat import grads_of
from minigrad.optim.clipping import check_max_norm, exact_square_sums, grad_norm, scale_to_norm
from minigrad.parameter import Parameter, check_usable

NUM_TERMS = 3  # of an exact sum: it is right to 159 bits below its first one


@runtime_checkable
class ModelPart(Protocol):
    """This rank's part of a model, such as the stages of a pipeline.

    Attributes:
        comm: the ranks that hold the parts of one model; not its replicas, whose gradients are equal.
    """

    @property
    def comm(self) -> Communicator: ...

    def parameters(self) -> Sequence[Parameter]:
        """Return all that this rank holds."""
        ...

    def counted_parameters(self) -> Sequence[Parameter]:
        """Return those that this rank counts in a sum over the whole model.

        Tied ones count on one rank only.
        """
        ...


@dataclass(frozen=True)
class WholeModel:
    """The part of a model that one rank holds alone: all of it."""

    params: Sequence[Parameter]
    comm: Communicator = field(default_factory=SoloCommunicator)

    def parameters(self) -> Sequence[Parameter]:
        return self.params

    def counted_parameters(self) -> Sequence[Parameter]:
        return self.params


class PartNorm(NamedTuple):
    """The norm of some gradients, as a form that joins with those of other ranks.

    Attributes:
        plain: the norm; 0 where `squares` has it.
        squares: the exact sum of squares, as `NUM_TERMS` numbers that add up to it.
    """

    plain: float
    squares: tuple[float, ...] = (0.0,) * NUM_TERMS

    @staticmethod
    def of(params: Sequence[Parameter]) -> PartNorm:
        """Measure gradients that are whole.

        Raises:
            RuntimeError: somebody holds one of them.
        """
        if any(p.flat is not None and p.flat.is_widened for p in params):  # they are exact sums
            check_usable(params, "the norm of")
            return PartNorm.exact(grads_of(params))
        return PartNorm(grad_norm(params))

    @staticmethod
    def exact(grads: Iterable[Array]) -> PartNorm:
        """Measure gradients, (n,) each, so that it does not show how they are cut into arrays."""
        return PartNorm(0.0, _expansion(exact_square_sums(grads)))

    def over(self, comm: Communicator) -> PartNorm:
        """Return that of what all ranks have together. Collective."""
        rows = comm.allgather(np.array([self.plain, *self.squares])).wait()
        plain = math.hypot(*rows[:, 0].tolist())  # in rank order, and no square overflows
        return PartNorm(plain, _expansion(rows[:, 1:].reshape(-1).tolist()))

    def joint(self, comm: Communicator) -> float:
        """Return the norm of what all ranks have together, as a number. Collective."""
        plain, squares = self.over(comm)
        return math.hypot(plain, math.sqrt(math.fsum(squares)))


class Gradients(Protocol):
    """Where the gradients of a part are: whole with their parameters, or in buckets."""

    def part_norm(self, params: Sequence[Parameter]) -> PartNorm: ...

    def scale_to_norm(self, params: Iterable[Parameter], norm: float, max_norm: float) -> None: ...


class _WithParameters:
    """Gradients that are whole with their parameters."""

    part_norm = staticmethod(PartNorm.of)
    scale_to_norm = staticmethod(scale_to_norm)


WITH_PARAMETERS: Gradients = _WithParameters()


def global_norm(part: ModelPart, gradients: Gradients = WITH_PARAMETERS) -> float:
    """Return the gradient norm of the whole model. Collective.

    The same number on every rank that holds a part of it.

    Args:
        gradients: of the part, where its parameters do not have them whole.
    Raises:
        RuntimeError: a gradient is still being reduced.
    """
    return gradients.part_norm(part.counted_parameters()).joint(part.comm)


def clip_by_global_norm(part: ModelPart, max_norm: float, gradients: Gradients = WITH_PARAMETERS) -> float:
    """Scale all gradients so that their norm is at most `max_norm`. Collective.

    They are multiplied by max_norm / norm where the norm of the whole model is larger. After `ddp.wait()`: then
    replicas, which have equal gradients, clip alike.

        norm = clip_by_global_norm(stages, 1.0)

    Args:
        gradients: of the part, where its parameters do not have them whole; `ddp.clip_by_global_norm` gives its own.
    Returns:
        The norm before clipping, the same on every rank. Gradients stay as they are where it is infinite or nan.
    Raises:
        ValueError: max_norm is not positive.
        RuntimeError: a gradient is still being reduced.
    Source: Pascanu et al. 2013.
    """
    check_max_norm(max_norm)
    norm = global_norm(part, gradients)
    gradients.scale_to_norm(part.parameters(), norm, max_norm)
    return norm


@dataclass(frozen=True)
class NormOverRanks:
    """The whole model, for an optimizer of this rank's part.

    It clips by the norm of all, and asks a GPU nothing. Making one is collective.

        optimizer = Optimizer(stages.parameters(), rule, max_norm=1.0, norm_over=NormOverRanks(stages))

    Raises:
        ValueError: some rank holds no parameter, and so has no optimizer that could take part.
    """

    part: ModelPart

    def __post_init__(self) -> None:
        check_held_everywhere(self.part)

    def counted_grads(self) -> Sequence[Array]:
        params = self.part.counted_parameters()
        check_usable(params, "the norm of")
        return list(grads_of(params))

    def add_up(self, squares: Array) -> None:
        self.part.comm.allreduce(squares).wait()


def check_held_everywhere(part: ModelPart) -> None:
    """Raise ValueError if some rank holds no parameter, and so no optimizer that could add to a norm. Collective."""
    num_held = part.comm.gather_objects(len(part.parameters()))
    if 0 in num_held:
        raise ValueError(f"clipping by the norm of all ranks needs parameters on each, got {num_held} by rank")


def _expansion(values: Sequence[float]) -> tuple[float, ...]:
    """Return the sum of non-negative numbers as `NUM_TERMS` numbers: it rounded, what is left of it, and of that.

    Source: Shewchuk 1997, Adaptive precision floating-point arithmetic, section 2.
    """
    terms: list[float] = []
    for _ in range(NUM_TERMS):
        terms.append(math.fsum([*values, *(-term for term in terms)]))
        if not math.isfinite(terms[0]):
            return (terms[0],) * NUM_TERMS
    return tuple(terms)
