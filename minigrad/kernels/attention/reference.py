"""What attention does between its two products, to a block of queries: scores (..., r, s) of r queries and s keys."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minigrad.backend import Array, xp_of
from minigrad.kernels.common import half_in_float32

__all__ = ["attention_dscores", "attention_weights", "causal_attention"]


def causal_attention(qkv: Array, num_heads: int) -> tuple[Array, Callable[[Array], Array]] | None:
    """Return causal attention of packed queries, keys and values, and its vjp, in one piece; None: compose it.

    Args:
        qkv: (B, T, 3 C), C divisible by num_heads.
    Returns:
        (B, T, C), and the function from its cotangent to that of qkv.
    """
    return None


@half_in_float32
def attention_weights(scores: Array, scale: float, first: int | None, mask: Array | None) -> Array:
    """Return the softmax of scale times the scores, row by row; it may write into the scores.

    What a query may not see gets 0, and a query that sees nothing gets zeros only.

    Args:
        scale: positive.
        first: query i sees the keys up to first + i only; None: it sees all of them.
        mask: booleans of the shape of the scores, True where a query may see a key; or None.
    """
    xp = xp_of(scores)
    if not scores.size:
        return scores
    scores *= xp.asarray(scale, scores.dtype)
    if first is not None:
        diagonal = scores[..., first:]
        xp.copyto(diagonal, -np.inf, where=~xp.tri(*diagonal.shape[-2:], dtype=bool))
    if mask is not None:
        xp.copyto(scores, -np.inf, where=~mask)
    top = scores.max(axis=-1, keepdims=True)
    scores -= xp.maximum(top, np.finfo(scores.dtype).min, out=top)  # of a query that sees nothing it is -inf
    p = xp.exp(scores, scores)
    total = p @ xp.ones((p.shape[-1], 1), p.dtype)  # a GEMV is faster than sum(-1)
    p /= xp.maximum(total, 1, out=total)  # below 1, as the largest is exp(0), it is 0
    return p


@half_in_float32
def attention_dscores(dp: Array, p: Array, scale: float) -> Array:
    """Return the gradient by the scores, scale p (dp - sum(dp p)), from dp, that by the weights p.

    It may write into dp.
    """
    xp = xp_of(dp)
    dp -= xp.einsum("...s,...s->...", dp, p)[..., None]
    dp *= p
    dp *= xp.asarray(scale, dp.dtype)
    return dp
