"""GELU, tanh form and exact, computed in blocks that stay in the cache, value and derivative together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from minigrad.backend import Array, xp_of
from minigrad.ops.operands import half_in_float32
from minigrad.tape import op

Vjp = Callable[[Array], Array]
_BLOCK = 1 << 16  # elements: a chain of ufuncs stays in the cache from here on; smaller blocks cost calls

# erfc(z) exp(z^2) for z >= 0 as a polynomial, constant first, in t - c, where t = 1 / (1 + p z): (p, c, coefficients).
# Abramowitz and Stegun, 7.1.26: error of erfc below 1.5e-7.
_SINGLE = (0.3275911, 0.0, (0.0, 0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429))
# Interpolated at the 24 Chebyshev nodes of 2t - 1, with 60 digits: error of erfc below 1e-15, in units of 2t - 1.
_DOUBLE = (0.4, 0.5, tuple(a * 2.0**i for i, a in enumerate((
    0.21080636406114361, 0.3717367339489734, 0.2517131932174405, 0.12503305237882445, 0.03992253907601487,
    0.003993701166097981, -0.0026423659728157, -0.0008759154549173785, 0.0002283804735335644, 0.00012887722225933806,
    -3.418296435405689e-05, -1.8614769447322862e-05, 7.5569151054483105e-06, 2.298998814223108e-06,
    -1.8211381937552404e-06, -7.644460357192798e-08, 3.974085857289782e-07, -8.657454542271736e-08,
    -6.834134137787255e-08, 3.695299404295727e-08, 7.617005034691897e-09, -8.31437456466365e-09,
    -3.521238327269033e-10, 8.899248713184815e-10,
))))  # fmt: skip


@op
@half_in_float32
def gelu(x: Array, *, exact: bool = False) -> tuple[Array, tuple[Vjp]]:
    """Apply the GELU: y = x P(x), P the normal distribution function, or by default its tanh form.

    exact: d/dx = P + x p(x), p the normal density.
    tanh form: y = x s(2u), u = sqrt(2/pi) (x + 0.044715 x^3), s the logistic function;
        d/dx = s + x s (1 - s) 2u', u' = sqrt(2/pi) (1 + 3 * 0.044715 x^2).

    The residual is the derivative itself, so backward is one product.
    Source: Hendrycks and Gimpel 2016, section 2, with tanh(u) = 2 s(2u) - 1.
    """
    xp = xp_of(x)
    y, d = xp.empty_like(x, order="C"), xp.empty_like(x, order="C")
    flat_x, flat_y, flat_d = xp.ravel(x), y.reshape(-1), d.reshape(-1)
    block = _BLOCK if xp is np else max(1, x.size)
    form = _exact if exact else _tanh_form
    with np.errstate(over="ignore", under="ignore"):  # far from 0 the exponentials are 0 or inf, as they should be
        for i in range(0, x.size, block):
            form(xp, flat_x[i : i + block], flat_y[i : i + block], flat_d[i : i + block])
    return y, (lambda g: g * d,)


def _tanh_form(xp: Any, x: Array, y: Array, d: Array) -> None:
    """Write the value into y and the derivative into d; 2u = a x + b x^3."""
    a = 2 * math.sqrt(2 / math.pi)
    b = a * 0.044715
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


def _exact(xp: Any, x: Array, y: Array, d: Array) -> None:
    """Write the value into y and the derivative into d; one exponential, exp(-x^2 / 2), serves both."""
    p, center, coefficients = _SINGLE if x.dtype == np.float32 else _DOUBLE
    z = xp.abs(x)
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
    xp.multiply(x, e, d)
    d *= 1 / math.sqrt(2 * math.pi)
    d += tail
