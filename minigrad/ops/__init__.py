"""The ops. `operators.py` binds them to Tensor."""

from __future__ import annotations

from minigrad import habits
from minigrad.ops import operators  # noqa: F401  # importing it binds the ops to Tensor
from minigrad.ops.activation import gelu, leaky_relu, relu, sigmoid, silu, softplus
from minigrad.ops.attention import causal_attention, scaled_dot_product_attention
from minigrad.ops.batch import batch_norm
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
from minigrad.ops.feed_forward_op import feed_forward
from minigrad.ops.indexing import getitem
from minigrad.ops.linalg import linear, matmul, outer, unembed
from minigrad.ops.loss import binary_cross_entropy_with_logits, cross_entropy, mse
from minigrad.ops.nn import add_dropout, dropout, embedding, layer_norm, log_softmax, rms_norm, softmax
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
    "add_dropout",
    "astype",
    "avg_pool2d",
    "batch_norm",
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
    "feed_forward",
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

habits.teach(Tensor, habits.TENSOR | {name: f"minigrad.{name}(x)" for name in __all__ if name not in habits.TENSOR})
