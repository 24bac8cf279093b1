"""The ops of a layer: coarse, so that the tape costs nothing beside the work. Attention and convolution stand apart."""

from __future__ import annotations

import math

from minigrad.backend import Array, widened, xp_of
from minigrad.kernels import kernels_of
from minigrad.tape import Vjp, op


@op
def softmax(x: Array, *, axis: int = -1) -> tuple[Array, tuple[Vjp]]:
    """Exponentiate and divide by the sum along `axis`, stable. dx = y (g - sum(g y))."""
    kernels = kernels_of(x)
    y = kernels.softmax(_along_rows(x, axis))
    return _back_from_rows(y, x.shape, axis), (
        lambda g: _back_from_rows(kernels.softmax_dx(_along_rows(g, axis), y), g.shape, axis),
    )


@op
def log_softmax(x: Array, *, axis: int = -1) -> tuple[Array, tuple[Vjp]]:
    """Take the logarithm of softmax along `axis`, stable. dx = g - exp(y) sum(g)."""
    kernels = kernels_of(x)
    y = kernels.log_softmax(_along_rows(x, axis))
    return _back_from_rows(y, x.shape, axis), (
        lambda g: _back_from_rows(kernels.log_softmax_dx(_along_rows(g, axis), y), g.shape, axis),
    )


@op
def layer_norm(x: Array, gain: Array, bias: Array, *, eps: float = 1e-5) -> tuple[Array, tuple[Vjp, Vjp, Vjp]]:
    """Normalise the last axis: y = h gain + bias, h = (x - mean) / sqrt(var + eps).

    With t = g gain: dx = (t - mean(t) - h mean(t h)) / sqrt(var + eps); dgain = sum(g h), dbias = sum(g).

    Args:
        x: (..., n), gain: (n,), bias: (n,).
    Source: Ba et al. 2016, Layer normalization.
    """
    kernels, rows, shape, bias_dtype = kernels_of(x, gain, bias), _rows(x), x.shape, bias.dtype
    y, mean, inverse = kernels.layer_norm(rows, gain, bias, eps)

    def vjp_x(g: Array) -> Array:
        return kernels.layer_norm_dx(_rows(g), rows, mean, inverse, gain).reshape(shape)

    def vjp_gain(g: Array) -> Array:
        return kernels.layer_norm_dgain(_rows(g), rows, mean, inverse).astype(gain.dtype, copy=False)

    def vjp_bias(g: Array) -> Array:
        g = _rows(widened(g))
        return (xp_of(g).ones(len(g), g.dtype) @ g).astype(bias_dtype, copy=False)

    return y.reshape(shape), (vjp_x, vjp_gain, vjp_bias)


@op
def rms_norm(x: Array, gain: Array, *, eps: float = 1e-5) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Scale the last axis to mean square 1: y = h gain, h = x / sqrt(mean(x^2) + eps).

    With t = g gain: dx = (t - h mean(t h)) / sqrt(mean(x^2) + eps); dgain = sum(g h).

    Args:
        x: (..., n), gain: (n,).
    Source: Zhang and Sennrich 2019, Root mean square layer normalization.
    """
    kernels, rows, shape = kernels_of(x, gain), _rows(x), x.shape
    y, inverse = kernels.rms_norm(rows, gain, eps)

    def vjp_x(g: Array) -> Array:
        return kernels.rms_norm_dx(_rows(g), rows, inverse, gain).reshape(shape)

    def vjp_gain(g: Array) -> Array:
        return kernels.rms_norm_dgain(_rows(g), rows, inverse).astype(gain.dtype, copy=False)

    return y.reshape(shape), (vjp_x, vjp_gain)


def _rows(x: Array) -> Array:
    """Return x as one matrix: all axes but the last become one."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _along_rows(x: Array, axis: int) -> Array:
    """Return x as a matrix with `axis` along its rows."""
    return _rows(xp_of(x).moveaxis(x, axis, -1))


def _back_from_rows(rows: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Undo `_along_rows` for an array of this shape."""
    moved = [n for i, n in enumerate(shape) if i != axis % len(shape)]
    return xp_of(rows).moveaxis(rows.reshape(*moved, shape[axis]), -1, axis)


@op
def embedding(table: Array, ids: Array) -> tuple[Array, tuple[Vjp, None]]:
    """Look rows up: y[...] = table[ids[...]]. dtable[v] = sum of g where ids == v.

    Args:
        table: (V, n).
        ids: (...) integers in [0, V).
    Raises:
        TypeError: ids are not integers.
        IndexError: an id is out of range.
    """
    num_rows, width = table.shape
    if ids.dtype.kind not in "iu":
        raise TypeError(f"embedding: ids must be integers, got {ids.dtype}")
    if ids.size and (ids.min() < 0 or ids.max() >= num_rows):
        raise IndexError(f"embedding: ids must be in [0, {num_rows}), got {ids.min()} to {ids.max()}")
    kernels, rows, dtype = kernels_of(table), ids.reshape(-1), table.dtype

    def vjp(g: Array) -> Array:
        return kernels.embedding_dtable(g.reshape(-1, width), rows, num_rows).astype(dtype, copy=False)

    return table.take(rows, axis=0).reshape(*ids.shape, width), (vjp, None)


@op
def dropout(x: Array, *, keep: Array, rate: float) -> tuple[Array, tuple[Vjp]]:
    """Zero what `keep` does not keep and scale the rest by 1 / (1 - rate), so that the mean stays.

    Args:
        keep: booleans of x's shape, for example from `rng.keep_mask`.
        rate: the share that is dropped, in [0, 1).
    """
    kernels, scale = kernels_of(x), 1 / (1 - rate)
    keep = xp_of(x).asarray(keep)

    def drop(v: Array) -> Array:
        return kernels.select(v, keep, scale)

    return drop(x), (drop,)
