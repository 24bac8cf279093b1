"""Causal attention for float32, bfloat16 and float16 on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minigrad.backend import Array, uses_tf32
from minigrad.kernels.attention import cudnn_attention
from minigrad.kernels.gpu_launch import THREADS, aligned, ceil_div, contiguous, cp, launch, num_blocks

__all__ = ["causal_attention"]

_HALF = np.dtype(np.float16)
_MOST_BLOCKS = 1056


def causal_attention(qkv: Array, num_heads: int) -> tuple[Array, Callable[[Array], Array]] | None:
    if not cudnn_attention.takes(qkv.shape, num_heads):
        return None
    if qkv.dtype == np.float32:
        return _through_float16(qkv, num_heads) if uses_tf32() else None
    return cudnn_attention.causal_attention(qkv, num_heads)


def _through_float16(qkv: Array, num_heads: int) -> tuple[Array, Callable[[Array], Array]]:
    """Do what TF32 would: float16 has as many bits of fraction, and sums are of float32 in both.

    Its range is smaller: gradients, which may all be tiny, are scaled by a power of two first.
    """
    y, vjp_half = cudnn_attention.causal_attention(_narrow(contiguous(qkv), None), num_heads)

    def vjp(g: Array) -> Array:
        g = contiguous(g)
        unscale = cp.empty((), np.float32)
        return _widen(vjp_half(_narrow(g, unscale)), unscale)

    return _widen(y, None), vjp


def _narrow(x: Array, unscale: Array | None) -> Array:
    """Return x in float16; with `unscale` its largest number in [1, 2), and there the factor that undoes it."""
    y, parts = cp.empty(x.shape, _HALF), cp.empty(0, np.float32)
    if unscale is not None:
        parts = cp.empty(min(_MOST_BLOCKS, ceil_div(x.size, 8 * THREADS)), np.float32)
        launch("largest", _HALF, len(parts), (x, parts, x.size), vectors=aligned(x))
    args = (x, y, parts, np.int32(len(parts)), _or_null(unscale), x.size)
    launch("narrow", _HALF, num_blocks(x.size, x, y), args, vectors=aligned(x, y))
    return y


def _widen(x: Array, unscale: Array | None) -> Array:
    y = cp.empty(x.shape, np.float32)
    launch("widen", _HALF, num_blocks(x.size, x, y), (x, y, _or_null(unscale), x.size), vectors=aligned(x, y))
    return y


def _or_null(x: Array | None) -> Any:
    return np.uintp(0) if x is None else x
