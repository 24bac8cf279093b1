"""The ops, and the table that binds them to Tensor as operators and methods."""

from __future__ import annotations

from typing import Any

from minigrad.arguments import as_int
from minigrad.ops.activation import gelu, leaky_relu, relu, sigmoid, silu, softplus
from minigrad.ops.attention import causal_attention, scaled_dot_product_attention
from minigrad.ops.conv import avg_pool2d, conv2d, max_pool2d
from minigrad.ops.einsum_op import einsum
from minigrad.ops.elementwise import (
    abs,
    add,
    astype,
    cos,
    div,
    exp,
    expm1,
    log,
    log1p,
    mul,
    neg,
    pow,
    rsqrt,
    sin,
    sqrt,
    sub,
    tanh,
)
from minigrad.ops.indexing import getitem, split
from minigrad.ops.linalg import linear, matmul, outer, unembed
from minigrad.ops.loss import binary_cross_entropy_with_logits, cross_entropy, mse
from minigrad.ops.nn import dropout, embedding, layer_norm, log_softmax, rms_norm, softmax
from minigrad.ops.reduce import cumsum, logsumexp, max, mean, min, norm, prod, std, sum, var
from minigrad.ops.selection import clip, maximum, minimum, where
from minigrad.ops.shape import (
    broadcast_to,
    concatenate,
    expand_dims,
    flip,
    moveaxis,
    pad,
    reshape,
    squeeze,
    stack,
    swapaxes,
    transpose,
)
from minigrad.tensor import Tensor

__all__ = [
    "abs",
    "add",
    "astype",
    "avg_pool2d",
    "binary_cross_entropy_with_logits",
    "broadcast_to",
    "causal_attention",
    "clip",
    "concatenate",
    "conv2d",
    "cos",
    "cross_entropy",
    "cumsum",
    "div",
    "dropout",
    "einsum",
    "embedding",
    "exp",
    "expand_dims",
    "expm1",
    "flip",
    "gelu",
    "getitem",
    "layer_norm",
    "leaky_relu",
    "linear",
    "log",
    "log1p",
    "log_softmax",
    "logsumexp",
    "matmul",
    "max",
    "max_pool2d",
    "maximum",
    "mean",
    "min",
    "minimum",
    "moveaxis",
    "mse",
    "mul",
    "neg",
    "norm",
    "outer",
    "pad",
    "pow",
    "prod",
    "relu",
    "reshape",
    "rms_norm",
    "rsqrt",
    "scaled_dot_product_attention",
    "sigmoid",
    "silu",
    "sin",
    "softmax",
    "softplus",
    "sqrt",
    "squeeze",
    "stack",
    "std",
    "sub",
    "sum",
    "swapaxes",
    "tanh",
    "transpose",
    "unembed",
    "var",
    "where",
]


def _one_or_many(numbers: tuple[Any, ...]) -> Any:
    """Let a method take `(2, 3)` and `((2, 3))` alike, as NumPy's do."""
    return numbers[0] if len(numbers) == 1 and as_int(numbers[0]) is None else numbers


def _plain(x: Any) -> Any:
    return x.data if isinstance(x, Tensor) else x


# Comparisons have no gradient and give plain arrays of booleans. There is no ==: tensors are keys of dicts and sets.
_BOUND: dict[str, Any] = {
    "__add__": add,
    "__radd__": lambda self, other: add(other, self),
    "__sub__": sub,
    "__rsub__": lambda self, other: sub(other, self),
    "__mul__": mul,
    "__rmul__": lambda self, other: mul(other, self),
    "__truediv__": div,
    "__rtruediv__": lambda self, other: div(other, self),
    "__pow__": pow,
    "__rpow__": lambda self, other: pow(other, self),
    "__matmul__": matmul,
    "__rmatmul__": lambda self, other: matmul(other, self),
    "__neg__": neg,
    "__abs__": abs,
    "__lt__": lambda self, other: self.data < _plain(other),
    "__le__": lambda self, other: self.data <= _plain(other),
    "__gt__": lambda self, other: self.data > _plain(other),
    "__ge__": lambda self, other: self.data >= _plain(other),
    "__getitem__": lambda self, index: getitem(self, index=index),
    "sum": sum,
    "mean": mean,
    "max": max,
    "min": min,
    "prod": prod,
    "var": var,
    "std": std,
    "cumsum": cumsum,
    "clip": clip,
    "split": split,
    "squeeze": squeeze,
    "swapaxes": lambda self, axis1, axis2: swapaxes(self, axis1=axis1, axis2=axis2),
    "reshape": lambda self, *shape: reshape(self, shape=_one_or_many(shape)),
    "transpose": lambda self, *axes: transpose(self, axes=_one_or_many(axes) if axes else None),
    "astype": lambda self, dtype: astype(self, dtype=dtype),
    "T": property(lambda self: transpose(self)),
}

for _name, _function in _BOUND.items():
    setattr(Tensor, _name, _function)
