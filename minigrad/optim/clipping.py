"""The norm of gradients, and clipping by it, of a model that lives in one process.

`distributed/clipping.py` does it for a model whose parts lie on several ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from minigrad.backend import Array
from minigrad.flat import grads_of
from minigrad.kernels import kernels_of
from minigrad.parameter import Parameter, check_usable


class NormOver(Protocol):
    """The whole model, as an optimizer of a part of it knows it.

    By its norm it clips: `distributed.NormOverRanks` is one.
    """

    def counted_grads(self) -> Sequence[Array]:
        """Return those that this part counts in a sum over the whole model.

        Raises:
            RuntimeError: somebody holds one of them.
        """
        ...

    def add_up(self, squares: Array) -> None:
        """Add up sums of squares over all parts, in place.

        Args:
            squares: (1,) of this part, of the host or of a GPU.
        """
        ...


def norm_of_parts(whole: NormOver) -> float:
    """Return the gradient norm of a model that lies in parts. Collective over these."""
    squares = np.array([_square_sum(whole.counted_grads())])
    whole.add_up(squares)
    return math.sqrt(float(squares[0]))


def grad_square_sum(params: Iterable[Parameter]) -> float:
    """Return the sum of squares of all gradients.

    Sums of ranks that hold different parameters add. It is added up in float64, so that it is finite for all finite
    gradients but the largest of float64.

    Raises:
        RuntimeError: somebody holds one of the gradients.
    """
    params = list(params)
    check_usable(params, "the norm of")
    return _square_sum(grads_of(params))


def _square_sum(grads: Iterable[Array]) -> float:
    return sum((kernels_of(grad).square_sum(grad) for grad in grads), 0.0)


def exact_square_sums(grads: Iterable[Array]) -> list[float]:
    """Return numbers that add up to the sum of squares of float32, however it is cut into arrays, (n,) each."""
    return [part for grad in grads for part in kernels_of(grad).exact_square_sums(grad)]


def scale_to_norm(params: Iterable[Parameter], norm: float, max_norm: float) -> None:
    """Scale all gradients so that their norm is at most `max_norm`.

    They are multiplied by max_norm / norm where the norm of the whole model's gradient is larger. A norm that is
    infinite or nan scales nothing: gradients of 0 would hide it.

    Args:
        params: whose gradients are scaled.
        norm: of the whole model's gradient.
        max_norm: above 0; infinity scales nothing.
    Raises:
        ValueError: max_norm is not positive.
    """
    clip_arrays(grads_of(params), norm, max_norm)


def clip_arrays(grads: Iterable[Array], norm: float, max_norm: float) -> None:
    """Scale gradients, (n,) each, as `scale_to_norm` does those of parameters.

    Args:
        grads: scaled in place.
        norm, max_norm: see `scale_to_norm`.
    """
    check_max_norm(max_norm)
    if norm > max_norm and math.isfinite(norm):
        for grad in grads:
            kernels_of(grad).scale(grad, max_norm / norm)


def check_max_norm(max_norm: float) -> None:
    """Raise ValueError if a norm to clip to is not positive."""
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")


def clip_by_global_norm(params: Iterable[Parameter], max_norm: float) -> float:
    """Clip the gradients of a model that lives in this process by their global norm.

    Returns:
        The norm before clipping. Gradients stay as they are where it is infinite or nan.
    Raises:
        ValueError: max_norm is not positive.
        RuntimeError: a parameter is one of a part of a model: its norm is not the model's.
    Source: Pascanu et al. 2013.
    """
    params = list(params)  # a generator, asked a second time, would have none, of norm 0
    check_whole(params)
    norm = grad_norm(params)
    scale_to_norm(params, norm, max_norm)
    return norm


def check_whole(params: Iterable[Parameter]) -> None:
    """Raise RuntimeError if one of these parameters is of a part of a model.

    Their norm would not be the model's.
    """
    for p in params:
        if p.part_of:
            raise RuntimeError(f"the norm of {p.label}: it is of {p.part_of}")


def grad_norm(params: Iterable[Parameter]) -> float:
    """Return the norm of all gradients, also where their squares overflow or vanish.

    Raises:
        RuntimeError: somebody holds one of the gradients.
    """
    params = list(params)
    check_usable(params, "the norm of")
    return norm_of(grads_of(params))


def norm_of(grads: Iterable[Array]) -> float:
    """Return the norm of some gradients together.

    It is right also where their squares overflow or vanish.
    """
    grads = [grad for grad in grads if grad.size]
    total = _square_sum(grads)
    if 1e-280 < total < 1e280 or math.isnan(total):
        return math.sqrt(total)
    largest = max((float(abs(grad).max()) for grad in grads), default=0.0)
    if largest == 0 or math.isinf(largest):
        return largest
    # All gradients are finite, but their squares overflowed float64, or vanished.
    return largest * math.sqrt(sum(kernels_of(grad).square_sum(grad.astype(np.float64) / largest) for grad in grads))
