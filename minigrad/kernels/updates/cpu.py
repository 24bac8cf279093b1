"""Update rules and norms of flat arrays for float32 and float64 on a CPU, compiled by numba."""

from __future__ import annotations

import numpy as np

from minigrad.backend import Array
from minigrad.kernels.compiling import EXACT, SUMS, compiled, contiguous

__all__ = ["adamw", "sgd", "square_sum"]


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
