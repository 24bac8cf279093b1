"""The two linear maps of a transformer's block with the GELU between them, as one op: the widest arrays of a model."""

from __future__ import annotations

from typing import Any

from minigrad.autodiff.tape import op
from minigrad.autodiff.vjps import Vjp, WeightVjp
from minigrad.backend import Array
from minigrad.kernels import kernels_of
from minigrad.ops.operands import as_rows, fit_one, given_beside, in_floating_dtype, in_floats, pass_on


@op
@in_floats
def feed_forward(
    x: Array, w1: Array, b1: Array, w2: Array, b2: Array, beside: Array | None = None, *, exact: bool = False
) -> tuple[Array, tuple[Vjp, ...]]:
    """Widen, bend, narrow: y = gelu(h) w2 + b2, plus `beside` if there is one; h = x w1 + b1.

    The same as `linear(gelu(linear(x, w1, b1)), w2, b2, beside)`. On a CPU only x and h are kept, and the backward
    computes gelu(h) again: half of what the composed ops keep.

    With dh = (g w2^T) gelu'(h): dx = dh w1^T, dw1 = x^T dh, db1 = sum(dh), dw2 = gelu(h)^T g, db2 = sum(g).

    Args:
        x: (..., n), w1: (n, k), b1: (k,), w2: (k, m), b2: (m,), beside: (..., m).
        exact: as in `gelu`.
    Returns:
        (..., m).
    Raises:
        ValueError: the widths do not fit.
    """
    n, k, m = x.shape[-1:], b1.shape, b2.shape
    if (w1.shape, w2.shape) != (n + k, k + m) or not len(n) == len(k) == len(m) == 1:
        raise ValueError(
            "feed_forward: x (..., n), w1 (n, k), b1 (k,), w2 (k, m) and b2 (m,) do not fit, "
            f"got {x.shape}, {w1.shape}, {b1.shape}, {w2.shape} and {b2.shape}"
        )
    given = x
    besides = given_beside("feed_forward", beside, (*x.shape[:-1], *m))
    x, w1, b1, w2, b2, *besides = in_floating_dtype(x, w1, b1, w2, b2, *besides)
    kernels, rows, shape = kernels_of(x, w1, b1, w2, b2, *besides), as_rows(x), x.shape
    wide, kept = kernels.linear_gelu(rows, w1, b1, exact)
    y = kernels.linear(wide, w2, b2, *map(as_rows, besides)).reshape(*shape[:-1], w2.shape[1])
    del wide
    middle: tuple[Any, ...] = (None,)  # of the backward, once a vjp has made them: g, gelu(h), dh, parts of db1

    def back(g: Array) -> tuple[Any, ...]:
        nonlocal kept, middle
        if middle[0] is not g:
            if kept is None:  # a cotangent before this one has used it up
                kept = kernels.linear_gelu(rows, w1, b1, exact)[1]
            middle = g, *kernels.linear_gelu_back(as_rows(g), w2, kept, exact)
            kept = None
        return middle[1:]

    def vjp_x(g: Array) -> Array:
        return kernels.product(back(g)[1], w1.T).reshape(shape)

    def write_dw1(g: Array, out: Array, add: bool) -> None:
        kernels.product(rows.T, back(g)[1], out, add)

    def write_db1(g: Array, out: Array, add: bool) -> None:
        _, dh, parts = back(g)
        if parts is None:
            kernels.column_sum(dh, out, add)
        else:
            kernels.sum_parts(parts, out, add)

    def write_dw2(g: Array, out: Array, add: bool) -> None:
        kernels.product(back(g)[0].T, as_rows(g), out, add)

    def write_db2(g: Array, out: Array, add: bool) -> None:
        kernels.column_sum(as_rows(g), out, add)

    return y, (
        fit_one(given, vjp_x),
        WeightVjp(w1, write_dw1),
        WeightVjp(b1, write_db1),
        WeightVjp(w2, write_dw2),
        WeightVjp(b2, write_db2),
        *[fit_one(other, pass_on) for other in besides],
    )
