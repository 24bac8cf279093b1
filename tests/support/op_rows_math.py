"""Rows of the op table: elementwise, linear algebra, reductions, shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from op_table import Sampler, normal, off_zero, positive, row

from minigrad.backend import Array

KEEP = np.array([[True, False, True], [False, True, True]])


def plain_gelu(x: Array, *, exact: bool = False) -> Array:
    if exact:
        return 0.5 * x * (1 + np.vectorize(math.erf, [float])(x / np.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def plain_feed_forward(x: Array, w1: Array, b1: Array, w2: Array, b2: Array, *, exact: bool = False) -> Array:
    return plain_gelu(x @ w1 + b1, exact=exact) @ w2 + b2


def plain_feed_forward_beside(x: Array, w1: Array, b1: Array, w2: Array, b2: Array, beside: Array) -> Array:
    return plain_feed_forward(x, w1, b1, w2, b2) + beside


def plain_logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def plain_norm(x: Array, axis: Any = None, keepdims: bool = False) -> Array:
    return np.sqrt(np.sum(x * x, axis, keepdims=keepdims))


def plain_logsumexp(x: Array, axis: Any = None, keepdims: bool = False) -> Array:
    return np.log(np.sum(np.exp(x), axis, keepdims=keepdims))


def plain_einsum(*x: Array, subscripts: str) -> Array:
    return np.einsum(subscripts, *x)


def plain_pad(x: Array, *, widths: Any, value: float = 0) -> Array:
    return np.pad(x, widths, constant_values=value)


def booleans(*shape: int) -> Sampler:
    return lambda generator: generator.integers(2, size=shape).astype(bool)


def with_a_zero(*shape: int) -> Sampler:
    """Samples whose first element is 0: the product of all the others must not come from a division."""
    return lambda generator: np.where(np.arange(np.prod(shape)).reshape(shape) == 0, 0, off_zero(*shape)(generator))


def off(*kinks: float) -> Callable[..., Sampler]:
    """Return a sampler of values between the kinks: at least 0.1 from each."""

    def shaped(*shape: int) -> Sampler:
        def sample(generator: np.random.Generator) -> Array:
            x = generator.uniform(min(kinks) - 1, max(kinks) + 1, shape)
            for kink in kinks:
                x = np.where(np.abs(x - kink) < 0.1, kink + 0.2, x)
            return x

        return sample

    return shaped


ROWS = [
    row("add", np.add, normal(2, 3), normal(2, 3)),
    row("add", np.add, normal(2, 3), normal(3)),
    row("add", np.add, normal(2, 1), normal(4, 1, 3)),
    row("add", np.add, normal(), normal(2, 3)),
    row("add", np.add, normal(2, 3), 2),
    row("add", np.add, normal(0, 3), normal(3)),
    row("sub", np.subtract, normal(2, 3), normal(2, 3)),
    row("sub", np.subtract, normal(2, 1), normal(1, 3)),
    row("sub", np.subtract, 2.5, normal(2, 3)),
    row("sub", np.subtract, normal(0, 3), normal(3)),
    row("mul", np.multiply, normal(2, 3), normal(2, 3)),
    row("mul", np.multiply, normal(2, 1), normal(1, 3)),
    row("mul", np.multiply, normal(), normal(2, 3)),
    row("mul", np.multiply, -2, normal(2, 3)),
    row("mul", np.multiply, normal(0, 3), normal(3)),
    row("div", np.divide, normal(2, 3), off_zero(2, 3)),
    row("div", np.divide, normal(2, 1), off_zero(1, 3)),
    row("div", np.divide, normal(2, 3), off_zero()),
    row("div", np.divide, 2, off_zero(2, 3)),
    row("div", np.divide, normal(0, 3), off_zero(3)),
    row("pow", np.power, normal(2, 3), 2),
    row("pow", np.power, normal(2, 3), 3),
    row("pow", np.power, normal(2, 3), 5),
    row("pow", np.power, normal(2, 3), 1),
    row("pow", np.power, normal(2, 3), 0),
    row("pow", np.power, off_zero(2, 3), -1),
    row("pow", np.power, positive(2, 3), 0.5),
    row("pow", np.power, positive(2, 3), normal(2, 3)),
    row("pow", np.power, positive(2, 1), normal(1, 3)),
    row("pow", np.power, positive(), normal(2, 3)),
    row("pow", np.power, 2.5, normal(2, 3)),
    row("pow", np.power, positive(0, 3), normal(3)),
    row("abs", np.abs, off_zero(2, 3)),
    row("abs", np.abs, off_zero(0)),
    row("maximum", np.maximum, normal(2, 3), normal(2, 3)),
    row("maximum", np.maximum, normal(2, 1), normal(3)),
    row("maximum", np.maximum, off_zero(2, 3), 0.0),
    row("maximum", np.maximum, 0, off_zero(2, 3)),
    row("maximum", np.maximum, normal(0, 3), normal(3)),
    row("minimum", np.minimum, normal(2, 3), normal(2, 3)),
    row("minimum", np.minimum, normal(3), normal(2, 1)),
    row("minimum", np.minimum, 0.0, off_zero(2, 3)),
    row("minimum", np.minimum, off_zero(2, 3), 0),
    row("minimum", np.minimum, normal(0, 3), normal(3)),
    row("clip", lambda x, low, high: np.clip(x, low, high), off(-1, 0.5)(4, 5), low=-1, high=0.5),
    row("clip", lambda x, low: np.maximum(x, low), off(0.5)(4, 5), low=0.5),
    row("clip", lambda x, high: np.minimum(x, high), off(0.5)(4, 5), high=0.5),
    row("clip", lambda x, low: np.maximum(x, low), normal(0, 3), low=0),
    row("where", np.where, booleans(2, 3), normal(2, 3), normal(2, 3)),
    row("where", np.where, booleans(2, 1), normal(3), normal(4, 1, 1)),
    row("where", np.where, booleans(2, 3), normal(), 1.5),
    row("where", np.where, booleans(2, 3), 0, normal(3)),
    row("where", np.where, booleans(0, 3), normal(0, 3), normal(3)),
    row("neg", np.negative, normal(2, 3)),
    row("neg", np.negative, normal(0)),
    row("exp", np.exp, normal(2, 3)),
    row("exp", np.exp, normal(0)),
    row("log", np.log, positive(2, 3)),
    row("log", np.log, positive(0)),
    row("expm1", np.expm1, normal(2, 3)),
    row("expm1", np.expm1, normal(0)),
    row("log1p", np.log1p, positive(2, 3)),
    row("log1p", np.log1p, positive(0)),
    row("sqrt", np.sqrt, positive(2, 3)),
    row("sqrt", np.sqrt, positive(0)),
    row("rsqrt", lambda x: x**-0.5, positive(2, 3)),
    row("rsqrt", lambda x: x**-0.5, positive(0)),
    row("sin", np.sin, normal(2, 3)),
    row("sin", np.sin, normal(0)),
    row("cos", np.cos, normal(2, 3)),
    row("cos", np.cos, normal(0)),
    row("sigmoid", plain_logistic, normal(2, 3)),
    row("sigmoid", plain_logistic, normal(0)),
    row("softplus", lambda x: np.log(1 + np.exp(x)), normal(2, 3)),
    row("softplus", lambda x: np.log(1 + np.exp(x)), normal(0)),
    row("silu", lambda x: x * plain_logistic(x), normal(2, 3)),
    row("silu", lambda x: x * plain_logistic(x), normal(0)),
    row("leaky_relu", lambda x: np.where(x > 0, x, 0.01 * x), off_zero(2, 3)),
    row("leaky_relu", lambda x, slope: np.where(x > 0, x, slope * x), off_zero(2, 3), slope=0.2),
    row("leaky_relu", lambda x: x, off_zero(0)),
    row("tanh", np.tanh, normal(2, 3)),
    row("tanh", np.tanh, normal(0)),
    row("relu", lambda x: np.maximum(x, 0), off_zero(2, 3)),
    row("relu", lambda x: np.maximum(x, 0), off_zero(0)),
    row("gelu", plain_gelu, normal(2, 3)),
    row("gelu", plain_gelu, normal()),
    row("gelu", plain_gelu, normal(0, 3)),
    row("gelu", plain_gelu, normal(300, 250)),  # more than one block
    row("gelu", plain_gelu, normal(2, 3), exact=True),
    row("gelu", plain_gelu, normal(), exact=True),
    row("gelu", plain_gelu, normal(300, 250), exact=True),
    row("astype", lambda x, dtype: x.astype(dtype), normal(2, 3), dtype=np.float64),
    row("matmul", np.matmul, normal(2, 3), normal(3, 4)),
    row("matmul", np.matmul, normal(3), normal(3)),
    row("matmul", np.matmul, normal(2, 3), normal(3)),
    row("matmul", np.matmul, normal(3), normal(3, 4)),
    row("matmul", np.matmul, normal(2, 4, 3), normal(3, 2)),
    row("matmul", np.matmul, normal(4, 3), normal(2, 3, 5)),
    row("matmul", np.matmul, normal(2, 1, 4, 3), normal(5, 3, 2)),
    row("matmul", np.matmul, normal(2, 4, 3), normal(2, 3, 5)),
    row("matmul", np.matmul, normal(2, 4, 3), normal(3)),
    row("matmul", np.matmul, normal(3), normal(2, 3, 4)),
    row("matmul", np.matmul, normal(0, 3), normal(3, 4)),
    row("matmul", np.matmul, normal(2, 0), normal(0, 4)),
    row("linear", lambda x, w, b: x @ w + b, normal(4, 3), normal(3, 2), normal(2)),
    row("linear", lambda x, w, b: x @ w + b, normal(2, 4, 3), normal(3, 2), normal(2)),
    row("linear", lambda x, w, b: x @ w + b, normal(3), normal(3, 2), normal(2)),
    row("linear", lambda x, w, b: x @ w + b, normal(0, 3), normal(3, 2), normal(2)),
    row("linear", lambda x, w, b, r: x @ w + b + r, normal(2, 4, 3), normal(3, 2), normal(2), normal(2, 4, 2)),
    row("linear", lambda x, w, b, r: x @ w + b + r, normal(3), normal(3, 2), normal(2), normal(2)),
    row("feed_forward", plain_feed_forward, normal(2, 4, 3), normal(3, 6), normal(6), normal(6, 2), normal(2)),
    row("feed_forward", plain_feed_forward, normal(3), normal(3, 6), normal(6), normal(6, 2), normal(2)),
    row("feed_forward", plain_feed_forward, normal(0, 3), normal(3, 6), normal(6), normal(6, 2), normal(2)),
    row("feed_forward", plain_feed_forward, normal(65, 64), normal(64, 5), normal(5), normal(5, 2), normal(2)),
    row(
        "feed_forward",
        *(plain_feed_forward_beside, normal(2, 3), normal(3, 6), normal(6), normal(6, 2), normal(2), normal(2, 2)),
    ),
    row(
        "feed_forward",
        *(plain_feed_forward, normal(2, 3), normal(3, 6), normal(6), normal(6, 2), normal(2)),
        exact=True,
    ),
    row("outer", np.outer, normal(2), normal(3)),
    row("outer", np.outer, normal(0), normal(3)),
    row("unembed", lambda x, table: x @ table.T, normal(2, 3, 4), normal(5, 4)),
    row("unembed", lambda x, table: x @ table.T, normal(0, 4), normal(5, 4)),
    row("einsum", plain_einsum, normal(2, 3), normal(3, 4), subscripts="ij,jk->ik"),
    row("einsum", plain_einsum, normal(2, 3, 4), normal(2, 5, 4), subscripts="bik,bjk->bij"),
    row("einsum", plain_einsum, normal(2, 3), normal(3, 4), normal(4), subscripts="ij, jk, k -> i"),
    row("einsum", plain_einsum, normal(4, 2), normal(4, 4), subscripts="nd,nn->d"),
    row("einsum", plain_einsum, normal(3, 3), subscripts="ii->"),
    row("einsum", plain_einsum, normal(3, 3, 2), subscripts="iij->ji"),
    row("einsum", plain_einsum, normal(2, 3, 4), subscripts="ijk->kij"),
    row("einsum", plain_einsum, normal(2, 3), subscripts="ij->"),
    row("einsum", plain_einsum, normal(2, 3), normal(4), subscripts="ij,k->j"),
    row("einsum", plain_einsum, normal(0, 3), normal(3, 2), subscripts="ij,jk->ik"),
    row("sum", np.sum, normal(2, 3, 4)),
    row("sum", np.sum, normal(2, 3, 4), axis=1),
    row("sum", np.sum, normal(2, 3, 4), axis=(-1, 0)),
    row("sum", np.sum, normal(2, 3, 4), axis=-2, keepdims=True),
    row("sum", np.sum, normal(0, 3), axis=0),
    row("mean", np.mean, normal(2, 3, 4)),
    row("mean", np.mean, normal(2, 3, 4), axis=(0, 2)),
    row("mean", np.mean, normal(2, 3, 4), axis=-1, keepdims=True),
    row("mean", np.mean, normal(0, 3), axis=1),
    row("max", np.max, normal(2, 3, 4)),
    row("max", np.max, normal(2, 3, 4), axis=(0, -1)),
    row("max", np.max, normal(2, 3, 4), axis=1, keepdims=True),
    row("max", np.max, normal(0, 3), axis=1),
    row("min", np.min, normal(2, 3, 4)),
    row("min", np.min, normal(2, 3, 4), axis=(0, -1)),
    row("min", np.min, normal(2, 3, 4), axis=1, keepdims=True),
    row("min", np.min, normal(0, 3), axis=1),
    row("prod", np.prod, off_zero(2, 3, 2)),
    row("prod", np.prod, off_zero(2, 3, 4), axis=(0, -1)),
    row("prod", np.prod, with_a_zero(2, 3, 2), axis=1, keepdims=True),
    row("prod", np.prod, with_a_zero(2, 3)),
    row("prod", np.prod, normal(0, 3), axis=0),
    row("prod", np.prod, normal(0, 3), axis=1),
    row("var", np.var, normal(2, 3, 4)),
    row("var", np.var, normal(2, 3, 4), axis=(0, -1), ddof=1),
    row("var", np.var, normal(2, 3, 4), axis=1, keepdims=True),
    row("std", np.std, normal(2, 3, 4)),
    row("std", np.std, normal(2, 3, 4), axis=(0, -1), ddof=1),
    row("std", np.std, normal(2, 3, 4), axis=1, keepdims=True),
    row("norm", plain_norm, normal(2, 3, 4)),
    row("norm", plain_norm, normal(2, 3, 4), axis=(0, -1)),
    row("norm", plain_norm, normal(2, 3, 4), axis=1, keepdims=True),
    row("norm", plain_norm, normal(0, 3), axis=0),
    row("logsumexp", plain_logsumexp, normal(2, 3, 4)),
    row("logsumexp", plain_logsumexp, normal(2, 3, 4), axis=(0, -1)),
    row("logsumexp", plain_logsumexp, normal(2, 3, 4), axis=1, keepdims=True),
    row("logsumexp", plain_logsumexp, normal(0, 3), axis=1),
    row("cumsum", np.cumsum, normal(5), axis=0),
    row("cumsum", np.cumsum, normal(2, 3, 4), axis=-2),
    row("cumsum", np.cumsum, normal(0, 3), axis=1),
    row("reshape", lambda x, shape: x.reshape(shape), normal(2, 6), shape=(3, -1)),
    row("reshape", lambda x, shape: x.reshape(shape), normal(0, 3), shape=(3, 0)),
    row("transpose", np.transpose, normal(2, 3, 4)),
    row("transpose", np.transpose, normal(2, 3, 4), axes=(1, 2, 0)),
    row("transpose", np.transpose, normal(2, 3, 4), axes=(-1, 0, 1)),
    row("transpose", np.transpose, normal(0, 3)),
    row("swapaxes", np.swapaxes, normal(2, 3, 4), axis1=0, axis2=-1),
    row("swapaxes", np.swapaxes, normal(0, 3), axis1=0, axis2=1),
    row("moveaxis", np.moveaxis, normal(2, 3, 4), source=0, destination=-1),
    row("moveaxis", np.moveaxis, normal(2, 3, 4, 5), source=(0, 1, 2), destination=(2, 3, 1)),
    row("moveaxis", np.moveaxis, normal(0, 3), source=1, destination=0),
    row("squeeze", np.squeeze, normal(1, 3, 1)),
    row("squeeze", np.squeeze, normal(1, 3, 1), axis=-1),
    row("squeeze", np.squeeze, normal(1, 1, 0), axis=(0, 1)),
    row("expand_dims", np.expand_dims, normal(2, 3), axis=1),
    row("expand_dims", np.expand_dims, normal(2, 3), axis=(0, -1)),
    row("expand_dims", np.expand_dims, normal(0), axis=0),
    row("broadcast_to", np.broadcast_to, normal(3, 1), shape=(2, 3, 4)),
    row("broadcast_to", np.broadcast_to, normal(), shape=(2, 3)),
    row("broadcast_to", np.broadcast_to, normal(1, 3), shape=(0, 3)),
    row("flip", np.flip, normal(2, 3, 4)),
    row("flip", np.flip, normal(2, 3, 4), axis=(0, -1)),
    row("flip", np.flip, normal(0, 3), axis=1),
    row("pad", plain_pad, normal(2, 3), widths=1),
    row("pad", plain_pad, normal(2, 3), widths=((0, 2), (1, 0)), value=1.5),
    row("pad", plain_pad, normal(0, 3), widths=((1, 1), (0, 0))),
    row("stack", lambda *x, axis: np.stack(x, axis), normal(2, 3), normal(2, 3), axis=0),
    row("stack", lambda *x, axis: np.stack(x, axis), normal(2, 3), normal(2, 3), normal(2, 3), axis=-1),
    row("stack", lambda *x, axis: np.stack(x, axis), normal(0, 3), normal(0, 3), axis=1),
    row("concatenate", lambda *x, axis: np.concatenate(x, axis), normal(2, 3), normal(1, 3), normal(0, 3), axis=0),
    row("concatenate", lambda *x, axis: np.concatenate(x, axis), normal(2, 1, 3), normal(2, 1, 2), axis=-1),
    row("getitem", lambda x, index: x[index], normal(4, 3), index=slice(1, 3)),
    row("getitem", lambda x, index: x[index], normal(4, 3), index=(..., None, -1)),
    row("getitem", lambda x, index: x[index], normal(4, 3), index=np.array([0, -4, 2, 0])),
    row("getitem", lambda x, index: x[index], normal(2, 3), index=KEEP),
    row("getitem", lambda x, index: x[index], normal(4, 3), index=slice(2, 2)),
    row("getitem", lambda x, index: x[index], normal(4, 3), index=(slice(None, None, -2), 1)),
    row("getitem", lambda x, index: x[index], normal(4, 3), index=[1, 1, -3]),
    row("getitem", lambda x, index: x[index], normal(4, 3), index=np.array([[0, -4], [2, 0]])),
    row("getitem", lambda x, index: x[index], normal(4, 3), index=(np.array([0, 0, 1]), np.array([2, 2, 1]))),
    row("getitem", lambda x, index: x[index], normal(4, 3), index=(np.array([[1], [1]]), slice(1, None))),
    row("getitem", lambda x, index: x[index], normal(2, 3, 2), index=(KEEP, np.array([0, 1, 1, 0]))),
    row("getitem", lambda x, index: x[index], normal(4, 3), index=np.array([], np.int64)),
    row("getitem", lambda x, index: x[index], normal(4), index=2),
]
