"""Functions of one number, and the maximum of a row, that the CPU's loops inline.

In float64 they are the C library's, in float32 polynomials, which vectors like.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minigrad.backend import Array
from minigrad.kernels.compiling import FUSED, inlined, is_single, overloading
from minigrad.kernels.erfc import ERFC_SINGLE


def exp(x: Any) -> Any:
    """Return exp(x) for x up to 80."""


def exp_within(x: Any) -> Any:
    """Return exp(x) for x from -80 to 80."""


def _exp_within_single(x: Any) -> Any:
    # exp(x) = 2^n exp(f), |f| <= log(2) / 2. Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
    # The polynomial is that of Cephes, expf; its error is below 1.2e-7.
    shifted = x * np.float32(1.44269504) + np.float32(12582912)
    n = shifted - np.float32(12582912)
    f = (x - n * np.float32(0.693359375)) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * f + np.float32(1.3981999507e-3)
    p = p * f + np.float32(8.3334519073e-3)
    p = p * f + np.float32(4.1665795894e-2)
    p = p * f + np.float32(1.6666665459e-1)
    p = p * f + np.float32(5.0000001201e-1)
    p = p * f * f + f + np.float32(1)
    return p * np.int32((np.float32(shifted).view(np.int32) + 127) << 23).view(np.float32)


def _exp_double(x: Any) -> Any:
    return math.exp(x)


@overloading(exp_within)
def _choose_exp_within(x: Any) -> Any:
    return _exp_within_single if is_single(x) else _exp_double


def _exp_single(x: Any) -> Any:
    return np.float32(0) if x < np.float32(-87) else exp_within(x)


@overloading(exp)
def _choose_exp(x: Any) -> Any:
    return _exp_single if is_single(x) else _exp_double


def normal_tail(x: Any, e: Any) -> Any:
    """Return P(-x) for x >= 0, P the normal distribution function, given e = exp(-x^2 / 2)."""


# erfc(z) = (A1 t + ... + A5 t^5) exp(-z^2), t = 1 / (1 + P z), and the tail is erfc(x / sqrt(2)) / 2.
_P = np.float32(ERFC_SINGLE[0] * math.sqrt(0.5))
_A1, _A2, _A3, _A4, _A5 = (np.float32(a / 2) for a in ERFC_SINGLE[2][1:])


def _normal_tail_single(x: Any, e: Any) -> Any:
    t = np.float32(1) / (np.float32(1) + _P * x)
    return ((((_A5 * t + _A4) * t + _A3) * t + _A2) * t + _A1) * t * e


def _normal_tail_double(x: Any, e: Any) -> Any:
    return 0.5 * math.erfc(x * math.sqrt(0.5))


@overloading(normal_tail)
def _choose_normal_tail(x: Any, e: Any) -> Any:
    return _normal_tail_single if is_single(x) else _normal_tail_double


@inlined(FUSED)
def logistic(x: Any, one: Any) -> Any:
    """Return s = 1 / (1 + exp(-x)) and 1 - s."""
    e = exp(-abs(x))
    large = one / (one + e)
    small = e * large
    return (large, small) if x >= 0 else (small, large)


_A = 2 * math.sqrt(2 / math.pi)
_FLAT = 9.5  # from here on, on both sides, GELU is x or 0 to 1e-32


@inlined(FUSED)
def gelu_tanh(x: Any, constants: Any) -> Any:
    """Return the tanh form of the GELU and its derivative."""
    zero, one, flat, a, b, b3 = constants
    v = -flat if x < -flat else x
    inner = flat if v > flat else v
    x2 = inner * inner
    e = exp_within(-inner * (a + b * x2))
    s = one / (one + e)
    s = zero if x < -flat else s
    return v * s, s + inner * s * (s * e) * (a + b3 * x2)


@inlined(FUSED)
def gelu_constants(x: Any) -> Any:
    """Return the constants of the tanh form in the dtype of an array."""
    T = x.dtype.type
    return T(0), T(1), T(_FLAT), T(_A), T(_A * 0.044715), T(3 * _A * 0.044715)


def _in_order(bits: Any) -> Any:
    """Return integers in the order of the floats whose bits are given; the same again gives the bits back."""


def _in_order_single(bits: Any) -> Any:
    return np.int32(bits ^ np.int32(np.int32(bits >> 31) & np.int32(0x7FFFFFFF)))


def _in_order_double(bits: Any) -> Any:
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@overloading(_in_order)
def _choose_in_order(bits: Any) -> Any:
    return _in_order_single if is_single(bits) else _in_order_double


def _as_float(bits: Any) -> Any:
    """Return the float of these bits."""


@overloading(_as_float)
def _choose_as_float(bits: Any) -> Any:
    if is_single(bits):
        return lambda bits: np.int32(bits).view(np.float32)
    return lambda bits: np.int64(bits).view(np.float64)


@inlined(FUSED)
def row_max(bits: Any) -> Any:
    """Return the largest number of a row, given its bits; with a nan among them, a nan or the largest of the others.

    A running maximum of floats depends on where a nan stands, so no vector can take it; one of integers does not.
    """
    largest = _in_order(bits[0])
    for j in range(1, bits.size):
        b = _in_order(bits[j])
        largest = b if b > largest else largest
    return _as_float(_in_order(largest))


def bits_of(x: Array) -> Array:
    return x.view(np.int32 if x.dtype == np.float32 else np.int64)
