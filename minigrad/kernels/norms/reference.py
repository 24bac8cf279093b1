"""Layer norm and RMS norm of rows."""

from __future__ import annotations

from minigrad.backend import Array, widened, xp_of
from minigrad.kernels.common import put

__all__ = [
    "layer_norm",
    "layer_norm_back",
    "layer_norm_dgain",
    "layer_norm_dx",
    "rms_norm",
    "rms_norm_dgain",
    "rms_norm_dx",
    "sum_parts",
]


def layer_norm(x: Array, gain: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    """Return y = h gain + bias, h = (x - mean) / sqrt(var + eps), with the mean and 1 / sqrt(var + eps) of each row.

    Args:
        gain, bias: (n,).
    Returns:
        (m, n) in the dtype in which all three meet, and two columns (m, 1).
    """
    dtype = xp_of(x).result_type(x, gain, bias)
    x = widened(x)
    mean = x @ _average(x)
    h = x - mean
    inverse = _inverse_rms(h, eps)
    h *= inverse
    y = h * gain
    y += bias
    return y.astype(dtype, copy=False), mean, inverse


def layer_norm_dx(g: Array, x: Array, mean: Array, inverse: Array, gain: Array) -> Array:
    """Return (t - mean(t) - h mean(t h)) inverse, t = g gain."""
    t = widened(g) * gain
    t -= t @ _average(t)
    return _through_rms(t, (widened(x) - mean) * inverse, inverse).astype(x.dtype, copy=False)


def layer_norm_back(
    g: Array, x: Array, mean: Array, inverse: Array, gain: Array, beside: Array | None = None
) -> tuple[Array, Array | None, Array | None]:
    """Return dx, and where one pass gives them too parts of dgain and of dbias, for `sum_parts`; else None.

    Args:
        beside: (m, n) that is added to dx, of its dtype; or None.
    """
    dx = layer_norm_dx(g, x, mean, inverse, gain)
    if beside is not None:
        dx += beside
    return dx, None, None


def sum_parts(parts: Array, out: Array, add: bool) -> None:
    """Write the sum of the rows of `parts` into `out`, or add it."""
    put(parts.sum(axis=0), out, add)


def layer_norm_dgain(g: Array, x: Array, mean: Array, inverse: Array) -> Array:
    """Return the sum of g h over all rows, (n,), in float32 where x is of half precision."""
    return xp_of(g).einsum("ij,ij->j", widened(g), (widened(x) - mean) * inverse)


def rms_norm(x: Array, gain: Array, eps: float) -> tuple[Array, Array]:
    """Return y = h gain, h = x / sqrt(mean(x^2) + eps), with 1 / sqrt(mean(x^2) + eps) of each row.

    Args:
        gain: (n,).
    Returns:
        (m, n) in the dtype in which both meet, and a column (m, 1).
    """
    dtype = xp_of(x).result_type(x, gain)
    x = widened(x)
    inverse = _inverse_rms(x, eps)
    return (x * inverse * gain).astype(dtype, copy=False), inverse


def rms_norm_dx(g: Array, x: Array, inverse: Array, gain: Array) -> Array:
    """Return (t - h mean(t h)) inverse, t = g gain."""
    return _through_rms(widened(g) * gain, widened(x) * inverse, inverse).astype(x.dtype, copy=False)


def rms_norm_dgain(g: Array, x: Array, inverse: Array) -> Array:
    """Return the sum of g h over all rows, (n,), in float32 where x is of half precision."""
    return xp_of(g).einsum("ij,ij->j", widened(g), widened(x) * inverse)


def _average(x: Array) -> Array:
    """Return the column that takes the means of rows as a GEMV: faster than mean(axis=1)."""
    n = x.shape[1]
    column: Array = xp_of(x).empty((n, 1), x.dtype)
    column.fill(1 / max(1, n))
    return column


def _inverse_rms(rows: Array, eps: float) -> Array:
    """Return 1 / sqrt(mean of squares + eps) of each row, as a column."""
    xp = xp_of(rows)
    squares: Array = xp.einsum("ij,ij->i", rows, rows)[:, None]
    squares /= max(1, rows.shape[1])
    squares += eps
    return xp.reciprocal(xp.sqrt(squares, squares), squares)


def _through_rms(t: Array, h: Array, inverse: Array) -> Array:
    """Turn t, the gradient by h = rows inverse, into the gradient by the rows, in place."""
    t -= h * (xp_of(t).einsum("ij,ij->i", t, h)[:, None] / max(1, h.shape[1]))
    t *= inverse
    return t
