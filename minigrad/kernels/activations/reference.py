"""Functions of one number. Any shape."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minigrad.backend import Array, xp_of
from minigrad.kernels.common import BLOCK, half_in_float32
from minigrad.kernels.erfc import ERFC_DOUBLE, ERFC_SINGLE
from minigrad.kernels.products.reference import linear, product

__all__ = [
    "add_select",
    "gelu",
    "gelu_back",
    "gelu_dx",
    "leaky_relu",
    "linear_gelu",
    "linear_gelu_back",
    "relu",
    "select",
    "sigmoid",
    "sigmoid_dx",
    "silu",
    "silu_dx",
    "softplus",
]


def select(x: Array, keep: Array, scale: float = 1.0) -> Array:
    """Return x scale where `keep` holds, else 0, whatever stands there. Any shape.

    By bits: a product with the mask would make nan of inf and 0, and NumPy's `where` is seven times slower
    where the mask changes at random.
    """
    if scale != 1.0:
        x = x * xp_of(x).asarray(scale, x.dtype)
    bits = np.dtype(f"i{x.itemsize}")
    return (x.view(bits) & -keep.astype(bits)).view(x.dtype)


def add_select(x: Array, y: Array, keep: Array, scale: float) -> Array:
    """Return x + select(y, keep, scale), all of one shape."""
    return x + select(y, keep, scale)


def relu(x: Array) -> tuple[Array, Array]:
    """Return max(x, 0), and where the derivative is 1: booleans."""
    return xp_of(x).maximum(x, 0), x > 0


@half_in_float32
def leaky_relu(x: Array, slope: float) -> tuple[Array, Array]:
    """Return x where it is positive, else slope x, and the derivative."""
    xp = xp_of(x)
    d = xp.where(x > 0, xp.asarray(1, x.dtype), xp.asarray(slope, x.dtype))
    return x * d, d


@half_in_float32
def sigmoid(x: Array) -> Array:
    """Return s = 1 / (1 + exp(-x)), for x < 0 as exp(x) / (1 + exp(x)): no exponential overflows."""
    xp = xp_of(x)
    return xp.exp(xp.minimum(x, 0)) / (1 + xp.exp(-xp.abs(x)))


@half_in_float32
def sigmoid_dx(g: Array, y: Array) -> Array:
    """Return g y (1 - y)."""
    return g * (y * (1 - y))


@half_in_float32
def silu(x: Array) -> tuple[Array, Array]:
    """Return y = x s, s the logistic function, and what `silu_dx` needs: here the derivative, s + y (1 - s).

    On a GPU, where memory is slow and arithmetic is not, it is x.
    """
    xp, s = xp_of(x), sigmoid(x)
    limits = np.finfo(x.dtype)
    y = xp.maximum(x, limits.min) * s  # -inf times 0 would be nan
    return y, s + xp.minimum(y, limits.max) * (1 - s)


def silu_dx(g: Array, kept: Array) -> Array:
    """Return g times the derivative, from what `silu` of the same table keeps for it."""
    return g * kept


@half_in_float32
def softplus(x: Array) -> Array:
    """Return log(1 + exp(x)), whose derivative is `sigmoid`."""
    xp = xp_of(x)
    return xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x)))


GELU_FLAT = 40.0  # from here on, on both sides, GELU is x or 0 and its derivative 1 or 0, in float64 too


def gelu_dx(g: Array, kept: Array, exact: bool) -> Array:
    """Return g times the derivative, from what `gelu` of the same table keeps for it."""
    return g * kept


@half_in_float32
def gelu(x: Array, exact: bool) -> tuple[Array, Array]:
    """Return the GELU, y = x P(x), P the normal distribution function or its tanh form, and what `gelu_dx` needs.

    Here that is the derivative. On a GPU, where memory is slow and arithmetic is not, it is x.
    """
    y, d = xp_of(x).empty_like(x, order="C"), xp_of(x).empty_like(x, order="C")
    _gelu(x, exact, y, d)
    return y, d


def _gelu(x: Array, exact: bool, y: Array, d: Array | None) -> None:
    """Write the GELU of x into y, and if there is a d its derivative there."""
    xp = xp_of(x)
    flat_x, flat_y, flat_d = xp.ravel(x), y.reshape(-1), None if d is None else d.reshape(-1)
    block = BLOCK if xp is np else max(1, x.size)
    form = _gelu_exact if exact else _gelu_tanh
    with np.errstate(over="ignore", under="ignore"):  # far from 0 the exponentials are 0 or inf, as they should be
        for i in range(0, x.size, block):
            own = slice(i, i + block)
            part = xp.maximum(flat_x[own], -GELU_FLAT)  # y at -inf is not -inf times 0
            inner = xp.minimum(part, GELU_FLAT)  # nor its derivative at inf inf times 0
            form(xp, part, inner, flat_y[own], None if flat_d is None else flat_d[own])


@half_in_float32
def linear_gelu(x: Array, w: Array, b: Array, exact: bool) -> tuple[Array, Any]:
    """Return the GELU of x w + b, and what `gelu_back` of the same table needs: here x w + b, to compute it again."""
    h = linear(x, w, b)
    y = xp_of(h).empty_like(h, order="C")
    _gelu(h, exact, y, None)
    return y, h


def gelu_back(g: Array, kept: Any, exact: bool) -> tuple[Array, Array, Array | None]:
    """Return what `linear_gelu` gave and the gradient by x w + b, from g, that by what it gave.

    It may write into g and into what was kept, which is then used up. Where one pass gives them too, parts of the
    gradient by b come with it, for `sum_parts`; else None.
    """
    y, dh = _gelu_back(g, kept, exact)
    return y, dh, None


def linear_gelu_back(g: Array, w: Array, kept: Any, exact: bool) -> tuple[Array, Array, Array | None]:
    """Do `gelu_back` of g w^T: g is the gradient by what another linear map, by w, makes of the GELU."""
    return gelu_back(product(g, w.T), kept, exact)


@half_in_float32
def _gelu_back(g: Array, h: Array, exact: bool) -> tuple[Array, Array]:
    y, d = gelu(h, exact)
    return y, g * d


def _gelu_tanh(xp: Any, x: Array, inner: Array, y: Array, d: Array | None) -> None:
    """Write y = x s, s the logistic function of 2u = a x + b x^3, and d = s + x s (1 - s) 2u'."""
    a = 2 * math.sqrt(2 / math.pi)
    b = a * 0.044715
    x2 = inner * inner
    s = x2 * -b
    s -= a
    s *= inner
    xp.exp(s, s)
    s += 1
    xp.reciprocal(s, s)
    xp.multiply(x, s, y)
    if d is None:
        return
    x2 *= 3 * b  # 2u' = a + 3b x^2
    x2 += a
    xp.subtract(1, s, d)
    d *= s
    d *= inner
    d *= x2
    d += s


def _gelu_exact(xp: Any, x: Array, inner: Array, y: Array, d: Array | None) -> None:
    """Write y = x P and d = P + x p, p the normal density; one exponential, exp(-x^2 / 2), serves both."""
    p, center, coefficients = ERFC_SINGLE if x.dtype == np.float32 else ERFC_DOUBLE
    z = xp.abs(inner)
    z *= math.sqrt(0.5)
    e = z * z
    xp.negative(e, e)
    xp.exp(e, e)
    z *= p
    z += 1
    xp.reciprocal(z, z)
    z -= center
    tail = xp.full_like(z, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        tail *= z
        tail += coefficient
    tail *= e
    tail *= 0.5  # P(-|x|) = erfc(|x| / sqrt(2)) / 2
    xp.subtract(0.5, tail, tail)
    xp.copysign(tail, x, tail)
    tail += 0.5  # P(x)
    xp.multiply(x, tail, y)
    if d is None:
        return
    xp.multiply(inner, e, d)
    d *= 1 / math.sqrt(2 * math.pi)
    d += tail
