"""Clipping by the norm of the whole model, also where no rank holds all of it.

A rank that clips by the norm of its own parameters scales them by another factor than its neighbours do, and nothing
shows it but a model that learns worse. So `minigrad.optim.clip_by_global_norm` refuses parameters of a part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from distributed.comm.communicator import Communicator
from minigrad.optim import check_max_norm, grad_norm, scale_to_norm
from minigrad.parameter import Parameter


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
        """Return those that this rank counts in a sum over the whole model: tied ones on one rank only."""
        ...


def global_norm(part: ModelPart) -> float:
    """Return the gradient norm of the whole model, the same number on every rank that holds a part of it. Collective.

    Raises:
        RuntimeError: a gradient is still being reduced.
    """
    return joint_norm(grad_norm(part.counted_parameters()), part.comm)


def joint_norm(norm: float, comm: Communicator) -> float:
    """Return the norm of what all ranks have together, each a part of norm `norm`. Collective."""
    norms = comm.allgather(np.array(norm)).wait()
    return math.hypot(*norms.tolist())  # in rank order, and no square overflows


def clip_by_global_norm(part: ModelPart, max_norm: float) -> float:
    """Scale all gradients by max_norm / norm where the norm of the whole model is larger. Collective.

    After `ddp.wait()`: then replicas, which have equal gradients, clip alike.

        norm = clip_by_global_norm(stages, 1.0)

    Returns:
        The norm before clipping, the same on every rank. Gradients stay as they are where it is infinite or nan.
    Raises:
        ValueError: max_norm is not positive.
        RuntimeError: a gradient is still being reduced.
    Source: Pascanu et al. 2013.
    """
    check_max_norm(max_norm)
    norm = global_norm(part)
    scale_to_norm(part.parameters(), norm, max_norm)
    return norm
