"""Buffer: an array that a module keeps and nobody trains."""

from __future__ import annotations

from typing import Any

from minigrad.arguments import as_array
from minigrad.tensor import Tensor


class Buffer(Tensor):
    """A named array of a module's state that is not trained.

    It may be a table of positions, or a running mean. It is saved and loaded with the parameters, and gets no gradient.
    It comes from neither parameters nor data, so to the split of a backward in two halves it is what a number is:
    `weight_side` is None.

    Args:
        data: array of numbers or booleans; copied, so that nobody else holds the memory.
        name: unique within a model, parameters included.
    """

    __slots__ = ("name",)
    keeps_values = True

    def __init__(self, data: Any, name: str) -> None:
        super().__init__(as_array(data).copy(order="C"))
        self.weight_side = None
        self.name = name

    @property
    def label(self) -> str:
        return repr(self.name)
