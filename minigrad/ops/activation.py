"""Nonlinear functions between the layers of a network."""

from __future__ import annotations

from minigrad.autodiff.tape import op
from minigrad.autodiff.vjps import Vjp
from minigrad.backend import Array
from minigrad.kernels import kernels_of
from minigrad.ops.operands import in_floats


@op
def relu(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Take max(x, 0). d/dx = 1 where x > 0, else 0 (at 0 too)."""
    kernels = kernels_of(x)
    y, positive = kernels.relu(x)
    return y, (lambda g: kernels.select(g, positive),)


@op
@in_floats
def leaky_relu(x: Array, *, slope: float = 0.01) -> tuple[Array, tuple[Vjp]]:
    """Take x where x > 0, else slope x. d/dx = 1 or slope (at 0 too)."""
    y, d = kernels_of(x).leaky_relu(x, slope)
    return y, (lambda g: g * d,)


@op
@in_floats
def sigmoid(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Apply the logistic function, y = 1 / (1 + exp(-x)). d/dx = y (1 - y)."""
    kernels = kernels_of(x)
    y = kernels.sigmoid(x)
    return y, (lambda g: kernels.sigmoid_dx(g, y),)


@op
@in_floats
def silu(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Take y = x s, s the logistic function. d/dx = s + y (1 - s), on a CPU the residual."""
    kernels = kernels_of(x)
    y, kept = kernels.silu(x)
    return y, (lambda g: kernels.silu_dx(g, kept),)


@op
@in_floats
def gelu(x: Array, *, exact: bool = False) -> tuple[Array, tuple[Vjp]]:
    """Apply the GELU: y = x P(x), P the normal distribution function, or by default its tanh form.

    exact: d/dx = P + x p(x), p the normal density.
    tanh form: y = x s(2u), u = sqrt(2/pi) (x + 0.044715 x^3), s the logistic function;
        d/dx = s + x s (1 - s) 2u', u' = sqrt(2/pi) (1 + 3 * 0.044715 x^2).

    On a CPU the residual is the derivative itself, so backward is one product.
    Source: Hendrycks and Gimpel 2016, section 2, with tanh(u) = 2 s(2u) - 1.
    """
    kernels = kernels_of(x)
    y, kept = kernels.gelu(x, exact)
    return y, (lambda g: kernels.gelu_dx(g, kept, exact),)


@op
@in_floats
def softplus(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Take log(1 + exp(x)). d/dx is the logistic function."""
    kernels = kernels_of(x)
    return kernels.softplus(x), (lambda g: g * kernels.sigmoid(x),)
