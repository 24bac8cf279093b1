"""A GPT: token and position embedding, pre-norm transformer blocks, a head tied to the embedding.

Source: Radford et al. 2019 (GPT-2); initial values as in its code, residual projections scaled by 1 / sqrt(2 layers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from minigrad.arguments import as_array
from minigrad.backend import Array
from minigrad.nn import (
    Dropout,
    Embedding,
    KeyValueCache,
    LayerFactory,
    LayerNorm,
    Linear,
    Module,
    MultiHeadAttention,
    ParamGetter,
    Recomputed,
    Sequential,
    normal,
)
from minigrad.ops import feed_forward, unembed
from minigrad.ops.decoding import block_at_once
from minigrad.tensor import Tensor


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT.

    Raises:
        ValueError: width is not divisible by num_heads, or a size is below 1.
    """

    vocab_size: int = 256
    context: int = 64
    num_layers: int = 4
    num_heads: int = 4
    width: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "num_layers", "num_heads", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.num_heads:
            raise ValueError(f"width must be divisible by num_heads, got {self.width} and {self.num_heads}")


class GPTEmbedding(Module):
    """Token ids (B, T) -> (B, T, width), for the positions from `start` on.

    The last of these must lie within the context.
    """

    def __init__(self, param: ParamGetter, config: GPTConfig) -> None:
        self.context = config.context
        self.token = Embedding(param.at("token"), config.vocab_size, config.width)
        self.position = param("position", (config.context, config.width), normal(0.02))
        self.drop = Dropout(f"{param.prefix}drop", config.dropout)

    def __call__(self, ids: Array, start: int = 0) -> Tensor:
        ids = as_array(ids)
        if ids.ndim != 2:
            raise ValueError(f"token ids must be (B, T), got shape {ids.shape}")
        end = start + ids.shape[1]
        if end > self.context:
            raise ValueError(f"a sequence must be at most as long as the context, got {end} and {self.context}")
        return self.drop(self.token(ids) + self.position[start:end])


class GPTAttention(Module):
    """The first half of a block, (B, T, width) -> (B, T, width): x + attention(norm(x))."""

    def __init__(self, param: ParamGetter, config: GPTConfig) -> None:
        self.norm = LayerNorm(param.at("norm1"), config.width)
        self.heads = MultiHeadAttention(
            param.at("attention"), config.width, config.num_heads, std=0.02, out_std=_out_std(config)
        )
        self.drop = Dropout(f"{param.prefix}drop1", config.dropout)

    def __call__(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        return self.drop.join(x, partial(self.heads, self.norm(x), cache))


class GPTFeedForward(Module):
    """The second half of a block, (B, T, width) -> (B, T, width): x + mlp(norm(x)), each position by itself."""

    def __init__(self, param: ParamGetter, config: GPTConfig) -> None:
        self.norm = LayerNorm(param.at("norm2"), config.width)
        self.up = Linear(param.at("up"), config.width, 4 * config.width, std=0.02)
        self.down = Linear(param.at("down"), 4 * config.width, config.width, std=_out_std(config))
        self.drop = Dropout(f"{param.prefix}drop2", config.dropout)

    def __call__(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Return what x becomes; the cache stays empty, whoever writes text gives one to every layer of a block."""
        return self.drop.join(x, partial(self._mlp, self.norm(x)))

    def _mlp(self, x: Tensor, *, beside: Tensor | None = None) -> Tensor:
        arrays: list[Any] = [self.up.weight, self.up.bias, self.down.weight, self.down.bias]
        return feed_forward(x, *arrays, *(() if beside is None else (beside,)))


class GPTBlock(Module):
    """(B, T, width) -> (B, T, width): x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, param: ParamGetter, config: GPTConfig) -> None:
        self.attention = GPTAttention(param, config)
        self.feed_forward = GPTFeedForward(param, config)

    def __call__(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        if cache is not None and cache.length and x.shape[1] == 1:
            y = self._step(x, cache)
            if y is not None:
                return y
        return self.feed_forward(self.attention(x, cache))

    def _step(self, x: Tensor, cache: KeyValueCache) -> Tensor | None:
        """Return what one more position, (B, 1, width), becomes in one kernel; None where ops have to run."""
        first, second = self.attention, self.feed_forward
        if not (first.drop.is_idle and second.drop.is_idle):
            return None
        maps = first.norm, first.heads.qkv, first.heads.out, second.norm, second.up, second.down
        weights: list[Any] = [x for m in maps for x in ((m.gain if isinstance(m, LayerNorm) else m.weight), m.bias)]
        y = block_at_once(x, weights, first.heads.num_heads, *cache.room(1))
        cache.length += y is not None
        return y


def _out_std(config: GPTConfig) -> float:
    """Return the deviation of the first weights that add to the residual stream, twice a block."""
    return 0.02 / float((2 * config.num_layers) ** 0.5)


class GPTHead(Module):
    """(B, T, width) -> logits (B, T, vocab_size), through the transposed token table."""

    def __init__(self, param: ParamGetter, config: GPTConfig) -> None:
        self.norm = LayerNorm(param.at("head").at("norm"), config.width)
        self.token = param.at("embed").at("token").tied("weight", (config.vocab_size, config.width), normal(0.02))

    def __call__(self, x: Tensor) -> Tensor:
        return unembed(self.norm(x), self.token)


def layers(config: GPTConfig, *, recompute: bool = False, half_blocks: bool = False) -> list[tuple[str, LayerFactory]]:
    """Return the model as (name, factory), "embed", "block0" ... "head".

    A factory takes the whole model's getter.

    Args:
        recompute: blocks keep nothing for their backward but their input, and run again there.
        half_blocks: blocks are two layers each, "block0.attention" and "block0.feed_forward", so that a pipeline may be
            cut between them. Parameters are the same, and losses and gradients to the bit.
    """
    kinds: dict[str, Callable[[ParamGetter, GPTConfig], Module]] = {"": GPTBlock}
    if half_blocks:
        kinds = {".attention": GPTAttention, ".feed_forward": GPTFeedForward}

    def layer(kind: Callable[[ParamGetter, GPTConfig], Module], block: str) -> LayerFactory:
        if recompute:
            return lambda param: Recomputed(kind(param.at(block), config))
        return lambda param: kind(param.at(block), config)

    blocks = [f"block{i}" for i in range(config.num_layers)]
    return [
        ("embed", lambda param: GPTEmbedding(param.at("embed"), config)),
        *((block + half, layer(kind, block)) for block in blocks for half, kind in kinds.items()),
        ("head", lambda param: GPTHead(param, config)),
    ]


class GPT(Sequential):
    """The whole model: token ids (B, T) -> logits (B, T, vocab_size)."""

    def __init__(self, config: GPTConfig, *, seed: int = 0, dtype: Any = np.float32, device: str = "cpu") -> None:
        param = ParamGetter(seed, dtype, device)
        super().__init__(factory(param) for _, factory in layers(config))
        self.config = config
