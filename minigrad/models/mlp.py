"""A multi-layer perceptron with ReLU between its linear layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minigrad.nn import Dropout, Linear, Module, ParamGetter, Sequential
from minigrad.ops import relu
from minigrad.tensor import Tensor


class MLPLayer(Module):
    """(B, num_in) -> (B, num_out): linear, then ReLU and dropout.

    The last layer is linear alone.
    """

    def __init__(self, param: ParamGetter, num_in: int, num_out: int, *, last: bool, dropout: float) -> None:
        self.linear = Linear(
            param, num_in, num_out, std=(2 / num_in) ** 0.5
        )  # He et al. 2015: keeps variance under ReLU
        self.last = last
        self.drop = Dropout(f"{param.prefix}drop", dropout)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if self.last else self.drop(relu(y))


def layers(widths: Sequence[int], *, dropout: float = 0.0) -> list[tuple[str, Callable[[ParamGetter], MLPLayer]]]:
    """Return the model as (name, factory), one a linear layer.

    Args:
        widths: of the input, of each hidden layer, and of the output; two or more.
        dropout: share of the hidden values that training zeroes, 0 to 1.
    Raises:
        ValueError: there are fewer than two widths.
    """
    if len(widths) < 2:
        raise ValueError(f"an MLP needs an input and an output width, got {list(widths)}")

    def factory(i: int) -> Callable[[ParamGetter], MLPLayer]:
        last = i == len(widths) - 2
        return lambda param: MLPLayer(param.at(f"fc{i}"), widths[i], widths[i + 1], last=last, dropout=dropout)

    return [(f"fc{i}", factory(i)) for i in range(len(widths) - 1)]


class MLP(Sequential):
    """The whole model: (B, widths[0]) -> (B, widths[-1])."""

    def __init__(
        self,
        widths: Sequence[int],
        *,
        dropout: float = 0.0,
        seed: int = 0,
        dtype: Any = np.float32,
        device: str = "cpu",
    ) -> None:
        param = ParamGetter(seed, dtype, device)
        super().__init__(factory(param) for _, factory in layers(widths, dropout=dropout))
