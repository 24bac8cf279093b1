"""Attention: mixing positions by the softmax of scores. One pair of loops serves both ops.

Both keep exp(s) and the inverse row sums instead of the softmax: dividing the output by the sums costs less than
dividing the weights, and the backward needs only products of the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..backend import Array, xp_of
from ..tape import Joint, Vjp, op
from .nn import widened

# Rows of the score matrix at a time, with `causal`: keys after the block are never touched. Measured at T = 256 on a
# CPU and T = 1024 on a GPU, which needs larger pieces.
_QUERY_BLOCK, _QUERY_BLOCK_ON_GPU = 64, 256
_SAFE_SCORE = 30.0  # exp(30) is 1e13: its sums, products and inverses stay far inside float32


@op
def scaled_dot_product_attention(
    q: Array, k: Array, v: Array, *, causal: bool = False, mask: Array | None = None
) -> tuple[Array, Joint]:
    """Mix values by how well queries fit keys: y = p v, p = softmax(q k^T / sqrt(d)).

    With D = sum(dy y): ds = p (dy v^T - D), dq = ds k / sqrt(d), dk = ds^T q / sqrt(d), dv = p^T dy.

    Args:
        q: (..., T, d), k: (..., S, d), v: (..., S, e), with the same leading axes.
        causal: position t sees keys up to t only; T must equal S.
        mask: booleans that broadcast to (..., T, S), True where a query may see a key. A query
            that sees no key gets zeros, and gives no gradient.
    Returns:
        (..., T, e).
    Raises:
        ValueError: shapes do not fit.
        TypeError: the mask is not boolean.
    Source: Vaswani et al. 2017, section 3.2.1; the form of ds: Dao et al. 2022, appendix B.2.
    """
    xp = xp_of(q)
    if (*q.shape[:-2], q.shape[-1]) != (*k.shape[:-2], k.shape[-1]) or k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"attention: q (..., T, d), k (..., S, d) and v (..., S, e) do not fit, got {q.shape}, {k.shape}, {v.shape}"
        )
    if causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(f"causal attention needs as many queries as keys, got {q.shape[-2]} and {k.shape[-2]}")
    if mask is not None:
        mask = xp.asarray(mask)
        if mask.dtype != bool:
            raise TypeError(f"attention: the mask must be boolean, True where a query sees a key, got {mask.dtype}")
        mask = xp.broadcast_to(mask, (*q.shape[:-1], k.shape[-2]))
    y: Array = xp.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    backward = _attend(q, k, v, y, causal=causal, mask=mask)

    def vjp(g: Array) -> tuple[Array, Array, Array]:
        dq, dk, dv = xp.empty(q.shape, q.dtype), xp.empty(k.shape, k.dtype), xp.empty(v.shape, v.dtype)
        backward(g, dq, dk, dv)
        return dq, dk, dv

    return y, Joint(vjp)


@op
def causal_attention(qkv: Array, *, num_heads: int) -> tuple[Array, tuple[Vjp]]:
    """Attend to this and earlier positions, in each head, with queries, keys and values of one array.

    The same as causal `scaled_dot_product_attention` of the parts, without moving them apart.

    Args:
        qkv: (B, T, 3 C), the queries, keys and values side by side.
    Returns:
        (B, T, C).
    Raises:
        ValueError: the width is not divisible by num_heads.
    """
    batch, time, width3 = qkv.shape
    head = width3 // (3 * num_heads)
    if head * 3 * num_heads != width3:
        raise ValueError(f"attention: the width must be divisible by num_heads, got {width3 / 3:g} and {num_heads}")
    xp = xp_of(qkv)

    def heads(array: Array, num_parts: int) -> list[Array]:
        """View (B, T, parts * C) as (B, H, T, d), one for each part."""
        parts = array.reshape(batch, time, num_parts, num_heads, head)
        return [parts[:, :, i].swapaxes(1, 2) for i in range(num_parts)]

    y: Array = xp.empty((batch, time, width3 // 3), qkv.dtype)
    backward = _attend(*heads(qkv, 3), *heads(y, 1), causal=True, mask=None)

    def vjp(g: Array) -> Array:
        dqkv: Array = xp.empty((batch, time, width3), g.dtype)
        backward(*heads(g, 1), *heads(dqkv, 3))
        return dqkv

    return y, (vjp,)


def _attend(
    q: Array, k: Array, v: Array, y: Array, *, causal: bool, mask: Array | None
) -> Callable[[Array, Array, Array, Array], None]:
    """Write attention into y; return what writes its gradients, `backward(g, dq, dk, dv)`.

    Query rows are taken in blocks, and with `causal` a block uses only the keys up to its own end:

        keys ->   # .          '#' is computed whole; on the diagonal squares
        rows      # # .        the triangle is cut off; '.' costs nothing
                  # # #
    """
    xp, num_queries, num_keys = xp_of(q), q.shape[-2], k.shape[-2]
    if xp is np:  # which has no fast product of half precision matrices, as a GPU has
        q, k, v = widened(q), widened(k), widened(v)
    scale = q.shape[-1] ** -0.5
    safe = _scores_are_small(q, k, scale)
    block = _QUERY_BLOCK if xp is np else _QUERY_BLOCK_ON_GPU
    step = block if causal else max(1, num_queries)
    blocks = []  # of each: its rows, the end of its keys, exp of its scores, one over the row sums of that
    for start in range(0, max(1, num_queries), step):
        rows = slice(start, min(start + step, num_queries))
        end = rows.stop if causal else num_keys
        s = (q[..., rows, :] * scale) @ k[..., :end, :].swapaxes(-1, -2)
        if causal:
            s[..., start:] += _future(xp, end - start, s.dtype)
        if mask is not None:
            xp.copyto(s, -np.inf, where=~mask[..., rows, :end])
        if not safe:
            top = s.max(axis=-1, keepdims=True)
            s -= xp.where(top == -np.inf, 0, top)
        e = xp.exp(s, s)
        total = e @ xp.ones((end, 1), e.dtype)  # a GEMV is faster than sum(-1)
        total[total == 0] = 1  # nothing to see: e is zero, and so is y
        r = 1 / total
        y[..., rows, :] = (e @ v[..., :end, :]) * r
        blocks.append((rows, end, e, r))

    def backward(g: Array, dq: Array, dk: Array, dv: Array) -> None:
        for rows, end, e, r in reversed(blocks):
            gr = g[..., rows, :] * r
            dv_part = e.swapaxes(-1, -2) @ gr
            gr *= scale
            ds = gr @ v[..., :end, :].swapaxes(-1, -2)
            ds -= xp.einsum("...d,...d->...", gr, y[..., rows, :])[..., None]
            ds *= e
            dq[..., rows, :] = ds @ k[..., :end, :]
            dk_part = ds.swapaxes(-1, -2) @ q[..., rows, :]
            if end == num_keys:  # the last block comes first and reaches every key: it writes, the others add
                dk[...], dv[...] = dk_part, dv_part
            else:
                dk[..., :end, :] += dk_part
                dv[..., :end, :] += dv_part

    return backward


def _scores_are_small(q: Array, k: Array, scale: float) -> bool:
    """Return whether exp(s) needs no maximum taken off first: |s| <= scale |q| |k|, a bound that costs no T x T pass.

    On a GPU the answer is no: asking would wait for the device.
    """
    if q.size == 0 or k.size == 0:
        return True
    if xp_of(q) is not np:
        return False
    longest_q, longest_k = (float(np.einsum("...d,...d->...", x, x).max()) ** 0.5 for x in (q, k))
    return longest_q * longest_k * scale <= _SAFE_SCORE


def _future(xp: Any, n: int, dtype: Any) -> Array:
    """Return (n, n): 0 on and below the diagonal, -inf above."""
    return xp.triu(xp.full((n, n), -np.inf, dtype), k=1)
