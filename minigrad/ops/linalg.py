"""Matrix products."""

from __future__ import annotations

from collections.abc import Callable

from ..backend import Array, xp_of
from ..tape import op

Vjp = Callable[[Array], Array]


@op
def matmul(a: Array, b: Array) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Multiply matrices as NumPy's `@`: stacks broadcast, a 1-D operand is a row (left) or a column (right).

    y = a b: da = g b^T, db = a^T g.
    """
    shape_a, shape_b = a.shape, b.shape
    left = a if a.ndim > 1 else a[None, :]
    right = b if b.ndim > 1 else b[:, None]
    new_axes = (-2,) * (a.ndim == 1) + (-1,) * (b.ndim == 1)  # those that y lacks beside left @ right
    xp = xp_of(a)

    def vjp_a(g: Array) -> Array:
        return _unstack(xp.expand_dims(g, new_axes) @ right.swapaxes(-1, -2), shape_a)

    def vjp_b(g: Array) -> Array:
        g = xp.expand_dims(g, new_axes)
        if len(shape_b) <= 2 and left.ndim > 2:  # one product over all rows, not one a stack to be summed
            return (left.reshape(-1, left.shape[-1]).T @ g.reshape(-1, g.shape[-1])).reshape(shape_b)
        return _unstack(left.swapaxes(-1, -2) @ g, shape_b)

    return a @ b, (vjp_a, vjp_b)


def _unstack(g: Array, shape: tuple[int, ...]) -> Array:
    """Sum a gradient over the stack axes along which its operand of this shape was broadcast."""
    if g.shape == shape:
        return g
    matrix = (1,) * (2 - len(shape)) + shape
    extra = g.ndim - len(matrix)
    stretched = tuple(extra + i for i, n in enumerate(matrix[:-2]) if n == 1 and g.shape[extra + i] != 1)
    return g.sum(axis=(*range(extra), *stretched)).reshape(shape)


@op
def linear(x: Array, w: Array, b: Array) -> tuple[Array, tuple[Vjp, Vjp, Vjp]]:
    """Map the last axis: y = x w + b.

    Args:
        x: (..., n), w: (n, m), b: (m,).
    Returns:
        (..., m). dx = g w^T, dw = x^T g, db = sum of g over all rows.
    Raises:
        ValueError: the widths do not fit.
    """
    xp = xp_of(x)
    n, m = w.shape
    if x.shape[-1] != n or b.shape != (m,):
        raise ValueError(f"linear: x (..., n), w (n, m) and b (m,) do not fit, got {x.shape}, {w.shape} and {b.shape}")
    rows = x.reshape(-1, n)
    y = rows @ w
    y += b

    def vjp_b(g: Array) -> Array:
        g2 = g.reshape(-1, m)
        return xp.ones(len(g2), g.dtype) @ g2  # a GEMV is faster than sum(0)

    return y.reshape(*x.shape[:-1], m), (
        lambda g: (g.reshape(-1, m) @ w.T).reshape(*g.shape[:-1], n),
        lambda g: rows.T @ g.reshape(-1, m),
        vjp_b,
    )
