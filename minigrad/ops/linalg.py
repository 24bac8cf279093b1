"""Matrix products; sums of products in letters are in `einsum_op.py`."""

from __future__ import annotations

from minigrad.autodiff.tape import op
from minigrad.autodiff.vjps import Vjp, WeightVjp
from minigrad.backend import Array
from minigrad.kernels import kernels_of
from minigrad.ops.operands import as_rows, fit, fit_one, given_beside, in_floating_dtype, pass_on, product, unbroadcast


@op
def matmul(a: Array, b: Array) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Multiply matrices as NumPy's `@`: stacks broadcast, a 1-D operand is a row (left) or a column (right).

    y = a b: da = g b^T, db = a^T g.

    Args:
        a: (..., m, k) or (k,).
        b: (..., k, n) or (k,).
    Returns:
        (..., m, n), without the axes that a 1-D operand lacks.
    Raises:
        ValueError: the shapes do not fit.
    """
    a, b = in_floating_dtype(a, b)
    shape_a, shape_b = a.shape, b.shape
    left = a[None, :] if a.ndim == 1 else a
    right = b[:, None] if b.ndim == 1 else b
    try:
        full = product(left, right)
    except ValueError:
        raise ValueError(f"matmul: (..., n, k) and (..., k, m) do not fit, got {shape_a} and {shape_b}") from None
    shape_left, shape_right, shape_full = left.shape, right.shape, full.shape
    y = full.squeeze((-2,) * (a.ndim == 1) + (-1,) * (b.ndim == 1))

    def vjp_a(g: Array) -> Array:
        return unbroadcast(product(g.reshape(shape_full), right.swapaxes(-1, -2)), shape_left).reshape(shape_a)

    def vjp_b(g: Array) -> Array:
        g = g.reshape(shape_full)
        if len(shape_right) == 2:  # one product over all rows, not one a stack to be summed
            return product(as_rows(left).T, as_rows(g)).reshape(shape_b)
        return unbroadcast(product(left.swapaxes(-1, -2), g), shape_right).reshape(shape_b)

    if a.dtype == b.dtype:
        return y, (vjp_a, vjp_b)
    return y, fit(a, b, y, vjp_a, vjp_b)  # for the dtypes: they end in the operands' shapes by themselves


@op
def linear(x: Array, w: Array, b: Array, beside: Array | None = None) -> tuple[Array, tuple[Vjp, ...]]:
    """Map the last axis: y = x w + b, plus `beside` if there is one, in one pass: a residual connection.

    Args:
        x: (..., n), w: (n, m), b: (m,), beside: (..., m).
    Returns:
        (..., m). dx = g w^T, dw = x^T g, db = sum of g over all rows, dbeside = g.
    Raises:
        ValueError: the widths do not fit.
    """
    if w.ndim != 2 or x.shape[-1:] != w.shape[:1] or b.shape != w.shape[1:]:
        raise ValueError(f"linear: x (..., n), w (n, m) and b (m,) do not fit, got {x.shape}, {w.shape} and {b.shape}")
    x, w, b, *besides = in_floating_dtype(x, w, b, *given_beside("linear", beside, (*x.shape[:-1], w.shape[1])))
    kernels, rows = kernels_of(x, w, b, *besides), as_rows(x)

    def write_dw(g: Array, out: Array, add: bool) -> None:
        kernels.product(rows.T, as_rows(g), out, add)

    def write_db(g: Array, out: Array, add: bool) -> None:
        kernels.column_sum(as_rows(g), out, add)

    return kernels.linear(rows, w, b, *map(as_rows, besides)).reshape(*x.shape[:-1], w.shape[1]), (
        fit_one(x, lambda g: kernels.product(as_rows(g), w.T).reshape(*g.shape[:-1], len(w))),
        WeightVjp(w, write_dw),
        WeightVjp(b, write_db),
        *[fit_one(other, pass_on) for other in besides],
    )


@op
def unembed(x: Array, table: Array) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Score each row of a table of embeddings: y = x table^T. dx = g table, dtable = g^T x.

    Args:
        x: (..., n), table: (V, n).
    Returns:
        (..., V).
    Raises:
        ValueError: the widths do not fit.
    """
    if table.ndim != 2 or x.shape[-1:] != table.shape[1:]:
        raise ValueError(f"unembed: x (..., n) and table (V, n) do not fit, got {x.shape} and {table.shape}")
    x, table = in_floating_dtype(x, table)
    kernels, rows = kernels_of(x, table), as_rows(x)

    def write_dtable(g: Array, out: Array, add: bool) -> None:
        kernels.product(as_rows(g).T, rows, out, add)

    return kernels.product(rows, table.T).reshape(*x.shape[:-1], len(table)), (
        fit_one(x, lambda g: kernels.product(as_rows(g), table).reshape(x.shape)),
        WeightVjp(table, write_dtable),
    )


@op
def outer(a: Array, b: Array) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Multiply each element of a with each of b: y[i, j] = a[i] b[j]. da = g b, db = g^T a.

    Args:
        a: (m,), b: (n,).
    Returns:
        (m, n).
    Raises:
        ValueError: a or b is not 1-D.
    """
    if a.ndim != 1 or b.ndim != 1:
        raise ValueError(f"outer: both operands must be 1-D, got {a.shape} and {b.shape}")
    a, b = in_floating_dtype(a, b)
    y = a[:, None] * b
    return y, fit(a, b, y, lambda g: product(g, b), lambda g: product(g.T, a))
