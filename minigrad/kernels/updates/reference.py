"""Flat arrays (n,) of an optimizer. State of half precision parameters is float32; see `update_rules.py`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minigrad.backend import Array, widened, xp_of
from minigrad.kernels.common import BLOCK

__all__ = ["adamw", "adamw_step", "exact_square_sums", "scale", "sgd", "square_sum"]

EXACT_BLOCK = 1 << 13  # squares that are added up together: they stay in the cache
_GPU_BLOCK = 1 << 20


def sgd(w: Array, g: Array, velocity: Array | None, lr: float, momentum: float, weight_decay: float) -> None:
    """Do v = momentum v + g + weight_decay w; w -= lr v, in place; without a velocity v is g + weight_decay w."""
    step = widened(g)
    if weight_decay:
        step = step + weight_decay * widened(w)
    if velocity is not None:
        velocity *= momentum
        velocity += step
        step = velocity
    w[...] = widened(w) - lr * step


def adamw(
    w: Array, g: Array, m: Array, v: Array, beta1: float, beta2: float, rate: float, eps: float, keep: float
) -> None:
    """Do m += (1 - beta1)(g - m); v += (1 - beta2)(g^2 - v); w = keep w - rate m / (sqrt(v) + eps), in place."""
    xp = xp_of(w)
    block = BLOCK if xp is np else max(1, w.size)  # a GPU wants few, large kernels
    scratch = xp.empty_like(m[:block])
    for start in range(0, w.size, block):
        part = slice(start, start + block)
        own_w, own_g, own_m, own_v = widened(w[part]), widened(g[part]), m[part], v[part]
        t = scratch[: own_w.size]
        xp.subtract(own_g, own_m, t)
        t *= 1 - beta1
        own_m += t
        xp.multiply(own_g, own_g, t)
        t -= own_v
        t *= 1 - beta2
        own_v += t
        xp.sqrt(own_v, t)
        t += eps
        xp.divide(own_m, t, t)
        t *= rate
        if keep != 1.0:
            own_w *= keep
        own_w -= t
        if own_w.dtype != w.dtype:
            w[part] = own_w


def adamw_step(
    betas: tuple[float, float], eps: float, weight_decay: float, max_norm: float | None, loss_scale: Any
) -> Any:
    """Return what does a whole step, clipping included, without a question to the device; None: `adamw` by parts.

    Of a GPU, an object: `advance(lr, step)` tells the device the numbers of the next step, `prepare(grads, add_up)`
    makes the rest of them, of all gradients by whose norm it clips, or none; their squares `add_up` adds up over ranks.
    Then `update(w, g, m, v, copy, kinds)` updates a part, where `kinds` lists (number of elements, kind) of the runs of
    w, and kind 1 has weight decay, 0 none, 2 is frozen; `follows=True` takes over first what somebody assigned to
    `copy`, of which w is the master. `norm()` asks for the norm before clipping, `outcome()` whether the last step was
    taken, and how many were not since it was last asked.

    Args:
        loss_scale: what gradients are divided by and what each step updates, a `LossScale`, or None.
    """
    return None


def square_sum(g: Array) -> float:
    """Return the sum of squares, added up in float64, a block at a time: squares of float32 reach 1e77."""
    xp, total = xp_of(g), 0.0
    block = BLOCK if xp is np else max(1, g.size)
    for start in range(0, g.size, block):
        part = g[start : start + block].astype(np.float64, copy=False)
        total += float(xp.vdot(part, part))
    return total


def exact_square_sums(g: Array) -> list[float]:
    """Return numbers that add up to the sum of squares of float32, whatever it is cut into.

    The square of a number of 24 bits is a float64 without rounding. Of a block of squares the highest bits, as many as
    leave room for the carries of their sum, are taken off and added up without rounding, then the next ones. What is
    left, at least 64 bits under the largest square, is added up as it comes.

    Source: Rump, Ogita and Oishi 2008, Accurate floating-point summation part I, section 3 (ExtractVector).
    """
    xp, sums = xp_of(g), list[float]()
    length = EXACT_BLOCK if xp is np else _GPU_BLOCK
    carry_bits = length.bit_length()
    squares, highs, ones = xp.empty(length), xp.empty(length), xp.ones(length)
    for start in range(0, g.size, length):
        block = g[start : start + length]
        rest, high, one = squares[: block.size], highs[: block.size], ones[: block.size]
        xp.multiply(block, block, out=rest, dtype=np.float64)
        largest = float(rest.max())
        if not 0 < largest < math.inf:  # nan too
            sums += largest, 0.0, 0.0
            continue
        cut = 2.0 ** (math.frexp(largest)[1] + carry_bits)
        for _ in range(2):
            xp.add(rest, cut, out=high)
            high -= cut
            rest -= high
            sums.append(float(high @ one))  # in any order, as nothing is rounded
            cut *= 2.0 ** (carry_bits - 53)
        sums.append(float(rest @ one))
    return sums


def scale(g: Array, factor: float) -> None:
    """Multiply in place; half precision in float32, where a factor of 1e-9 is not 0."""
    g[...] = widened(g) * factor
