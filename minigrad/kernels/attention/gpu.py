"""Causal attention for float32, bfloat16 and float16 on a GPU."""

from __future__ import annotations

from collections.abc import Callable

from minigrad.backend import Array
from minigrad.kernels.attention import cudnn_attention

__all__ = ["causal_attention"]


def causal_attention(qkv: Array, num_heads: int) -> tuple[Array, Callable[[Array], Array]] | None:
    return cudnn_attention.causal_attention(qkv, num_heads) if cudnn_attention.takes(qkv, num_heads) else None
