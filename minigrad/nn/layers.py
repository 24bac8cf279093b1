"""Layers, one around each op that has parameters. Each asks a getter for them: see `ParamGetter`.

Norms are in `norms.py`, ops without parameters in `stateless.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from minigrad import rng
from minigrad.arguments import as_int, check_sizes
from minigrad.backend import Array, xp_of
from minigrad.nn.init import ParamGetter, normal, zeros
from minigrad.nn.key_value_cache import KeyValueCache
from minigrad.nn.module import Module
from minigrad.ops import (
    add_dropout,
    causal_attention,
    conv2d,
    dropout,
    embedding,
    linear,
    matmul,
)
from minigrad.ops.attention import attend
from minigrad.tensor import Tensor


class Linear(Module):
    """Map the last axis: (..., num_in) -> (..., num_out).

    Args:
        std: of the initial weights; 1 / sqrt(num_in) by default, which keeps the variance.
        bias: whether something is added to the product.
    """

    def __init__(
        self, param: ParamGetter, num_in: int, num_out: int, *, std: float | None = None, bias: bool = True
    ) -> None:
        check_sizes(type(self).__name__, num_in=num_in, num_out=num_out)
        std = 1 / math.sqrt(num_in) if std is None else std
        self.weight = param("weight", (num_in, num_out), normal(std))
        self.bias = param("bias", (num_out,), zeros) if bias else None

    def __call__(self, x: Tensor, *, beside: Tensor | None = None) -> Tensor:
        """Return the map of x, added to `beside` if that is given: a residual connection in one pass."""
        if self.bias is None:
            y = matmul(x, self.weight)
            return y if beside is None else beside + y
        return linear(x, self.weight, self.bias, *(() if beside is None else (beside,)))


class Conv2d(Module):
    """Slide a kernel over images: (B, num_in, H, W) -> (B, num_out, H', W').

    See `ops.conv2d`.

    Args:
        size: of the kernel, one number or (height, width); stride and padding likewise.
        std: of the initial weights; 1 / sqrt(num_in height width) by default, which keeps the variance.
    """

    def __init__(
        self,
        param: ParamGetter,
        num_in: int,
        num_out: int,
        size: int | tuple[int, int],
        *,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        std: float | None = None,
    ) -> None:
        one = as_int(size)
        height, width = size if one is None else (one, one)  # type: ignore[misc]
        check_sizes("Conv2d", num_in=num_in, num_out=num_out, height=height, width=width)
        std = 1 / math.sqrt(num_in * height * width) if std is None else std
        self.stride, self.padding = stride, padding
        self.weight = param("weight", (num_out, num_in, height, width), normal(std))
        self.bias = param("bias", (num_out,), zeros)

    def __call__(self, x: Tensor) -> Tensor:
        return conv2d(x, self.weight, self.bias, stride=self.stride, padding=self.padding)


class Embedding(Module):
    """Look rows up: integers (...) -> (..., width)."""

    def __init__(self, param: ParamGetter, num_rows: int, width: int, *, std: float = 0.02) -> None:
        check_sizes("Embedding", num_rows=num_rows, width=width)
        self.weight = param("weight", (num_rows, width), normal(std))

    def __call__(self, ids: Array) -> Tensor:
        return embedding(self.weight, ids)


class Dropout(Module):
    """Zero a share of the values while training.

    The mask is keyed by this layer's name: see `rng`. The first axis counts samples. In training, with a rate above 0,
    run the forward in `rng.scope`.

    Raises:
        ValueError: rate is outside [0, 1).
    """

    def __init__(self, name: str, rate: float) -> None:
        if not 0 <= rate < 1:
            raise ValueError(f"the dropout rate must be in [0, 1), got {rate}")
        self.name = name
        self.rate = rate

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_idle:
            return x
        return dropout(x, keep=rng.keep_mask(self.name, x.shape, self.rate), rate=self.rate)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is dropped: in evaluation, or at a rate of 0."""
        return not self.training or self.rate == 0

    def join(self, x: Tensor, branch: Callable[..., Tensor]) -> Tensor:
        """Return x plus a branch with dropout, in one pass: a residual connection.

        Args:
            branch: `branch()` returns it, and `branch(beside=x)` the sum of x and all of it.
        """
        if self.is_idle:
            return branch(beside=x)
        y = branch()
        return add_dropout(x, y, keep=rng.keep_mask(self.name, y.shape, self.rate), rate=self.rate)


class MultiHeadAttention(Module):
    """Causal self-attention: (B, T, width) -> (B, T, width).

    Called with a cache, the T positions come after those in it, which they see too; nothing is recorded. `beside` is
    added to the result, as in `Linear`.

    Args:
        std: of the initial weights.
        out_std: of the initial weights of the output projection; smaller in deep residual networks.
    """

    def __init__(self, param: ParamGetter, width: int, num_heads: int, *, std: float, out_std: float) -> None:
        check_sizes("MultiHeadAttention", width=width, num_heads=num_heads)
        if width % num_heads:
            raise ValueError(f"MultiHeadAttention: width must be divisible by num_heads, got {width} and {num_heads}")
        self.num_heads = num_heads
        self.qkv = Linear(param.at("qkv"), width, 3 * width, std=std)
        self.out = Linear(param.at("out"), width, width, std=out_std)

    def __call__(self, x: Tensor, cache: KeyValueCache | None = None, *, beside: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x)
        if cache is None:
            return self.out(causal_attention(qkv, num_heads=self.num_heads), beside=beside)
        batch, time, width = x.shape
        # (B, T, 3 C) -> three of (B, heads, T, d)
        q, k, v = qkv.data.reshape(batch, time, 3, self.num_heads, -1).transpose(2, 0, 3, 1, 4)
        keys, values = cache.extend(k, v)
        xp, sees = xp_of(q), None  # a single new position sees all
        if time > 1:
            sees = xp.tri(time, cache.length, cache.length - time, dtype=bool)  # row t: up to t of the new ones
            sees = xp.broadcast_to(sees, (*q.shape[:-1], cache.length))
        y = xp.empty((batch, time, self.num_heads, width // self.num_heads), q.dtype)
        attend(q, keys, values, y.swapaxes(1, 2), causal=False, mask=sees)
        return self.out(y.reshape(batch, time, width), beside=beside)
