"""Losses: from predictions and targets to a scalar."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..backend import Array, xp_of
from ..tape import op

Vjp = Callable[[Array], Array]


@op
def cross_entropy(logits: Array, targets: Array) -> tuple[Array, tuple[Vjp, None]]:
    """Average -log softmax(logits)[target] over all predictions, fused and stable.

    d/dlogits = (softmax(logits) - onehot(target)) / n, computed in the forward: it is the only residual.

    Args:
        logits: (..., V).
        targets: (...) integers in [0, V).
    Raises:
        ValueError: shapes do not fit, or there is no prediction at all.
        TypeError: targets are not integers.
        IndexError: a target is out of range.
    """
    xp = xp_of(logits)
    num_classes = logits.shape[-1]
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"cross_entropy: targets must have shape {logits.shape[:-1]}, got {targets.shape}")
    if targets.dtype.kind not in "iu":
        raise TypeError(f"cross_entropy: targets must be integers, got {targets.dtype}")
    n = targets.size
    if n == 0:
        raise ValueError(f"cross_entropy: needs at least one prediction, got logits of shape {logits.shape}")
    if targets.min() < 0 or targets.max() >= num_classes:
        raise IndexError(
            f"cross_entropy: targets must be in [0, {num_classes}), got {targets.min()} to {targets.max()}"
        )
    rows, where = xp.arange(n), targets.reshape(-1)
    shifted = logits.reshape(n, num_classes) - logits.reshape(n, num_classes).max(axis=1, keepdims=True)
    at_target = shifted[rows, where]
    p = xp.exp(shifted, shifted)
    total = p.sum(axis=1, keepdims=True)
    loss = (xp.log(total).sum() - at_target.sum()) / n
    p /= total * n
    p[rows, where] -= 1 / n
    shape = logits.shape
    return loss, (lambda g: (p * g).reshape(shape), None)


@op
def mse(x: Array, target: Array) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Average (x - target)^2. d/dx = 2 (x - target) / n, d/dtarget = -d/dx.

    Raises:
        ValueError: the shapes differ (a broadcast here is nearly always a mistake) or are empty.
    """
    if x.shape != np.shape(target) or x.size == 0:
        raise ValueError(f"mse: x and target must have the same non-empty shape, got {x.shape} and {np.shape(target)}")
    difference = x - target
    scale = 2 / x.size
    return (difference * difference).sum() / x.size, (
        lambda g: difference * (g * scale),
        lambda g: difference * (g * -scale),
    )
