"""The softmax of rows, and its logarithm, for float32 and float64 on a CPU, compiled by numba."""

from __future__ import annotations

import numpy as np

from minigrad.backend import Array
from minigrad.kernels.compiling import SUMS, compiled, contiguous
from minigrad.kernels.scalars import bits_of, exp, row_max

__all__ = ["log_softmax", "log_softmax_dx", "softmax", "softmax_dx"]


@compiled(SUMS)
def _softmax(x: Array, bits: Array, y: Array) -> None:
    m, n = x.shape
    one = x.dtype.type(1)
    for i in range(m):
        row, out = x[i], y[i]
        top, total = row_max(bits[i]), x.dtype.type(0)
        for j in range(n):
            e = exp(row[j] - top)
            out[j] = e
            total += e
        inverse = one / total
        for j in range(n):
            out[j] *= inverse


def softmax(x: Array) -> Array:
    x, y = contiguous(x), np.empty(x.shape, x.dtype)
    if x.size:
        _softmax(x, bits_of(x), y)
    return y


@compiled(SUMS)
def _softmax_dx(g: Array, y: Array, dx: Array) -> None:
    m, n = y.shape
    for i in range(m):
        dot = y.dtype.type(0)
        for j in range(n):
            dot += g[i, j] * y[i, j]
        for j in range(n):
            dx[i, j] = y[i, j] * (g[i, j] - dot)


def softmax_dx(g: Array, y: Array) -> Array:
    dx = np.empty(y.shape, y.dtype)
    _softmax_dx(contiguous(g), contiguous(y), dx)
    return dx


@compiled(SUMS)
def _log_softmax(x: Array, bits: Array, y: Array) -> None:
    m, n = x.shape
    for i in range(m):
        row, out = x[i], y[i]
        top, total = row_max(bits[i]), x.dtype.type(0)
        for j in range(n):
            total += exp(row[j] - top)
        log_total = np.log(total)
        for j in range(n):
            out[j] = (row[j] - top) - log_total


def log_softmax(x: Array) -> Array:
    x, y = contiguous(x), np.empty(x.shape, x.dtype)
    if x.size:
        _log_softmax(x, bits_of(x), y)
    return y


@compiled(SUMS)
def _log_softmax_dx(g: Array, y: Array, dx: Array) -> None:
    m, n = y.shape
    for i in range(m):
        total = y.dtype.type(0)
        for j in range(n):
            total += g[i, j]
        for j in range(n):
            dx[i, j] = g[i, j] - exp(y[i, j]) * total


def log_softmax_dx(g: Array, y: Array) -> Array:
    dx = np.empty(y.shape, y.dtype)
    _log_softmax_dx(contiguous(g), contiguous(y), dx)
    return dx
