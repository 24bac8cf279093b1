"""Elementwise ops. Binary ones broadcast as NumPy does; each gradient has its own operand's shape and dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..backend import Array, xp_of
from ..tape import op

Vjp = Callable[[Array], Array]
_BLOCK = 1 << 16  # elements: a chain of ufuncs stays in the cache from here on; smaller blocks cost calls


def _fit(x: Any) -> Vjp:
    """Return a function that sums a gradient over the axes along which `x` was broadcast, in x's dtype."""
    shape, dtype = getattr(x, "shape", ()), getattr(x, "dtype", None)

    def fit(g: Array) -> Array:
        if g.shape != shape:
            extra = g.ndim - len(shape)
            stretched = tuple(extra + i for i, n in enumerate(shape) if n == 1 and g.shape[extra + i] != 1)
            g = g.sum(axis=(*range(extra), *stretched), keepdims=True).reshape(shape)
        return g if g.dtype == dtype else g.astype(dtype)

    return fit


@op
def add(a: Array, b: Array) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Add. d/da = 1, d/db = 1."""
    return a + b, (_fit(a), _fit(b))


@op
def sub(a: Array, b: Array) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Subtract. d/da = 1, d/db = -1."""
    fit_b = _fit(b)
    return a - b, (_fit(a), lambda g: fit_b(-g))


@op
def mul(a: Array, b: Array) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Multiply. d/da = b, d/db = a."""
    fit_a, fit_b = _fit(a), _fit(b)
    return a * b, (lambda g: fit_a(g * b), lambda g: fit_b(g * a))


@op
def div(a: Array, b: Array) -> tuple[Array, tuple[Vjp, Vjp]]:
    """Divide. d/da = 1 / b, d/db = -a / b^2."""
    fit_a, fit_b = _fit(a), _fit(b)
    return a / b, (lambda g: fit_a(g / b), lambda g: fit_b(-g * (a / b) / b))


@op
def neg(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Negate. d/dx = -1."""
    return -x, (lambda g: -g,)


@op
def exp(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Exponentiate. d/dx = exp(x)."""
    y = xp_of(x).exp(x)
    return y, (lambda g: g * y,)


@op
def log(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Take the natural logarithm. d/dx = 1 / x."""
    return xp_of(x).log(x), (lambda g: g / x,)


@op
def tanh(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Take the hyperbolic tangent. d/dx = 1 - tanh(x)^2."""
    y = xp_of(x).tanh(x)
    return y, (lambda g: g * (1 - y * y),)


@op
def relu(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Take max(x, 0). d/dx = 1 where x > 0, else 0 (at 0 too)."""
    positive = x > 0
    return x * positive, (lambda g: g * positive,)


@op
def gelu(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Apply the GELU in its tanh form, y = x s(2u), u = sqrt(2/pi) (x + 0.044715 x^3), s the logistic function.

    d/dx = s + x s (1 - s) 2u', u' = sqrt(2/pi) (1 + 3 * 0.044715 x^2).
    The residual is the derivative itself, so backward is one product; computed in blocks that stay in the cache.
    Source: Hendrycks and Gimpel 2016, section 2, with tanh(u) = 2 s(2u) - 1.
    """
    xp = xp_of(x)
    y, d = xp.empty_like(x, order="C"), xp.empty_like(x, order="C")
    flat_x, flat_y, flat_d = xp.ravel(x), y.reshape(-1), d.reshape(-1)
    a, b = 2 * float(np.sqrt(2 / np.pi)), 2 * float(np.sqrt(2 / np.pi)) * 0.044715
    block = _BLOCK if xp is np else max(1, x.size)
    with np.errstate(over="ignore"):  # exp(-2u) is inf for x far below 0, and s then 0, as it should be
        for i in range(0, x.size, block):
            _gelu_block(xp, flat_x[i : i + block], flat_y[i : i + block], flat_d[i : i + block], a, b)
    return y, (lambda g: g * d,)


def _gelu_block(xp: Any, x: Array, y: Array, d: Array, a: float, b: float) -> None:
    """Write the value into y and the derivative into d; 2u = a x + b x^3."""
    x2 = x * x
    s = x2 * -b
    s -= a
    s *= x
    xp.exp(s, s)
    s += 1
    xp.reciprocal(s, s)
    xp.multiply(x, s, y)
    x2 *= 3 * b  # 2u' = a + 3b x^2
    x2 += a
    xp.subtract(1, s, d)
    d *= y
    d *= x2
    d += s


@op
def astype(x: Array, *, dtype: Any) -> tuple[Array, tuple[Vjp]]:
    """Convert to another floating point dtype. d/dx = 1, in x's dtype."""
    if np.dtype(dtype).kind in "iub":
        raise TypeError(
            f"astype keeps a tensor differentiable: the dtype must be floating point, got {np.dtype(dtype)}"
        )
    before = x.dtype
    return x.astype(dtype), (lambda g: g.astype(before),)
