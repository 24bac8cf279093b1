"""Losses: from predictions and targets to a scalar, in the dtype of the predictions."""

from __future__ import annotations

import numpy as np

from minigrad.backend import Array, xp_of
from minigrad.ops.nn import widened
from minigrad.tape import Vjp, op


@op
def cross_entropy(
    logits: Array,
    targets: Array,
    *,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
) -> tuple[Array, tuple[Vjp, None]]:
    """Average -log softmax(logits)[target] over all predictions, fused and stable.

    With label smoothing a the target distribution is q = (1 - a) onehot(target) + a / V, and the loss -sum(q log p).
    d/dlogits = (softmax(logits) - q) / n, computed in the forward: it is the only residual.

    Args:
        logits: (..., V).
        targets: (...) integers in [0, V), or equal to `ignore_index`.
        reduction: "mean" over the predictions that count, or their "sum".
        ignore_index: the target of predictions that do not count, whatever their logits are.
        label_smoothing: a, in [0, 1).
    Raises:
        ValueError: shapes do not fit, an option is unknown, or a mean has no prediction that counts. (A sum is then 0.)
        TypeError: targets are not integers, or logits are.
        IndexError: a target is out of range.
    Source: label smoothing: Szegedy et al. 2016, section 7.
    """
    _check_floating("cross_entropy", logits)
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"cross_entropy: targets must have shape {logits.shape[:-1]}, got {targets.shape}")
    if targets.dtype.kind not in "iu":
        raise TypeError(f"cross_entropy: targets must be integers, got {targets.dtype}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"cross_entropy: reduction must be 'mean' or 'sum', got {reduction!r}")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"cross_entropy: label_smoothing must be in [0, 1), got {label_smoothing}")
    xp, shape, dtype, num_classes = xp_of(logits), logits.shape, logits.dtype, logits.shape[-1]
    where = targets.reshape(-1)
    ignored = None if ignore_index is None else where == ignore_index
    if ignored is not None:
        where = xp.where(ignored, 0, where)
    if where.size and (where.min() < 0 or where.max() >= num_classes):
        raise IndexError(f"cross_entropy: targets must be in [0, {num_classes}), got {where.min()} to {where.max()}")
    num_ignored = 0 if ignored is None else int(ignored.sum())
    n = where.size - num_ignored
    if n == 0 and reduction == "mean":
        raise ValueError(
            f"cross_entropy: needs at least one prediction, got logits of shape {shape}, targets ignored: {num_ignored}"
        )
    weight = 1 / n if reduction == "mean" else 1.0
    rows, smooth = xp.arange(where.size), label_smoothing / num_classes

    p = widened(logits).reshape(-1, num_classes)
    p = p - p.max(axis=1, keepdims=True)
    losses = (label_smoothing - 1) * p[rows, where]
    if smooth:
        losses -= smooth * p.sum(axis=1)
    total = xp.exp(p, p).sum(axis=1)
    losses += xp.log(total)
    p *= (weight / total)[:, None]
    if smooth:
        p -= weight * smooth
    p[rows, where] -= weight * (1 - label_smoothing)
    if ignored is not None:  # selected, not multiplied by 0: their logits may be infinite
        losses[ignored], p[ignored] = 0, 0
    loss = (losses.sum() * weight).astype(dtype)
    return loss, (lambda g: (p * g).reshape(shape).astype(dtype, copy=False), None)


@op
def mse(x: Array, target: Array) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Average (x - target)^2. d/dx = 2 (x - target) / n, d/dtarget = -d/dx.

    Raises:
        ValueError: the shapes differ (a broadcast here is nearly always a mistake) or are empty.
        TypeError: x is of integers.
    """
    _check_floating("mse", x)
    _check_same_shape("mse", x, target)
    target, wide = xp_of(x).asarray(target), widened(x)
    dtype, target_dtype, n = x.dtype, target.dtype, x.size
    difference = wide - target.astype(wide.dtype, copy=False)
    return ((difference * difference).sum() / n).astype(dtype), (
        lambda g: (difference * (2 * widened(g) / n)).astype(dtype, copy=False),
        lambda g: (difference * (-2 * widened(g) / n)).astype(target_dtype, copy=False),
    )


@op
def binary_cross_entropy_with_logits(logits: Array, targets: Array) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Average -t log s(x) - (1 - t) log(1 - s(x)), s the logistic function; stable: max(x, 0) - x t + log(1 + e^-|x|).

    d/dx = (s(x) - t) / n, d/dt = -x / n.

    Args:
        logits: x, any shape.
        targets: t of the same shape: probabilities, or booleans or integers 0 and 1.
    Raises:
        ValueError: the shapes differ or are empty.
        TypeError: logits are integers.
    """
    _check_floating("binary_cross_entropy_with_logits", logits)
    _check_same_shape("binary_cross_entropy_with_logits", logits, targets)
    xp, dtype, target_dtype, n = xp_of(logits), logits.dtype, targets.dtype, logits.size
    x = widened(logits)
    t = targets.astype(x.dtype, copy=False)
    e = xp.exp(-abs(x))
    loss = ((xp.maximum(x, 0) - x * t + xp.log1p(e)).sum() / n).astype(dtype)
    difference = xp.exp(xp.minimum(x, 0)) / (1 + e) - t
    return loss, (
        lambda g: (difference * (widened(g) / n)).astype(dtype, copy=False),
        lambda g: (x * (-widened(g) / n)).astype(target_dtype, copy=False),
    )


def _check_floating(name: str, x: Array) -> None:
    if x.dtype.kind in "iub":  # the loss, in their dtype, would be cut to an integer
        raise TypeError(f"{name}: predictions must be floating point, got {x.dtype}")


def _check_same_shape(name: str, x: Array, target: Array) -> None:
    if x.shape != np.shape(target) or x.size == 0:
        raise ValueError(
            f"{name}: x and target must have the same non-empty shape, got {x.shape} and {np.shape(target)}"
        )
