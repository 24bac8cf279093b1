"""One more position of a text through a transformer's block, with the keys and values of those before it."""

from __future__ import annotations

from collections.abc import Sequence

from minigrad.backend import Array

__all__ = ["block_step"]


def block_step(
    x: Array, weights: Sequence[Array], num_heads: int, eps: float, memory: Array, position: int
) -> Array | None:
    """Return x + attention(norm(x)), then x + feed_forward(norm(x)) of that, in one piece; None: compose it.

    Args:
        x: (B, 1, C), one position of each text.
        weights: gain and bias of the first norm, weight and bias of queries, keys and values together and of the output
            projection; those of the second norm, of the wider map and of the narrower one.
        memory: (2, B, num_heads, n, d), the keys and the values of the positions before, to which this one's are added.
        position: of x, in [0, n).
    """
    return None
