"""What attention does between its two products, to a block of queries: scores (..., r, s) of r queries and s keys."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minigrad.backend import Array, xp_of

__all__ = ["attention_dscores", "attention_weights", "causal_attention", "scores_are_small"]


_SAFE_SCORE = 30.0  # exp(30) is 1e13: its sums, products and inverses stay far inside float32


def causal_attention(qkv: Array, num_heads: int) -> tuple[Array, Callable[[Array], Array]] | None:
    """Return causal attention of packed queries, keys and values, and its vjp, in one piece; None: compose it.

    Args:
        qkv: (B, T, 3 C), C divisible by num_heads.
    Returns:
        (B, T, C), and the function from its cotangent to that of qkv.
    """
    return None


def scores_are_small(q: Array, k: Array, scale: float) -> bool:
    """Return whether exp(s) needs no maximum taken off first: |s| <= scale |q| |k|, a bound that costs no T x T pass.

    The answer may be no wherever asking costs more than the maximum: a GPU would have to be waited for.
    """
    if q.size == 0 or k.size == 0:
        return True
    xp = xp_of(q)
    if xp is not np:
        return False
    longest_q, longest_k = (float(xp.einsum("...d,...d->...", x, x).max()) ** 0.5 for x in (q, k))
    return longest_q * longest_k * scale <= _SAFE_SCORE


def attention_weights(scores: Array, first: int | None, mask: Array | None, small: bool) -> tuple[Array, Array]:
    """Return e = exp(scores) and one over its row sums, (..., r, 1); it may write into the scores.

    What a query may not see gives e = 0, and a query that sees nothing a factor of 1.

    Args:
        first: query i sees the keys up to first + i only; None: it sees all of them.
        mask: booleans of the shape of the scores, True where a query may see a key; or None.
        small: no score is so large that its exponential overflows, so that no row's maximum must be taken off first.
    """
    xp = xp_of(scores)
    if first is not None:
        diagonal = scores[..., first:]
        xp.copyto(diagonal, -np.inf, where=~xp.tri(*diagonal.shape[-2:], dtype=bool))
    if mask is not None:
        xp.copyto(scores, -np.inf, where=~mask)
    if not small:
        top = scores.max(axis=-1, keepdims=True)
        scores -= xp.where(top == -np.inf, 0, top)
    e = xp.exp(scores, scores)
    total = e @ xp.ones((e.shape[-1], 1), e.dtype)  # a GEMV is faster than sum(-1)
    total[total == 0] = 1
    return e, 1 / total


def attention_dscores(dp: Array, e: Array, gr: Array, y: Array) -> Array:
    """Return e (dp - sum(gr y)); it may write into dp.

    Args:
        dp, e: (..., r, s): gr v^T, and the weights before division by their sums.
        gr, y: (..., r, d): the cotangent over those sums, and attention's output.
    """
    dp -= xp_of(dp).einsum("...d,...d->...", gr, y)[..., None]
    dp *= e
    return dp
