"""The ops of a layer: coarse, so that the tape costs nothing beside the work. Attention and convolution stand apart."""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad.backend import Array, scatter_add_rows, xp_of
from minigrad.ops.operands import half_in_float32, is_half
from minigrad.tape import Vjp, op


def widened(x: Array) -> Array:
    """Return `x`, half precision in float32: float16 ends at 65504, which sums and squares of a row soon reach."""
    return x.astype(np.float32) if is_half(x.dtype) else x


@op
@half_in_float32
def softmax(x: Array, *, axis: int = -1) -> tuple[Array, tuple[Vjp]]:
    """Exponentiate and divide by the sum along `axis`, stable. dx = y (g - sum(g y))."""
    xp = xp_of(x)
    y = xp.exp(x - x.max(axis=axis, keepdims=True))
    y /= y.sum(axis=axis, keepdims=True)

    def vjp(g: Array) -> Array:
        dx = g * y
        dx -= y * dx.sum(axis=axis, keepdims=True)
        return dx

    return y, (vjp,)


@op
@half_in_float32
def log_softmax(x: Array, *, axis: int = -1) -> tuple[Array, tuple[Vjp]]:
    """Take the logarithm of softmax along `axis`, stable. dx = g - exp(y) sum(g)."""
    xp = xp_of(x)
    y = x - x.max(axis=axis, keepdims=True)
    y -= xp.log(xp.exp(y).sum(axis=axis, keepdims=True))
    return y, (lambda g: g - xp.exp(y) * g.sum(axis=axis, keepdims=True),)


@op
def layer_norm(x: Array, gain: Array, bias: Array, *, eps: float = 1e-5) -> tuple[Array, tuple[Vjp, Vjp, Vjp]]:
    """Normalise the last axis: y = h gain + bias, h = (x - mean) / sqrt(var + eps).

    With t = g gain: dx = (t - mean(t) - h mean(t h)) / sqrt(var + eps); dgain = sum(g h), dbias = sum(g).

    Args:
        x: (..., n), gain: (n,), bias: (n,).
    Source: Ba et al. 2016, Layer normalization.
    """
    xp, shape, dtype, n = xp_of(x), x.shape, x.dtype, x.shape[-1]
    rows = widened(x).reshape(-1, n)
    average = xp.full((n, 1), 1 / n, rows.dtype)  # row means as GEMV: faster than mean(axis=-1)
    h = rows - rows @ average
    inverse = _inverse_rms(h, eps)
    h *= inverse
    y = h * gain
    y += bias

    def vjp_x(g: Array) -> Array:
        t = widened(g).reshape(-1, n) * gain
        t -= t @ average
        return _through_rms(t, h, inverse).reshape(shape).astype(dtype, copy=False)

    def vjp_bias(g: Array) -> Array:
        g = widened(g).reshape(-1, n)
        return (xp.ones(len(g), g.dtype) @ g).astype(bias_dtype, copy=False)

    bias_dtype = bias.dtype
    y = y.reshape(shape).astype(xp.result_type(x, gain, bias), copy=False)
    return y, (vjp_x, _vjp_gain(h, gain.dtype), vjp_bias)


@op
def rms_norm(x: Array, gain: Array, *, eps: float = 1e-5) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Scale the last axis to mean square 1: y = h gain, h = x / sqrt(mean(x^2) + eps).

    With t = g gain: dx = (t - h mean(t h)) / sqrt(mean(x^2) + eps); dgain = sum(g h).

    Args:
        x: (..., n), gain: (n,).
    Source: Zhang and Sennrich 2019, Root mean square layer normalization.
    """
    shape, dtype, n = x.shape, x.dtype, x.shape[-1]
    rows = widened(x).reshape(-1, n)
    inverse = _inverse_rms(rows, eps)
    h = rows * inverse

    def vjp_x(g: Array) -> Array:
        t = widened(g).reshape(-1, n) * gain
        return _through_rms(t, h, inverse).reshape(shape).astype(dtype, copy=False)

    y = (h * gain).reshape(shape).astype(xp_of(x).result_type(x, gain), copy=False)
    return y, (vjp_x, _vjp_gain(h, gain.dtype))


def _inverse_rms(rows: Array, eps: float) -> Array:
    """Return 1 / sqrt(mean of squares + eps) of each row, as a column."""
    xp = xp_of(rows)
    return 1 / xp.sqrt(xp.einsum("ij,ij->i", rows, rows)[:, None] / rows.shape[1] + eps)


def _through_rms(t: Array, h: Array, inverse: Array) -> Array:
    """Turn t, the gradient by h = rows inverse, into the gradient by the rows, in place."""
    t -= h * (xp_of(t).einsum("ij,ij->i", t, h)[:, None] / h.shape[1])
    t *= inverse
    return t


def _vjp_gain(h: Array, dtype: Any) -> Vjp:
    """Return the vjp of h gain by the gain, (n,)."""
    xp, n = xp_of(h), h.shape[1]
    return lambda g: xp.einsum("ij,ij->j", widened(g).reshape(-1, n), h).astype(dtype, copy=False)


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
    xp, (num_rows, width) = xp_of(table), table.shape
    if ids.dtype.kind not in "iu":
        raise TypeError(f"embedding: ids must be integers, got {ids.dtype}")
    if ids.size and (ids.min() < 0 or ids.max() >= num_rows):
        raise IndexError(f"embedding: ids must be in [0, {num_rows}), got {ids.min()} to {ids.max()}")
    rows, dtype = ids.reshape(-1), table.dtype

    def vjp(g: Array) -> Array:
        g = widened(g).reshape(-1, width)  # a row may be the sum of thousands
        if num_rows <= 256:  # a product with the one-hot matrix is faster than any scatter
            dtable = (xp.arange(num_rows)[:, None] == rows).astype(g.dtype) @ g
        else:
            dtable = xp.zeros((num_rows, width), g.dtype)
            scatter_add_rows(dtable, rows, g)
        return dtable.astype(dtype, copy=False)

    return table.take(rows, axis=0).reshape(*ids.shape, width), (vjp, None)


@op
def dropout(x: Array, *, keep: Array, rate: float) -> tuple[Array, tuple[Vjp]]:
    """Zero what `keep` does not keep and scale the rest by 1 / (1 - rate), so that the mean stays.

    Args:
        keep: booleans of x's shape, for example from `rng.keep_mask`.
        rate: the share that is dropped, in [0, 1).
    """
    keep = xp_of(x).asarray(keep)
    scale = 1 / (1 - rate)

    def drop(v: Array) -> Array:
        y = v * keep
        y *= scale
        return y

    return drop(x), (drop,)
