"""Recomputed: a layer that keeps none of what its backward needs, and computes it again there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minigrad.autodiff.recomputation import recompute
from minigrad.nn.module import Module
from minigrad.tensor import Tensor


class Recomputed(Module):
    """A layer under `minigrad.recompute`.

    It takes less memory for one more forward, and gives the same gradients.

    Args:
        layer: of tensors, which gives one tensor.
    """

    def __init__(self, layer: Callable[..., Tensor]) -> None:
        self.layer = layer

    def __call__(self, *args: Any) -> Tensor:
        return recompute(self.layer, *args)
