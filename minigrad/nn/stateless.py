"""Ops as modules, for a list of layers: `Sequential([linear, ReLU(), ...])`. The op itself does as well there."""

from __future__ import annotations

from minigrad.nn.module import Module
from minigrad.ops import avg_pool2d, gelu, leaky_relu, max_pool2d, relu, reshape, sigmoid, silu, softplus, tanh
from minigrad.tensor import Tensor


class ReLU(Module):
    """`ops.relu`."""

    def __call__(self, x: Tensor) -> Tensor:
        return relu(x)


class LeakyReLU(Module):
    """`ops.leaky_relu`."""

    def __init__(self, slope: float = 0.01) -> None:
        self.slope = slope

    def __call__(self, x: Tensor) -> Tensor:
        return leaky_relu(x, slope=self.slope)


class GELU(Module):
    """`ops.gelu`, by default in its tanh form."""

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact

    def __call__(self, x: Tensor) -> Tensor:
        return gelu(x, exact=self.exact)


class SiLU(Module):
    """`ops.silu`."""

    def __call__(self, x: Tensor) -> Tensor:
        return silu(x)


class Sigmoid(Module):
    """`ops.sigmoid`."""

    def __call__(self, x: Tensor) -> Tensor:
        return sigmoid(x)


class Tanh(Module):
    """`ops.tanh`."""

    def __call__(self, x: Tensor) -> Tensor:
        return tanh(x)


class Softplus(Module):
    """`ops.softplus`."""

    def __call__(self, x: Tensor) -> Tensor:
        return softplus(x)


class Flatten(Module):
    """Make one axis of all but the first: (B, ...) -> (B, n)."""

    def __call__(self, x: Tensor) -> Tensor:
        return reshape(x, (len(x), x.size // max(len(x), 1)))


class MaxPool2d(Module):
    """`ops.max_pool2d`: (B, C, H, W) -> (B, C, H', W').

    Args:
        size: of a window, one number or (height, width); stride likewise, by default the size.
    """

    def __init__(self, size: int | tuple[int, int], *, stride: int | tuple[int, int] | None = None) -> None:
        self.size, self.stride = size, stride

    def __call__(self, x: Tensor) -> Tensor:
        return max_pool2d(x, size=self.size, stride=self.stride)


class AvgPool2d(Module):
    """`ops.avg_pool2d`: (B, C, H, W) -> (B, C, H', W').

    Args:
        size: of a window, one number or (height, width); stride likewise, by default the size.
    """

    def __init__(self, size: int | tuple[int, int], *, stride: int | tuple[int, int] | None = None) -> None:
        self.size, self.stride = size, stride

    def __call__(self, x: Tensor) -> Tensor:
        return avg_pool2d(x, size=self.size, stride=self.stride)
