"""Losses: from predictions and targets to a scalar, in the dtype of the predictions, but of half precision in float32.

A loss in bfloat16 would have two or three digits.
"""

from __future__ import annotations

import numpy as np

from minigrad.autodiff.tape import op
from minigrad.autodiff.vjps import Vjp
from minigrad.backend import Array, widened, xp_of
from minigrad.kernels import kernels_of


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
        IndexError: a target is out of range. On a GPU, which cannot be asked in the middle of a step, the loss is nan.
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
    shape, dtype, num_classes = logits.shape, logits.dtype, logits.shape[-1]
    kernels, where, num_ignored = kernels_of(logits), targets.reshape(-1), 0
    ignored = None
    if ignore_index is not None:
        ignored = where == ignore_index
        num_ignored = int(ignored.sum())  # asks a GPU
        where = xp_of(logits).where(ignored, 0, where)
    where = kernels.checked_ids("cross_entropy: targets", where, num_classes)
    n = where.size - num_ignored
    if n == 0 and reduction == "mean":
        raise ValueError(
            f"cross_entropy: needs at least one prediction, got logits of shape {shape}, targets ignored: {num_ignored}"
        )
    if ignored is not None:
        where = xp_of(logits).where(ignored, -1, where.astype(np.int64, copy=False))
    weight = 1 / n if reduction == "mean" else 1.0
    rows = logits.reshape(-1, num_classes)
    losses, dlogits = kernels.cross_entropy(rows, where, label_smoothing, weight)
    loss = losses.sum() * weight
    return loss, (lambda g: kernels.cross_entropy_dlogits(dlogits, g, dtype).reshape(shape), None)


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
    return (difference * difference).sum() / n, (
        lambda g: (difference * (2 * widened(g) / n)).astype(dtype, copy=False),
        lambda g: (difference * (-2 * widened(g) / n)).astype(target_dtype, copy=False),
    )


@op
def binary_cross_entropy_with_logits(logits: Array, targets: Array) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Average -t log s(x) - (1 - t) log(1 - s(x)), s the logistic function; stable: |x| d + log(1 + e^-|x|),
    d = 1 - t where x > 0, else t.

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
    wrong = xp.where(x > 0, 1 - t, t)  # how far the target is from what the sign of x says
    far = kernels_of(x).select(abs(x), wrong != 0) * wrong  # an infinite logit may be right
    loss = (far + xp.log1p(e)).sum() / n
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
