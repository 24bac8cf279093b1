"""The cross-entropy of rows."""

from __future__ import annotations

from typing import Any

from minigrad.backend import Array, widened, xp_of

__all__ = ["cross_entropy", "cross_entropy_dlogits"]


def cross_entropy(logits: Array, targets: Array, smoothing: float, weight: float) -> tuple[Array, Array]:
    """Return the loss of each row, -sum(q log p), and weight (p - q): its gradient, weighted.

    p = softmax(logits), q = (1 - smoothing) onehot(target) + smoothing / n.

    Args:
        targets: (m,) integers in [0, n), or negative: a row that does not count, whatever its logits are.
    Returns:
        (m,) and (m, n), both in float32 where the logits are of half precision.
    """
    xp, num_classes = xp_of(logits), logits.shape[1]
    rows, smooth = xp.arange(len(targets)), smoothing / num_classes
    p = widened(logits)
    p = p - p.max(axis=1, keepdims=True)
    losses = (smoothing - 1) * p[rows, targets]
    if smooth:
        losses -= smooth * p.sum(axis=1)
    total = xp.exp(p, p).sum(axis=1)
    losses += xp.log(total)
    p *= (weight / total)[:, None]
    if smooth:
        p -= weight * smooth
    p[rows, targets] -= weight * (1 - smoothing)
    ignored = targets < 0
    losses[ignored], p[ignored] = 0, 0  # selected, not multiplied by 0: their logits may be infinite
    return losses, p


def cross_entropy_dlogits(dlogits: Array, g: Array, dtype: Any) -> Array:
    """Return what `cross_entropy` gave times the cotangent g of the loss, a scalar, in the dtype of the logits.

    Called once: it may be in the memory of `dlogits`.
    """
    return (dlogits * g).astype(dtype, copy=False)
