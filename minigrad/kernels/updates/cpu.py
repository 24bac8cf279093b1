"""Update rules and norms of flat arrays for float32 and float64 on a CPU, compiled by numba."""

from __future__ import annotations

import math

import numpy as np

from minigrad.backend import Array
from minigrad.kernels.compiling import EXACT, SUMS, compiled, contiguous
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


@compiled(EXACT)
def _highest(bits: Array) -> int:
    """Return the largest magnitude's bits, of float32: whole numbers compare as fast as they are read."""
    top = bits[0] & 0x7FFFFFFF
    for i in range(bits.size):
        top = max(top, bits[i] & 0x7FFFFFFF)
    return top


@compiled(EXACT)
def _split_squares(g: Array, cut: float, next_cut: float, first: Array, second: Array, rest: Array) -> None:
    for i in range(g.size):
        v = np.float64(g[i])
        square = v * v
        high = (square + cut) - cut
        left = square - high
        low = (left + next_cut) - next_cut
        first[i] = high
        second[i] = low
        rest[i] = left - low


@compiled(SUMS)
def _sum(values: Array) -> float:
    total = 0.0
    for i in range(values.size):
        total += values[i]
    return total


def exact_square_sums(g: Array) -> list[float]:
    if g.dtype != np.float32:
        return reference.exact_square_sums(g)
    g, sums = contiguous(g), list[float]()
    bits, carry_bits = g.view(np.int32), EXACT_BLOCK.bit_length()
    parts = np.empty((3, EXACT_BLOCK))
    for start in range(0, g.size, EXACT_BLOCK):
        block = g[start : start + EXACT_BLOCK]
        top = int(_highest(bits[start : start + EXACT_BLOCK]))
        if top == 0 or top >= _INFINITY:
            sums.append(0.0 if top == 0 else math.inf if top == _INFINITY else math.nan)
            continue
        cut = 2.0 ** (2 * ((top >> 23) - 126) + carry_bits)  # squares are below the power of 2
        first, second, rest = parts[:, : block.size]
        _split_squares(block, cut, cut * 2.0 ** (carry_bits - 53), first, second, rest)
        sums += _sum(first), _sum(second), _sum(rest)
    return sums
