"""The ops, and the table that binds them to Tensor as operators and methods."""

from __future__ import annotations

from typing import Any

from ..tensor import Tensor
from .elementwise import add, astype, div, exp, gelu, log, mul, neg, relu, sub, tanh
from .linalg import linear, matmul
from .loss import cross_entropy, mse
from .nn import causal_attention, dropout, embedding, layer_norm
from .reduce import mean, sum
from .shape import concatenate, getitem, reshape, transpose

__all__ = [
    "add",
    "astype",
    "causal_attention",
    "concatenate",
    "cross_entropy",
    "div",
    "dropout",
    "embedding",
    "exp",
    "gelu",
    "getitem",
    "layer_norm",
    "linear",
    "log",
    "matmul",
    "mean",
    "mse",
    "mul",
    "neg",
    "relu",
    "reshape",
    "sub",
    "sum",
    "tanh",
    "transpose",
]

_BOUND: dict[str, Any] = {
    "__add__": add,
    "__radd__": lambda self, other: add(other, self),
    "__sub__": sub,
    "__rsub__": lambda self, other: sub(other, self),
    "__mul__": mul,
    "__rmul__": lambda self, other: mul(other, self),
    "__truediv__": div,
    "__rtruediv__": lambda self, other: div(other, self),
    "__neg__": neg,
    "__matmul__": matmul,
    "__rmatmul__": lambda self, other: matmul(other, self),
    "__getitem__": lambda self, index: getitem(self, index=index),
    "sum": sum,
    "mean": mean,
    "reshape": lambda self, *shape: reshape(self, shape=shape),
    "transpose": lambda self, *axes: transpose(self, axes=axes or None),
    "astype": lambda self, dtype: astype(self, dtype=dtype),
    "T": property(lambda self: transpose(self)),
}

for _name, _function in _BOUND.items():
    setattr(Tensor, _name, _function)
