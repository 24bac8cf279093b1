"""The fused ops of a neural network: coarse, so that the tape costs nothing beside the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..backend import Array, scatter_add_rows, xp_of
from ..tape import op

Vjp = Callable[[Array], Array]
_QUERY_BLOCK = 64  # rows of the attention matrix at a time; keys after the block are never touched


@op
def layer_norm(x: Array, gain: Array, bias: Array, *, eps: float = 1e-5) -> tuple[Array, tuple[Vjp, Vjp, Vjp]]:
    """Normalise the last axis: y = h gain + bias, h = (x - mean) / sqrt(var + eps).

    With t = g gain: dx = (t - mean(t) - h mean(t h)) / sqrt(var + eps); dgain = sum(g h), dbias = sum(g).

    Args:
        x: (..., n), gain: (n,), bias: (n,).
    Source: Ba et al. 2016, Layer normalization.
    """
    xp, shape, n = xp_of(x), x.shape, x.shape[-1]
    average = xp.full((n, 1), 1 / n, x.dtype)  # row means as GEMV: faster than mean(axis=-1)
    rows = x.reshape(-1, n)
    h = rows - rows @ average
    inverse = 1 / xp.sqrt(xp.einsum("ij,ij->i", h, h)[:, None] / n + x.dtype.type(eps))
    h *= inverse
    y = h * gain
    y += bias

    def vjp_x(g: Array) -> Array:
        t = g.reshape(-1, n) * gain
        mean_t = t @ average
        mean_th = xp.einsum("ij,ij->i", t, h)[:, None] / n
        t -= mean_t
        t -= h * mean_th
        t *= inverse
        return t.reshape(shape)

    return y.reshape(shape), (
        vjp_x,
        lambda g: xp.einsum("ij,ij->j", g.reshape(-1, n), h),
        lambda g: xp.ones(g.size // n, g.dtype) @ g.reshape(-1, n),
    )


@op
def embedding(table: Array, ids: Array) -> tuple[Array, tuple[Vjp, None]]:
    """Look rows up: y[...] = table[ids[...]]. dtable[v] = sum of g where ids == v.

    Args:
        table: (V, n).
        ids: (...) integers in [0, V).
    Raises:
        TypeError: ids are not integers.
        IndexError: an id is out of range.
    """
    xp, (num_rows, width) = xp_of(table), table.shape
    if ids.dtype.kind not in "iu":
        raise TypeError(f"embedding: ids must be integers, got {ids.dtype}")
    if ids.size and (ids.min() < 0 or ids.max() >= num_rows):
        raise IndexError(f"embedding: ids must be in [0, {num_rows}), got {ids.min()} to {ids.max()}")
    rows, dtype = ids.reshape(-1), table.dtype

    def vjp(g: Array) -> Array:
        g2 = g.reshape(-1, width)
        if num_rows <= 256:  # a product with the one-hot matrix is faster than any scatter
            return (xp.arange(num_rows)[:, None] == rows).astype(dtype) @ g2
        dtable: Array = xp.zeros((num_rows, width), dtype)
        scatter_add_rows(dtable, rows, g2)
        return dtable

    return table.take(rows, axis=0).reshape(*ids.shape, width), (vjp, None)


@op
def dropout(x: Array, *, keep: Array, rate: float) -> tuple[Array, tuple[Vjp]]:
    """Zero what `keep` does not keep and scale the rest by 1 / (1 - rate), so that the mean stays.

    Args:
        keep: booleans of x's shape, for example from `rng.keep_mask`.
        rate: the share that is dropped, in [0, 1).
    """
    keep = xp_of(x).asarray(keep)
    scale = 1 / (1 - rate)

    def drop(v: Array) -> Array:
        y = v * keep
        y *= scale
        return y

    return drop(x), (drop,)


@op
def causal_attention(qkv: Array, *, num_heads: int) -> tuple[Array, tuple[Vjp]]:
    """Attend to this and earlier positions: y = softmax(q k^T / sqrt(d), masked) v, for each head.

    Query rows are taken in blocks, and a block uses only the keys up to its own end:

        keys ->   # .          '#' is computed whole; on the diagonal squares
        rows      # # .        the mask is applied; '.' costs nothing
                  # # #

    With p the softmax and D = sum(dy y): ds = p (dy v^T - D), dq = ds k / sqrt(d), dk = ds^T q / sqrt(d), dv = p^T dy.

    Args:
        qkv: (B, T, 3 C), the queries, keys and values side by side.
    Returns:
        (B, T, C).
    Source: Vaswani et al. 2017, section 3.2; the form of ds: Dao et al. 2022, appendix B.2.
    """
    batch, time, width3 = qkv.shape
    head = width3 // (3 * num_heads)
    if head * 3 * num_heads != width3:
        raise ValueError(f"attention: the width must be divisible by num_heads, got {width3 / 3:g} and {num_heads}")
    xp = xp_of(qkv)
    scale = head**-0.5
    parts = qkv.reshape(batch, time, 3, num_heads, head)
    q, k, v = (parts[:, :, i].swapaxes(1, 2) for i in range(3))  # (B, H, T, d), views
    q = q * scale
    y: Array = xp.empty((batch, time, num_heads, head), qkv.dtype)
    heads_y = y.swapaxes(1, 2)
    blocks = [(start, min(start + _QUERY_BLOCK, time)) for start in range(0, time, _QUERY_BLOCK)]
    weights = []  # of each block: exp(s - max), not yet divided by the row sums
    inverse_sums = []
    for lo, hi in blocks:
        s = q[:, :, lo:hi] @ k[:, :, :hi].swapaxes(2, 3)
        s[..., lo:hi] += _mask(xp, hi - lo, s.dtype)
        s -= s.max(axis=-1, keepdims=True)
        e = xp.exp(s, s)
        r = 1 / (e @ xp.ones((hi, 1), e.dtype))  # dividing the output costs less than dividing the weights
        heads_y[:, :, lo:hi] = (e @ v[:, :, :hi]) * r
        weights.append(e)
        inverse_sums.append(r)

    def vjp(g: Array) -> Array:
        dqkv: Array = xp.zeros((batch, time, 3, num_heads, head), g.dtype)
        dq, dk, dv = (dqkv[:, :, i].swapaxes(1, 2) for i in range(3))
        heads_g = g.reshape(batch, time, num_heads, head).swapaxes(1, 2)
        for (lo, hi), e, r in zip(blocks, weights, inverse_sums, strict=True):
            gr = heads_g[:, :, lo:hi] * r
            dv[:, :, :hi] += e.swapaxes(2, 3) @ gr
            ds = gr @ v[:, :, :hi].swapaxes(2, 3)
            ds -= xp.einsum("bhtd,bhtd->bht", gr, heads_y[:, :, lo:hi])[..., None]
            ds *= e
            dq[:, :, lo:hi] = (ds @ k[:, :, :hi]) * scale
            dk[:, :, :hi] += ds.swapaxes(2, 3) @ q[:, :, lo:hi]
        return dqkv.reshape(batch, time, width3)

    return y.reshape(batch, time, width3 // 3), (vjp,)


def _mask(xp: Any, n: int, dtype: Any) -> Array:
    """Return (n, n): 0 on and below the diagonal, -inf above."""
    return xp.triu(xp.full((n, n), -np.inf, dtype), k=1)
