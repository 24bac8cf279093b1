"""The ops of a layer: coarse, so that the tape costs nothing beside the work. Attention and convolution stand apart."""

from __future__ import annotations

from typing import Any

from minigrad.autodiff.tape import op
from minigrad.autodiff.vjps import AddingVjp, Vjp, WeightVjp
from minigrad.backend import Array, xp_of
from minigrad.kernels import kernels_of
from minigrad.kernels.common import put
from minigrad.ops.operands import as_rows, axes_of, fit, in_floating_dtype, in_floats

NORM_EPS = 1e-5


@op
@in_floats
def softmax(x: Array, /, axis: int = -1) -> tuple[Array, tuple[Vjp]]:
    """Exponentiate and divide by the sum along `axis`, stable. dx = y (g - sum(g y)).

    Raises:
        ValueError: there is no such axis, or nothing along it.
    """
    axis, kernels = _axis_of_some("softmax", x, axis), kernels_of(x)
    y = kernels.softmax(_along_rows(x, axis))
    return _back_from_rows(y, x.shape, axis), (
        lambda g: _back_from_rows(kernels.softmax_dx(_along_rows(g, axis), y), g.shape, axis),
    )


@op
@in_floats
def log_softmax(x: Array, /, axis: int = -1) -> tuple[Array, tuple[Vjp]]:
    """Take the logarithm of softmax along `axis`, stable. dx = g - exp(y) sum(g).

    Raises:
        ValueError: there is no such axis, or nothing along it.
    """
    axis, kernels = _axis_of_some("log_softmax", x, axis), kernels_of(x)
    y = kernels.log_softmax(_along_rows(x, axis))
    return _back_from_rows(y, x.shape, axis), (
        lambda g: _back_from_rows(kernels.log_softmax_dx(_along_rows(g, axis), y), g.shape, axis),
    )


@op
@in_floats
def layer_norm(x: Array, gain: Array, bias: Array, *, eps: float = NORM_EPS) -> tuple[Array, tuple[Vjp, Vjp, Vjp]]:
    """Normalise the last axis: y = h gain + bias, h = (x - mean) / sqrt(var + eps).

    With t = g gain: dx = (t - mean(t) - h mean(t h)) / sqrt(var + eps); dgain = sum(g h), dbias = sum(g).

    Args:
        x: (..., n), gain: (n,), bias: (n,).
    Raises:
        ValueError: the widths do not fit.
    Source: Ba et al. 2016, Layer normalization.
    """
    if not x.shape[-1:] == gain.shape == bias.shape != ():
        raise ValueError(
            f"layer_norm: x (..., n), gain (n,) and bias (n,) do not fit, got {x.shape}, {gain.shape} and {bias.shape}"
        )
    kernels, rows, shape = kernels_of(x, gain, bias), as_rows(x), x.shape
    y, mean, inverse = kernels.layer_norm(rows, gain, bias, eps)

    parts: list[Array | None] = [None, None]  # of dgain and dbias, if the pass that gives dx makes them

    def vjp_x(g: Array, have: Array | None) -> Array:
        beside = None if have is None else as_rows(have)
        dx, *parts[:] = kernels.layer_norm_back(as_rows(g), rows, mean, inverse, gain, beside)
        return dx.reshape(shape)

    def write_dgain(g: Array, out: Array, add: bool) -> None:
        if parts[0] is not None:
            kernels.sum_parts(parts[0], out, add)
        else:
            put(kernels.layer_norm_dgain(as_rows(g), rows, mean, inverse), out, add)

    def write_dbias(g: Array, out: Array, add: bool) -> None:
        if parts[1] is not None:
            kernels.sum_parts(parts[1], out, add)
        else:
            kernels.column_sum(as_rows(g), out, add)

    return y.reshape(shape), (
        AddingVjp(vjp_x),
        WeightVjp(gain, write_dgain),
        WeightVjp(bias, write_dbias),
    )


