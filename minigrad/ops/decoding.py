"""A whole transformer block for one more position of a text: no op, since nobody wants its derivative."""

from __future__ import annotations

from collections.abc import Sequence

from minigrad.autodiff.mode import current_hook, is_recording
from minigrad.backend import Array
from minigrad.kernels import kernels_of
from minigrad.ops.nn import NORM_EPS
from minigrad.tensor import Tensor


def block_at_once(x: Tensor, weights: Sequence[Tensor], num_heads: int, memory: Array, position: int) -> Tensor | None:
    """Return what a pre-norm block with a GELU makes of one position, in one kernel; None: its ops have to run.

    They have to where something is recorded or somebody watches, and where there is no such kernel.

    Args:
        x, weights, memory, position: as in `block_step` of the kernels.
    """
    if is_recording() or current_hook() is not None:
        return None
    arrays = [tensor._data for tensor in weights]  # as ops see them
    largest = max(arrays, key=lambda array: array.size)
    y = kernels_of(largest, x._data, memory, *arrays).block_step(x._data, arrays, num_heads, NORM_EPS, memory, position)
    return None if y is None else Tensor(y)
