"""Arithmetic and the functions of one number. Each gradient has its own operand's shape and dtype: see `operands.py`.

Where a derivative is infinite (sqrt or log at 0) NumPy's inf and its warning come through, and inf times a zero
cotangent is nan. To keep a value away from such a point, `where` must choose the argument, not the result.
"""

from __future__ import annotations

from typing import Any

from minigrad.arguments import as_dtype
from minigrad.autodiff.tape import op
from minigrad.autodiff.vjps import Vjp
from minigrad.backend import Array, xp_of
from minigrad.kernels import kernels_of
from minigrad.ops.operands import broadcasting, fit, half_in_float32, pair, pass_on, select


def _negate(g: Array) -> Array:
    return -g


@op
@broadcasting
def add(a: Array, b: Array) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Add. d/da = 1, d/db = 1."""
    return kernels_of(a, b).add(a, b), (pass_on, pass_on)


@op
@broadcasting
def sub(a: Array, b: Array) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Subtract. d/da = 1, d/db = -1."""
    return a - b, (pass_on, _negate)


@op
@broadcasting
def mul(a: Array, b: Array) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Multiply. d/da = b, d/db = a."""
    return a * b, (lambda g: g * b, lambda g: g * a)


@op
@broadcasting
def div(a: Array, b: Array) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Divide: y = a / b. d/da = 1 / b, d/db = -y / b."""
    y = a / b
    return y, (lambda g: g / b, lambda g: -g * y / b)


@op
def pow(a: Array, b: Array) -> tuple[Array, tuple[Vjp, Vjp | None]]:
    """Raise to a power: y = a^b. d/da = b a^(b - 1), d/db = y log(a).

    d/da is 0 for an exponent 0, and d/db is 0 at a = 0, also where the formulas say 0 inf.
    """
    a, b = pair("pow", a, b)
    if isinstance(b, (int, float)):
        y = a.copy() if b == 1 else _power(a, b)  # no view: who takes a power keeps the values of now
        return y, (lambda g: g * (b * _power(a, b - 1)) if b else xp_of(g).zeros_like(g), None)
    xp = xp_of(b)
    if isinstance(a, (int, float)):
        a = xp.asarray(a, xp.result_type(a, b))  # of integers a float: in their dtype 2.5 would be 2
    y = a**b
    return y, fit(
        a,
        b,
        y,
        lambda g: g * (b * a ** select(b == 0, 1, b - 1, b.dtype)),
        lambda g: g * (select(a == 0, 0, y, y.dtype) * xp.log(select(a == 0, 1, a, a.dtype))),
    )


def _power(a: Array, b: float) -> Array:
    """Return a^b; a small whole power by products, since NumPy's pow costs about a hundred of them."""
    if b == 1:
        return a
    if b == 3:
        return a * a * a
    return a**b


@op
def neg(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Negate. d/dx = -1."""
    return -x, (_negate,)


@op
def abs(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Take the absolute value. d/dx = sign(x), 0 at 0."""
    xp = xp_of(x)
    sign = xp.sign(x)
    return xp.abs(x), (lambda g: g * sign,)


@op
def exp(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Exponentiate. d/dx = exp(x)."""
    y = xp_of(x).exp(x)
    return y, (lambda g: g * y,)


@op
def expm1(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Take exp(x) - 1, exact for small x. d/dx = y + 1."""
    y = xp_of(x).expm1(x)
    return y, (lambda g: g * (y + 1),)


@op
def log(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Take the natural logarithm. d/dx = 1 / x."""
    return xp_of(x).log(x), (lambda g: g / x,)


@op
def log1p(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Take log(1 + x), exact for small x. d/dx = 1 / (1 + x)."""
    return xp_of(x).log1p(x), (lambda g: g / (1 + x),)


@op
def sqrt(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Take the square root. d/dx = 1 / (2 y)."""
    y = xp_of(x).sqrt(x)
    return y, (lambda g: g / (2 * y),)


@op
@half_in_float32
def rsqrt(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Take y = 1 / sqrt(x). d/dx = -y^3 / 2."""
    y = 1 / xp_of(x).sqrt(x)
    return y, (lambda g: g * (y * y * y / -2),)


@op
def sin(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Take the sine. d/dx = cos(x)."""
    return xp_of(x).sin(x), (lambda g: g * xp_of(x).cos(x),)


@op
def cos(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Take the cosine. d/dx = -sin(x)."""
    return xp_of(x).cos(x), (lambda g: -g * xp_of(x).sin(x),)


@op
def tanh(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Take the hyperbolic tangent. d/dx = 1 - y^2."""
    y = xp_of(x).tanh(x)
    return y, (lambda g: g * (1 - y * y),)


@op
def astype(x: Array, /, dtype: Any) -> tuple[Array, tuple[Vjp]]:
    """Convert to another floating point dtype. d/dx = 1, in x's dtype.

    Args:
        dtype: as NumPy names it: `np.float64`, `"float16"`.
    Raises:
        TypeError: it is not floating point: integers have no derivative. Or nothing here computes with it.
    """
    before, after = x.dtype, as_dtype(dtype)
    if after.kind not in "fV":
        raise TypeError(f"astype keeps a tensor differentiable: the dtype must be floating point, got {after}")
    return x.astype(after), (lambda g: g.astype(before),)