@op
@in_floats
def rms_norm(x: Array, gain: Array, *, eps: float = NORM_EPS) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Scale the last axis to mean square 1: y = h gain, h = x / sqrt(mean(x^2) + eps).

    With t = g gain: dx = (t - h mean(t h)) / sqrt(mean(x^2) + eps); dgain = sum(g h).

    Args:
        x: (..., n), gain: (n,).
    Raises:
        ValueError: the widths do not fit.
    Source: Zhang and Sennrich 2019, Root mean square layer normalization.
    """
    if not x.shape[-1:] == gain.shape != ():
        raise ValueError(f"rms_norm: x (..., n) and gain (n,) do not fit, got {x.shape} and {gain.shape}")
    kernels, rows, shape = kernels_of(x, gain), as_rows(x), x.shape
    y, inverse = kernels.rms_norm(rows, gain, eps)

    def vjp_x(g: Array) -> Array:
        return kernels.rms_norm_dx(as_rows(g), rows, inverse, gain).reshape(shape)

    def write_dgain(g: Array, out: Array, add: bool) -> None:
        put(kernels.rms_norm_dgain(as_rows(g), rows, inverse), out, add)

    return y.reshape(shape), (vjp_x, WeightVjp(gain, write_dgain))


def _axis_of_some(name: str, x: Array, axis: int) -> int:
    """Return an axis that there is something along, counted from the front."""
    axes = axes_of(name, x, axis)
    if len(axes) != 1 or (x.size == 0 and x.shape[axes[0]] == 0):
        raise ValueError(f"{name} needs one axis with something along it, got axis {axis} of shape {x.shape}")
    return axes[0]


def _along_rows(x: Array, axis: int) -> Array:
    """Return x as a matrix with `axis` along its rows."""
    return as_rows(xp_of(x).moveaxis(x, axis, -1))


def _back_from_rows(rows: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Undo `_along_rows` for an array of this shape."""
    moved = [n for i, n in enumerate(shape) if i != axis]
    return xp_of(rows).moveaxis(rows.reshape(*moved, shape[axis]), -1, axis)


@op
def embedding(table: Array, ids: Array) -> tuple[Array, tuple[Vjp, None]]:
    """Look rows up: y[...] = table[ids[...]]. dtable[v] = sum of g where ids == v.

    Args:
        table: (V, n).
        ids: (...) integers in [0, V).
    Raises:
        TypeError: ids are not integers.
        ValueError: the table is no matrix.
        IndexError: an id is out of range. On a GPU, which cannot be asked in the middle of a step, its row is nan.
    """
    if table.ndim != 2:
        raise ValueError(f"embedding: the table must be (V, n), got {table.shape}")
    num_rows, width = table.shape
    if ids.dtype.kind not in "iu":
        raise TypeError(f"embedding: ids must be integers, got {ids.dtype}")
    kernels = kernels_of(table)
    rows = kernels.checked_ids("embedding: ids", ids.reshape(-1), num_rows)

    def write_dtable(g: Array, out: Array, add: bool) -> None:
        kernels.embedding_dtable(g.reshape(-1, width), rows, out, add)

    return kernels.embedding(table, rows).reshape(*ids.shape, width), (WeightVjp(table, write_dtable), None)


@op
@in_floats
def dropout(x: Array, *, keep: Array, rate: float) -> tuple[Array, tuple[Vjp]]:
    """Zero what `keep` does not keep and scale the rest by 1 / (1 - rate), so that the mean stays.

    Args:
        keep: booleans of x's shape, for example from `rng.keep_mask`.
        rate: the share that is dropped, in [0, 1).
    Raises:
        ValueError: `keep` has another shape, or there is no such rate.
        TypeError: `keep` is not boolean.
    """
    kernels = kernels_of(x)
    keep, scale = _kept("dropout", x, keep, rate)

    def drop(v: Array) -> Array:
        return kernels.select(v, keep, scale)

    return drop(x), (drop,)


@op
@in_floats
def add_dropout(x: Array, y: Array, *, keep: Array, rate: float) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Add a branch with dropout to what passes it by, in one pass: x + dropout(y). dx = g, dy = dropout(g).

    Args:
        x, y: of one shape.
        keep, rate: as in `dropout`.
    Raises:
        ValueError: the shapes differ, or there is no such rate.
        TypeError: `keep` is not boolean.
    """
    if x.shape != y.shape:
        raise ValueError(f"add_dropout: x and y must have the same shape, got {x.shape} and {y.shape}")
    x, y = in_floating_dtype(x, y)
    kernels = kernels_of(x, y)
    keep, scale = _kept("add_dropout", y, keep, rate)
    z = kernels.add_select(x, y, keep, scale)
    return z, fit(x, y, z, lambda g: g, lambda g: kernels.select(g, keep, scale))


def _kept(name: str, x: Array, keep: Any, rate: float) -> tuple[Array, float]:
    """Return what is kept of x, and what that is multiplied by."""
    keep = xp_of(x).asarray(keep)
    if keep.dtype != bool:
        raise TypeError(f"{name}: keep must be boolean, True for what stays, got {keep.dtype}")
    if keep.shape != x.shape or not 0 <= rate < 1:
        raise ValueError(
            f"{name}: keep must have x's shape and rate be in [0, 1), got {keep.shape} for {x.shape} and {rate}"
        )
    return keep, 1 / (1 - rate)
