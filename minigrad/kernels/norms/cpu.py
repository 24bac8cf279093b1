"""Layer norm and RMS norm for float32 and float64 on a CPU, compiled by numba."""

from __future__ import annotations

import numpy as np

from minigrad.backend import Array
from minigrad.kernels.compiling import SUMS, compiled, contiguous

__all__ = [
    "layer_norm",
    "layer_norm_back",
    "layer_norm_dgain",
    "layer_norm_dx",
    "rms_norm",
    "rms_norm_dgain",
    "rms_norm_dx",
]


@compiled(SUMS)
def _layer_norm(x: Array, gain: Array, bias: Array, eps: float, y: Array, mean: Array, inverse: Array) -> None:
    m, n = x.shape
    T = x.dtype.type
    share = T(1 / max(1, n))
    for i in range(m):
        row, out = x[i], y[i]
        total, squares = T(0), T(0)
        for j in range(n):
            total += row[j]
        middle = total * share
        for j in range(n):
            h = row[j] - middle
            squares += h * h
        r = T(1) / np.sqrt(squares * share + T(eps))
        for j in range(n):
            out[j] = (row[j] - middle) * r * gain[j] + bias[j]
        mean[i, 0], inverse[i, 0] = middle, r


def layer_norm(x: Array, gain: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    y, mean, inverse = np.empty(x.shape, x.dtype), np.empty((len(x), 1), x.dtype), np.empty((len(x), 1), x.dtype)
    _layer_norm(contiguous(x), contiguous(gain), contiguous(bias), float(eps), y, mean, inverse)
    return y, mean, inverse


@compiled(SUMS)
def _layer_norm_back(
    g: Array,
    x: Array,
    mean: Array,
    inverse: Array,
    gain: Array,
    beside: Array,
    has_beside: bool,
    dx: Array,
    dgain: Array,
    dbias: Array,
) -> None:
    m, n = x.shape
    T = x.dtype.type
    share = T(1 / max(1, n))
    for i in range(m):
        row, cotangent, out = x[i], g[i], dx[i]
        middle, r = mean[i, 0], inverse[i, 0]
        total, dot = T(0), T(0)
        for j in range(n):
            h, t = (row[j] - middle) * r, cotangent[j] * gain[j]
            total += t
            dot += t * h
            dgain[j] += cotangent[j] * h
            dbias[j] += cotangent[j]
        total *= share
        dot *= share
        for j in range(n):
            out[j] = (cotangent[j] * gain[j] - total - (row[j] - middle) * r * dot) * r
        if has_beside:
            for j in range(n):
                out[j] += beside[i, j]


def layer_norm_back(
    g: Array, x: Array, mean: Array, inverse: Array, gain: Array, beside: Array | None = None
) -> tuple[Array, Array, Array]:
    n = x.shape[1]
    dx, parts = np.empty(x.shape, x.dtype), np.zeros((2, 1, n), x.dtype)
    g, x = contiguous(g), contiguous(x)
    extra = x if beside is None else contiguous(beside)
    _layer_norm_back(g, x, mean, inverse, contiguous(gain), extra, beside is not None, dx, parts[0, 0], parts[1, 0])
    return dx, parts[0], parts[1]


def layer_norm_dx(g: Array, x: Array, mean: Array, inverse: Array, gain: Array) -> Array:
    return layer_norm_back(g, x, mean, inverse, gain)[0]


@compiled(SUMS)
def _norm_dgain(g: Array, x: Array, mean: Array, inverse: Array, dgain: Array) -> None:
    m, n = x.shape
    for i in range(m):
        middle, r = mean[i, 0], inverse[i, 0]
        for j in range(n):
            dgain[j] += g[i, j] * ((x[i, j] - middle) * r)


def layer_norm_dgain(g: Array, x: Array, mean: Array, inverse: Array) -> Array:
    dgain = np.zeros(x.shape[1], x.dtype)
    _norm_dgain(contiguous(g), contiguous(x), mean, inverse, dgain)
    return dgain


@compiled(SUMS)
def _rms_norm(x: Array, gain: Array, eps: float, y: Array, inverse: Array) -> None:
    m, n = x.shape
    T = x.dtype.type
    share = T(1 / max(1, n))
    for i in range(m):
        row, out = x[i], y[i]
        squares = T(0)
        for j in range(n):
            squares += row[j] * row[j]
        r = T(1) / np.sqrt(squares * share + T(eps))
        for j in range(n):
            out[j] = row[j] * r * gain[j]
        inverse[i, 0] = r


def rms_norm(x: Array, gain: Array, eps: float) -> tuple[Array, Array]:
    y, inverse = np.empty(x.shape, x.dtype), np.empty((len(x), 1), x.dtype)
    _rms_norm(contiguous(x), contiguous(gain), float(eps), y, inverse)
    return y, inverse


@compiled(SUMS)
def _rms_norm_dx(g: Array, x: Array, inverse: Array, gain: Array, dx: Array) -> None:
    m, n = x.shape
    T = x.dtype.type
    share = T(1 / max(1, n))
    for i in range(m):
        row, cotangent, out, r = x[i], g[i], dx[i], inverse[i, 0]
        dot = T(0)
        for j in range(n):
            dot += cotangent[j] * gain[j] * (row[j] * r)
        dot *= share
        for j in range(n):
            out[j] = (cotangent[j] * gain[j] - row[j] * r * dot) * r


def rms_norm_dx(g: Array, x: Array, inverse: Array, gain: Array) -> Array:
    dx = np.empty(x.shape, x.dtype)
    _rms_norm_dx(contiguous(g), contiguous(x), inverse, contiguous(gain), dx)
    return dx


def rms_norm_dgain(g: Array, x: Array, inverse: Array) -> Array:
    return layer_norm_dgain(g, x, np.zeros_like(inverse), inverse)
