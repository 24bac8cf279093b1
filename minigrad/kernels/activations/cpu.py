"""Functions of one number for float32 and float64 on a CPU, compiled by numba."""

from __future__ import annotations

import math

import numpy as np

from minigrad.backend import Array
from minigrad.kernels.activations.reference import GELU_FLAT
from minigrad.kernels.compiling import EXACT, FUSED, SUMS, compiled, contiguous, flattened
from minigrad.kernels.products.reference import linear, product
from minigrad.kernels.scalars import exp, gelu_constants, gelu_tanh, logistic, normal_tail

__all__ = [
    "add_select",
    "gelu",
    "gelu_back",
    "leaky_relu",
    "linear_gelu",
    "linear_gelu_back",
    "relu",
    "select",
    "sigmoid",
    "sigmoid_dx",
    "silu",
]


@compiled(EXACT)
def _select(x: Array, keep: Array, scale: float, y: Array) -> None:
    T = x.dtype.type
    factor = T(scale)
    for i in range(x.size):
        y[i] = x[i] * factor if keep[i] else T(0)


def select(x: Array, keep: Array, scale: float = 1.0) -> Array:
    y = np.empty(x.shape, x.dtype)
    _select(flattened(x), flattened(keep), scale, y.reshape(-1))
    return y


@compiled(EXACT)
def _add_select(x: Array, y: Array, keep: Array, scale: float, z: Array) -> None:
    T = x.dtype.type
    factor = T(scale)
    for i in range(x.size):
        z[i] = x[i] + (y[i] * factor if keep[i] else T(0))


def add_select(x: Array, y: Array, keep: Array, scale: float) -> Array:
    z = np.empty(x.shape, x.dtype)
    _add_select(flattened(x), flattened(y), flattened(keep), scale, z.reshape(-1))
    return z


@compiled(EXACT)
def _relu(x: Array, y: Array, positive: Array) -> None:
    zero = x.dtype.type(0)
    for i in range(x.size):
        v = x[i]
        positive[i] = v > zero
        y[i] = zero if v <= zero else v


def relu(x: Array) -> tuple[Array, Array]:
    y, positive = np.empty(x.shape, x.dtype), np.empty(x.shape, bool)
    _relu(flattened(x), y.reshape(-1), positive.reshape(-1))
    return y, positive


@compiled(EXACT)
def _leaky_relu(x: Array, slope: float, y: Array, d: Array) -> None:
    T = x.dtype.type
    one, below = T(1), T(slope)
    for i in range(x.size):
        d[i] = one if x[i] > T(0) else below
        y[i] = x[i] * d[i]


def leaky_relu(x: Array, slope: float) -> tuple[Array, Array]:
    y, d = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype)
    _leaky_relu(flattened(x), float(slope), y.reshape(-1), d.reshape(-1))
    return y, d


@compiled(EXACT)
def _sigmoid(x: Array, y: Array) -> None:
    one = x.dtype.type(1)
    for i in range(x.size):
        y[i], _ = logistic(x[i], one)


def sigmoid(x: Array) -> Array:
    y = np.empty(x.shape, x.dtype)
    _sigmoid(flattened(x), y.reshape(-1))
    return y


@compiled(EXACT)
def _sigmoid_dx(g: Array, y: Array, dx: Array) -> None:
    one = y.dtype.type(1)
    for i in range(y.size):
        dx[i] = g[i] * (y[i] * (one - y[i]))


def sigmoid_dx(g: Array, y: Array) -> Array:
    dx = np.empty(y.shape, y.dtype)
    _sigmoid_dx(flattened(g), flattened(y), dx.reshape(-1))
    return dx


@compiled(EXACT)
def _silu(x: Array, lowest: float, highest: float, y: Array, d: Array) -> None:
    T = x.dtype.type
    low, high, one = T(lowest), T(highest), T(1)
    for i in range(x.size):
        v = x[i]
        s, rest = logistic(v, one)
        v = (low if v < low else v) * s
        y[i] = v
        d[i] = s + (high if v > high else v) * rest


def silu(x: Array) -> tuple[Array, Array]:
    y, d, limits = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype), np.finfo(x.dtype)
    _silu(flattened(x), float(limits.min), float(limits.max), y.reshape(-1), d.reshape(-1))
    return y, d


@compiled(FUSED)
def _gelu_tanh(x: Array, y: Array, d: Array) -> None:
    constants = gelu_constants(x)
    for i in range(x.size):
        y[i], d[i] = gelu_tanh(x[i], constants)


@compiled(FUSED)
def _gelu_exact(x: Array, y: Array, d: Array) -> None:
    T = x.dtype.type
    half, one, flat, density = T(0.5), T(1), T(GELU_FLAT), T(1 / math.sqrt(2 * math.pi))
    for i in range(x.size):
        v = -flat if x[i] < -flat else x[i]
        inner = flat if v > flat else v
        e = exp(-half * inner * inner)
        tail = normal_tail(abs(inner), e)
        p = tail if inner < T(0) else one - tail
        y[i] = v * p
        d[i] = p + inner * e * density


@compiled(FUSED)
def _add_bias_gelu(x: Array, b: Array, y: Array) -> None:
    constants, (m, n) = gelu_constants(x), x.shape
    for i in range(m):
        for j in range(n):
            v = x[i, j] + b[j]
            x[i, j] = v
            y[i, j], _ = gelu_tanh(v, constants)


def linear_gelu(x: Array, w: Array, b: Array, exact: bool) -> tuple[Array, Array]:
    if exact:
        h = linear(x, w, b)
        return gelu(h, exact)[0], h
    h = x @ w
    y = np.empty(h.shape, h.dtype)
    _add_bias_gelu(h, contiguous(b), y)
    return y, h


@compiled(SUMS)
def _gelu_back(g: Array, x: Array, sums: Array) -> None:
    constants, (m, n) = gelu_constants(x), x.shape
    for i in range(m):
        for j in range(n):
            y, d = gelu_tanh(x[i, j], constants)
            dx = g[i, j] * d
            x[i, j], g[i, j] = y, dx
            sums[j] += dx


def gelu_back(g: Array, kept: Array, exact: bool) -> tuple[Array, Array, Array | None]:
    if exact or not (g.flags.carray and kept.flags.carray):
        y, d = gelu(kept, exact)
        return y, g * d, None
    sums = np.zeros((1, g.shape[1]), g.dtype)
    _gelu_back(g, kept, sums[0])
    return kept, g, sums


def linear_gelu_back(g: Array, w: Array, kept: Array, exact: bool) -> tuple[Array, Array, Array | None]:
    return gelu_back(product(g, w.T), kept, exact)


def gelu(x: Array, exact: bool) -> tuple[Array, Array]:
    y, d = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype)
    (_gelu_exact if exact else _gelu_tanh)(flattened(x), y.reshape(-1), d.reshape(-1))
    return y, d
