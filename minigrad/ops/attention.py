"""Attention: mixing positions by the softmax of scores. One pair of loops serves both ops.

Queries come in blocks. Of a single block the weights are kept. Of several, on a CPU, the backward computes them again,
so that no tape holds T x T numbers; and samples take turns, so that a block stays in the cache, which wins most of the
time back. (Causal attention of packed arrays has a kernel of its own where `kernels_of` gives one, to the same plan.)
A GPU keeps them all: there computing again makes the op 1.3 to 1.5 times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minigrad.autodiff.tape import op
from minigrad.autodiff.vjps import Joint, Vjp
from minigrad.backend import Array, widened, xp_of
from minigrad.kernels import kernels_of
from minigrad.ops.operands import in_floats

Backward = Callable[[Array, Array, Array, Array], None]  # backward(g, dq, dk, dv) writes into all but g

# Rows of the score matrix at a time; with `causal`, keys after the block are never touched. Measured at T = 256 and
# T = 1024 on a CPU, and at T = 1024 on a GPU, which needs larger pieces.
_QUERY_BLOCK, _CAUSAL_QUERY_BLOCK, _CAUSAL_QUERY_BLOCK_ON_GPU = 256, 64, 256


@op
@in_floats
def scaled_dot_product_attention(
    q: Array, k: Array, v: Array, *, causal: bool = False, mask: Array | None = None
) -> tuple[Array, Joint]:
    """Mix values by how well queries fit keys: y = p v, p = softmax(q k^T / sqrt(d)).

    With D = sum(dy y): ds = p (dy v^T - D), dq = ds k / sqrt(d), dk = ds^T q / sqrt(d), dv = p^T dy.

    Args:
        q: (..., T, d), k: (..., S, d), v: (..., S, e), with the same leading axes.
        causal: position t sees keys up to t only; T must equal S.
        mask: booleans that broadcast to (..., T, S), True where a query may see a key. A query
            that sees no key gets zeros, and gives no gradient. The backward may read it again.
    Returns:
        (..., T, e).
    Raises:
        ValueError: shapes do not fit.
        TypeError: the mask is not boolean.
    Source: Vaswani et al. 2017, section 3.2.1; the form of ds: Dao et al. 2022, appendix B.2.
    """
    xp = xp_of(q)
    queries_fit = (*q.shape[:-2], q.shape[-1:]) == (*k.shape[:-2], k.shape[-1:])
    if min(q.ndim, k.ndim, v.ndim) < 2 or not queries_fit or k.shape[:-1] != v.shape[:-1]:
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
    backward = attend(q, k, v, y, causal=causal, mask=mask)

    def vjp(g: Array) -> tuple[Array, Array, Array]:
        dq, dk, dv = xp.empty(q.shape, q.dtype), xp.empty(k.shape, k.dtype), xp.empty(v.shape, v.dtype)
        backward(g, dq, dk, dv)
        return dq, dk, dv

    return y, Joint(vjp)


@op
@in_floats
def causal_attention(qkv: Array, *, num_heads: int) -> tuple[Array, tuple[Vjp]]:
    """Attend to this and earlier positions, in each head, with queries, keys and values of one array.

    The same as causal `scaled_dot_product_attention` of the parts, without moving them apart.

    Args:
        qkv: (B, T, 3 C), the queries, keys and values side by side.
    Returns:
        (B, T, C).
    Raises:
        ValueError: qkv has no three axes, or the width is not divisible by num_heads.
    """
    if qkv.ndim != 3 or num_heads < 1:
        raise ValueError(f"attention: qkv must be (B, T, 3 C), num_heads at least 1, got {qkv.shape} and {num_heads}")
    batch, time, width3 = qkv.shape
    head = width3 // (3 * num_heads)
    if head * 3 * num_heads != width3:
        raise ValueError(f"attention: the width must be divisible by num_heads, got {width3 / 3:g} and {num_heads}")
    whole = kernels_of(qkv).causal_attention(qkv, num_heads)
    if whole is not None:
        y, vjp_qkv = whole
        return y, (vjp_qkv,)
    xp = xp_of(qkv)

    def heads(array: Array, num_parts: int) -> list[Array]:
        """View (B, T, parts * C) as (B, H, T, d), one for each part."""
        parts = array.reshape(batch, time, num_parts, num_heads, head)
        return [parts[:, :, i].swapaxes(1, 2) for i in range(num_parts)]

    y = xp.empty((batch, time, width3 // 3), qkv.dtype)
    backward = attend(*heads(qkv, 3), *heads(y, 1), causal=True, mask=None)

    def vjp(g: Array) -> Array:
        dqkv: Array = xp.empty((batch, time, width3), g.dtype)
        backward(*heads(g, 1), *heads(dqkv, 3))
        return dqkv

    return y, (vjp,)


def attend(q: Array, k: Array, v: Array, y: Array, *, causal: bool, mask: Array | None) -> Backward:
    """Write attention of arrays into y; return what writes its gradients. It checks and records nothing.

    The last of the leading axes, usually the heads, is taken whole: single heads are too little work for a call.

    Args:
        q, k, v: as in `scaled_dot_product_attention`.
        y: (..., T, e).
        mask: (..., T, S).
    """
    if xp_of(q) is np:
        block = _CAUSAL_QUERY_BLOCK if causal else _QUERY_BLOCK
    else:
        block = _CAUSAL_QUERY_BLOCK_ON_GPU if causal else max(1, q.shape[-2])
    several = xp_of(q) is np and q.shape[-2] > block
    if not several or q.ndim <= 3:
        return _attend_at_once(q, k, v, y, causal=causal, mask=mask, block=block, keep=not several)
    masks = [None] * len(q) if mask is None else mask
    samples = [
        attend(*arrays, causal=causal, mask=its_mask) for *arrays, its_mask in zip(q, k, v, y, masks, strict=True)
    ]

    def backward(*arrays: Array) -> None:
        for sample, *views in zip(samples, *arrays, strict=True):
            sample(*views)

    return backward


def _attend_at_once(
    q: Array, k: Array, v: Array, y: Array, *, causal: bool, mask: Array | None, block: int, keep: bool
) -> Backward:
    """Do what `attend` does for all samples together, `block` rows of queries at a time.

    With `keep` the weights are kept, else computed again. With `causal` a block uses only the keys up to its own end:

        keys ->   # .          '#' is computed whole; on the diagonal squares
        rows      # # .        the triangle is cut off; '.' costs nothing
                  # # #
    """
    xp, num_queries, num_keys = xp_of(q), q.shape[-2], k.shape[-2]
    if xp is np or q.dtype.kind == "V":  # NumPy has no fast product of half precision; scores want more than bfloat16
        q, k, v = widened(q), widened(k), widened(v)
    if xp is not np:  # evenly spaced, for one product of all heads of all samples; there is no other order of the loops
        q, k, v = xp.ascontiguousarray(q), xp.ascontiguousarray(k), xp.ascontiguousarray(v)
    kernels, scale = kernels_of(q, k, v), max(1, q.shape[-1]) ** -0.5
    turn = xp.ascontiguousarray if xp is np and num_queries > 1 else xp.asarray  # BLAS is faster at small ones then

    def weights(rows: slice, end: int, keys: Array) -> Array:
        """Return the softmax of these rows' scores with the keys before `end`, which come as columns."""
        scores = kernels.product(q[..., rows, :], keys[..., :end])
        seen = None if mask is None else mask[..., rows, :end]
        weights: Array = kernels.attention_weights(scores, scale, rows.start if causal else None, seen)
        return weights

    columns = turn(k.swapaxes(-1, -2))
    blocks = []  # of each: its rows, the end of its keys, its weights if they are kept
    for start in range(0, max(1, num_queries), block):
        rows = slice(start, min(start + block, num_queries))
        end = rows.stop if causal else num_keys
        p = weights(rows, end, columns)
        kernels.product(p, v[..., :end, :], y[..., rows, :])
        blocks.append((rows, end, p if keep else None))
    if keep:
        mask = None  # so that the tape does not keep what only computing again would need

    def backward(g: Array, dq: Array, dk: Array, dv: Array) -> None:
        g = g.astype(q.dtype, copy=False)
        if xp is not np:
            g = xp.ascontiguousarray(g)
        in_place = dk.dtype == k.dtype and (xp is np or dk.flags.c_contiguous)
        values = turn(v.swapaxes(-1, -2))
        keys: Any = None if keep else turn(k.swapaxes(-1, -2))  # again, so that the tape does not keep them
        dk_sum, dv_sum = (x if in_place else xp.empty(x.shape, k.dtype) for x in (dk, dv))
        for rows, end, kept in reversed(blocks):
            p = weights(rows, end, keys) if kept is None else kept
            add = rows.stop < num_queries  # the last block comes first and reaches every key
            own = g[..., rows, :]
            kernels.product(p.swapaxes(-1, -2), own, dv_sum[..., :end, :], add)
            dp = kernels.product(own, values[..., :end])
            ds = kernels.attention_dscores(dp, p, scale)
            kernels.product(ds, k[..., :end, :], dq[..., rows, :])
            kernels.product(ds.swapaxes(-1, -2), q[..., rows, :], dk_sum[..., :end, :], add)
        if dk_sum is not dk:
            dk[...], dv[...] = dk_sum, dv_sum

    return backward
