"""Small layers for pipelines, as the (name, factory) that stages are built from; and what one process makes of them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import minigrad as mg
from minigrad import nn, rng
from minigrad.backend import Array
from minigrad.nn import Module, ParamGetter
from pipeline.stage import LayerFactory

Layer = tuple[str, LayerFactory]


def constant(value: float) -> nn.init.Init:
    return lambda generator, shape: np.full(shape, float(value))


class _Dense(Module):
    def __init__(self, param: ParamGetter, num_in: int, num_out: int) -> None:
        self.linear = nn.Linear(param, num_in, num_out)

    def __call__(self, x: Any) -> mg.Tensor:
        return mg.tanh(self.linear(x))


class _Scale(Module):
    def __init__(self, param: ParamGetter, name: str, shape: tuple[int, ...], value: float) -> None:
        self.scale = param(name, shape, constant(value))

    def __call__(self, x: Any) -> mg.Tensor:
        return x * self.scale


class _ScalePositive(_Scale):
    def __call__(self, x: Any) -> Any:
        data = x.data if isinstance(x, mg.Tensor) else x
        return x * self.scale if data.sum() > 0 else x


class _Holds(Module):
    """Holds a parameter that it does not use."""

    def __init__(self, param: ParamGetter, name: str, shape: tuple[int, ...]) -> None:
        self.unused = param(name, shape, constant(1))

    def __call__(self, x: Any) -> Any:
        return x


def dense(name: str, num_in: int, num_out: int) -> Layer:
    """tanh(x @ w + b)."""
    return name, lambda param: _Dense(param.at(name), num_in, num_out)


def scale(name: str, value: float = 2.0, *, shape: tuple[int, ...] = (), shared: str | None = None) -> Layer:
    """x * w, with the parameter called `shared` where it is tied."""
    return name, lambda param: _Scale(param, shared or name, shape, value)


def scale_positive(name: str, value: float = 2.0) -> Layer:
    """x * w for micro-batches with a positive sum; the others pass through."""
    return name, lambda param: _ScalePositive(param, name, (), value)


def holds(name: str, shared: str, shape: tuple[int, ...] = ()) -> Layer:
    """x, beside a tied parameter that this layer does not use."""
    return name, lambda param: _Holds(param, shared, shape)


def apply(name: str, function: Callable[[Any], Any]) -> Layer:
    """function(x), without a parameter."""
    return name, lambda param: function


def mean(output: mg.Tensor, y: Array) -> mg.Tensor:
    """A loss that ignores its targets."""
    return output.mean()


def gradients_in_one_process(
    layers: Sequence[Layer],
    x_parts: Sequence[Array],
    y_parts: Sequence[Array],
    loss_fn: Callable[[mg.Tensor, Array], mg.Tensor],
    *,
    dtype: Any = np.float64,
) -> tuple[float, dict[str, Array]]:
    """Return loss and gradients of the whole model, micro-batch after micro-batch, weighted by samples."""
    param = ParamGetter(0, dtype)
    model = nn.Sequential([factory(param) for _, factory in layers])
    num_samples = sum(len(x) for x in x_parts)
    loss, first = 0.0, 0
    for x, y in zip(x_parts, y_parts, strict=True):
        with rng.offset(first):
            part = loss_fn(model(x), y)
        first += len(x)
        loss += part.item() * len(x) / num_samples
        if part.requires_grad:
            mg.backward_with_grad(part, len(x) / num_samples)
    grads = {}
    for name, p in model.named_parameters().items():
        p.fill_missing_grad()
        grads[name] = p.grad
    return loss, grads
