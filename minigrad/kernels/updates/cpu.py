"""Update rules and norms of flat arrays for float32 and float64 on a CPU, compiled by numba."""

from __future__ import annotations

import math

import numpy as np

from minigrad.backend import Array
from minigrad.kernels.compiling import EXACT, SUMS, compiled, contiguous, inlined
from minigrad.kernels.updates import reference
from minigrad.kernels.updates.reference import EXACT_BLOCK

__all__ = ["adamw", "exact_square_sums", "sgd", "square_sum"]

_INFINITY = 0x7F800000  # the bits of a float32


@compiled(EXACT)
def _sgd(w: Array, g: Array, velocity: Array, has_velocity: bool, lr: float, momentum: float, decay: float) -> None:
    T = w.dtype.type
    rate, share, shrink = T(lr), T(momentum), T(decay)
    for i in range(w.size):
        step = g[i] + shrink * w[i] if decay != 0 else g[i]
        if has_velocity:
            step += velocity[i] * share
            velocity[i] = step
        w[i] -= rate * step


def sgd(w: Array, g: Array, velocity: Array | None, lr: float, momentum: float, weight_decay: float) -> None:
    state = w if velocity is None else velocity
    _sgd(w, contiguous(g), state, velocity is not None, float(lr), float(momentum), float(weight_decay))


@compiled(EXACT)
def _adamw(
    w: Array, g: Array, m: Array, v: Array, beta1: float, beta2: float, rate: float, eps: float, keep: float
) -> None:
    T = w.dtype.type
    share1, share2, size, tiny, kept = T(1 - beta1), T(1 - beta2), T(rate), T(eps), T(keep)
    for i in range(w.size):
        m[i] += (g[i] - m[i]) * share1
        v[i] += (g[i] * g[i] - v[i]) * share2
        w[i] = w[i] * kept - m[i] / (np.sqrt(v[i]) + tiny) * size


def adamw(
    w: Array, g: Array, m: Array, v: Array, beta1: float, beta2: float, rate: float, eps: float, keep: float
) -> None:
    _adamw(w, contiguous(g), m, v, float(beta1), float(beta2), float(rate), float(eps), float(keep))


@compiled(SUMS)
def _square_sum(g: Array) -> float:
    total = 0.0
    for i in range(g.size):
        v = np.float64(g[i])
        total += v * v
    return total


def square_sum(g: Array) -> float:
    return float(_square_sum(contiguous(g)))


@inlined(EXACT)
def _upper(value: float, cut: float) -> float:
    """Return a value rounded to the bits that a number as large as `cut` can have."""
    return (value + cut) - cut


@inlined(EXACT)
def _less(value: float, upper: float) -> float:
    return value - upper


@compiled(SUMS)
def _exact_square_sums(g: Array, bits: Array, length: int, carry_bits: int, sums: Array) -> None:
    """Write three sums for each block. What may be reordered is their additions alone: those of `_upper` are not."""
    for b in range(len(sums)):
        block, block_bits = g[b * length : (b + 1) * length], bits[b * length : (b + 1) * length]
        top = np.int32(0)
        for i in range(block_bits.size):  # whole numbers compare as fast as they are read
            top = max(top, np.int32(block_bits[i] & np.int32(0x7FFFFFFF)))
        if top == 0 or top >= _INFINITY:
            sums[b, 0] = 0.0 if top == 0 else np.inf if top == _INFINITY else np.nan
            sums[b, 1] = sums[b, 2] = 0.0
            continue
        cut = math.ldexp(1.0, 2 * (int(top >> 23) - 126) + carry_bits)  # squares are below the power of 2
        next_cut = math.ldexp(cut, carry_bits - 53)
        first = second = third = 0.0
        for i in range(block.size):
            v = np.float64(block[i])
            square = v * v
            high = _upper(square, cut)
            left = _less(square, high)
            low = _upper(left, next_cut)
            first += high
            second += low
            third += _less(left, low)
        sums[b, 0], sums[b, 1], sums[b, 2] = first, second, third


def exact_square_sums(g: Array) -> list[float]:
    if g.dtype != np.float32:
        return reference.exact_square_sums(g)
    g = contiguous(g)
    sums = np.empty((-(-g.size // EXACT_BLOCK), 3))
    _exact_square_sums(g, g.view(np.int32), EXACT_BLOCK, EXACT_BLOCK.bit_length(), sums)
    parts: list[float] = sums.reshape(-1).tolist()
    return parts
