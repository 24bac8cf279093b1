"""Layers that bring values to a mean of 0 and a variance of 1, or only to a mean square of 1."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from minigrad.arguments import check_sizes
from minigrad.autodiff.mode import is_replaying
from minigrad.backend import Array, place
from minigrad.nn.buffer import Buffer
from minigrad.nn.init import ParamGetter, ones, zeros
from minigrad.nn.module import Module
from minigrad.ops import batch_norm, layer_norm, mean, reshape, rms_norm, rsqrt, var
from minigrad.ops.batch import alone
from minigrad.tensor import Tensor


class LayerNorm(Module):
    """Normalise the last axis: (..., width) -> (..., width)."""

    def __init__(self, param: ParamGetter, width: int) -> None:
        check_sizes("LayerNorm", width=width)
        self.gain = param("gain", (width,), ones)
        self.bias = param("bias", (width,), zeros)

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.gain, self.bias)


class RMSNorm(Module):
    """Scale the last axis to mean square 1: (..., width) -> (..., width)."""

    def __init__(self, param: ParamGetter, width: int) -> None:
        check_sizes("RMSNorm", width=width)
        self.gain = param("gain", (width,), ones)

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.gain)


class GroupNorm(Module):
    """Normalise groups of channels, in each sample: (B, width, ...) -> the same shape.

    Args:
        num_groups: divides the width; 1 normalises all channels together.
    Raises:
        ValueError: it does not.
    Source: Wu and He 2018, Group normalization.
    """

    def __init__(self, param: ParamGetter, num_groups: int, width: int, *, eps: float = 1e-5) -> None:
        check_sizes("GroupNorm", width=width)
        if num_groups < 1 or width % num_groups:
            raise ValueError(f"GroupNorm: num_groups must divide the width, got {num_groups} and {width}")
        self.num_groups, self.eps = num_groups, eps
        self.gain = param("gain", (width,), ones)
        self.bias = param("bias", (width,), zeros)

    def __call__(self, x: Tensor) -> Tensor:
        _check_channels("GroupNorm", x, self.gain)
        groups = reshape(x, (len(x), self.num_groups, math.prod(x.shape[1:]) // self.num_groups))
        centred = groups - mean(groups, -1, keepdims=True)
        scaled = centred * rsqrt(var(groups, -1, keepdims=True) + self.eps)
        return reshape(scaled, x.shape) * _along_channels(self.gain, x) + _along_channels(self.bias, x)


class BatchNorm(Module):
    """Normalise each channel over the samples at hand.

    (B, width, ...) -> the same shape. In `eval` it takes the running mean and variance of training, two buffers. What
    the samples at hand are, a micro-batch on one rank, depends on the layout: of all layers this one alone gives other
    numbers in another one. GroupNorm does not; nor, over replicas, does `distributed.SyncBatchNorm`.

    Args:
        momentum: the share of the newest batch in the running mean and variance.
    Source: Ioffe and Szegedy 2015, Batch normalization.
    """

    def __init__(self, param: ParamGetter, width: int, *, eps: float = 1e-5, momentum: float = 0.1) -> None:
        self.eps, self.momentum = eps, momentum
        self.loss_weight: Callable[[], float] | None = None  # see `weight` of `ops.batch_norm`
        check_sizes("BatchNorm", width=width)
        self.gain = param("gain", (width,), ones)
        self.bias = param("bias", (width,), zeros)
        dtype, device = self.gain.dtype, param.device
        self.running_mean = Buffer(place(np.zeros(width, dtype), device), f"{param.prefix}running_mean")
        self.running_var = Buffer(place(np.ones(width, dtype), device), f"{param.prefix}running_var")

    def __call__(self, x: Tensor) -> Tensor:
        _check_channels("BatchNorm", x, self.gain)
        if self.training:
            return batch_norm(
                x, self.gain, self.bias, eps=self.eps, gather=self.gather, weight=self.loss_weight, note=self._note
            )
        centre, spread = _along_channels(self.running_mean, x), _along_channels(self.running_var, x)
        scaled = (x - centre) * rsqrt(spread + self.eps)
        return scaled * _along_channels(self.gain, x) + _along_channels(self.bias, x)

    def gather(self, own: Array) -> Array:
        """Return an array of each part of the batch.

        Here there is one part; see `ops.batch_norm`.
        """
        return alone(own)

    def _note(self, mean: Array, var: Array, count: int) -> None:
        if not is_replaying():
            for running, new in ((self.running_mean, mean), (self.running_var, var * (count / (count - 1)))):
                running.data = (1 - self.momentum) * running.data + self.momentum * new


def _check_channels(name: str, x: Tensor, gain: Tensor) -> None:
    """Raise a ValueError unless axis 1 has as many channels as the layer."""
    if x.ndim < 2 or x.shape[1] != gain.size:
        raise ValueError(f"{name}: x must be (B, {gain.size}, ...), got {x.shape}")


def _along_channels(values: Tensor, x: Tensor) -> Tensor:
    """Return (width,) with as many axes as x, its own in place of axis 1."""
    return reshape(values, (-1, *[1] * (x.ndim - 2)))
