"""What each op is called in PyTorch: op name -> a function that takes the arguments of the op table, as torch tensors.

Rows of the op table need no change: the same samples go to both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # the name that everybody gives it


def as_torch(x: Any) -> Any:
    """Return arrays as tensors, and numbers as 0-d ones; leave tensors alone."""
    return x if isinstance(x, Tensor) else torch.as_tensor(x)


def causal_attention(qkv: Tensor, *, num_heads: int) -> Tensor:
    batch, time, width3 = qkv.shape
    parts = qkv.reshape(batch, time, 3, num_heads, width3 // (3 * num_heads))
    q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(batch, time, width3 // 3)


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Any = None) -> Tensor:
    if mask is not None and causal:  # PyTorch takes one of them
        mask, causal = np.tri(q.shape[-2], k.shape[-2], dtype=bool) & mask, False
    return F.scaled_dot_product_attention(q, k, v, None if mask is None else as_torch(mask), is_causal=causal)


def cross_entropy(logits: Tensor, targets: Tensor, *, ignore_index: int | None = None, **kwargs: Any) -> Tensor:
    ignored = -100 if ignore_index is None else ignore_index
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=ignored, **kwargs)


def reduction(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function with NumPy's names, over all axes by default."""

    def call(x: Tensor, *, axis: Any = None, keepdims: bool = False, ddof: int | None = None) -> Tensor:
        axes = tuple(range(x.ndim)) if axis is None else axis
        correction = {} if ddof is None else {"correction": ddof}
        return function(x, dim=axes, keepdim=keepdims, **correction)

    return call


def spread(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a variance whose correction is 0 by default, as NumPy's is."""
    return lambda x, ddof=0, **kwargs: reduction(function)(x, ddof=ddof, **kwargs)


def prod(x: Tensor, *, dim: Any, keepdim: bool) -> Tensor:
    axes = sorted((axis % x.ndim for axis in (dim if isinstance(dim, tuple) else (dim,))), reverse=True)
    for axis in axes:  # the last one first, so that the others keep their place
        x = x.prod(axis, keepdim=keepdim)
    return x


def getitem(x: Tensor, *, index: Any) -> Tensor:
    places = np.arange(x.numel()).reshape(x.shape)[index]  # by place, as PyTorch has no negative steps
    return x.flatten()[torch.from_numpy(np.array(places))]


def expand_dims(x: Tensor, *, axis: Any) -> Tensor:
    axes = axis if isinstance(axis, tuple) else (axis,)
    for place in sorted(a % (x.ndim + len(axes)) for a in axes):
        x = x.unsqueeze(place)
    return x


def pad(x: Tensor, *, widths: Any, value: float = 0.0) -> Tensor:
    pairs = np.broadcast_to(widths, (x.ndim, 2))[::-1]  # PyTorch begins with the last axis
    return F.pad(x, pairs.ravel().tolist(), value=value)


COUNTERPARTS: dict[str, Callable[..., Tensor]] = {
    "abs": torch.abs,
    "add": torch.add,
    "astype": lambda x, dtype: x.to(torch.from_numpy(np.empty(0, dtype)).dtype),
    "avg_pool2d": lambda x, size, stride=None: F.avg_pool2d(x, size, stride),
    "batch_norm": lambda x, gain, bias, eps=1e-5: F.batch_norm(x, None, None, gain, bias, training=True, eps=eps),
    "binary_cross_entropy_with_logits": lambda x, t: F.binary_cross_entropy_with_logits(x, t.to(x.dtype)),
    "broadcast_to": lambda x, shape: torch.broadcast_to(x, shape),
    "causal_attention": causal_attention,
    "clip": lambda x, low=None, high=None: torch.clamp(x, low, high),
    "concatenate": lambda *arrays, axis: torch.cat(arrays, dim=axis),
    "conv2d": F.conv2d,
    "cos": torch.cos,
    "cross_entropy": cross_entropy,
    "cumsum": lambda x, axis: torch.cumsum(x, axis),
    "div": torch.div,
    "add_dropout": lambda x, y, keep, rate: x + y * as_torch(keep) / (1 - rate),
    "dropout": lambda x, keep, rate: x * as_torch(keep) / (1 - rate),
    "einsum": lambda *arrays, subscripts: torch.einsum(subscripts, *arrays),
    "embedding": lambda table, ids: F.embedding(ids, table),
    "exp": torch.exp,
    "expand_dims": expand_dims,
    "expm1": torch.expm1,
    "flip": lambda x, axis=None: torch.flip(x, tuple(range(x.ndim)) if axis is None else np.atleast_1d(axis).tolist()),
    "feed_forward": lambda x, w1, b1, w2, b2, beside=0, exact=False: (
        beside + F.linear(F.gelu(F.linear(x, w1.T, b1), approximate="none" if exact else "tanh"), w2.T, b2)
    ),
    "gelu": lambda x, exact=False: F.gelu(x, approximate="none" if exact else "tanh"),
    "getitem": getitem,
    "layer_norm": lambda x, gain, bias, eps=1e-5: F.layer_norm(x, gain.shape, gain, bias, eps),
    "leaky_relu": lambda x, slope=0.01: F.leaky_relu(x, slope),
    "linear": lambda x, w, b, beside=0: beside + F.linear(x, w.T, b),
    "log": torch.log,
    "log1p": torch.log1p,
    "log_softmax": lambda x, axis=-1: F.log_softmax(x, axis),
    "logsumexp": reduction(torch.logsumexp),
    "matmul": torch.matmul,
    "max": reduction(torch.amax),
    "max_pool2d": lambda x, size, stride=None: F.max_pool2d(x, size, stride),
    "maximum": lambda a, b: torch.maximum(as_torch(a), as_torch(b)),
    "mean": reduction(torch.mean),
    "min": reduction(torch.amin),
    "minimum": lambda a, b: torch.minimum(as_torch(a), as_torch(b)),
    "moveaxis": lambda x, source, destination: torch.moveaxis(x, source, destination),
    "mse": F.mse_loss,
    "mul": torch.mul,
    "neg": torch.neg,
    "norm": reduction(lambda x, **kwargs: torch.linalg.vector_norm(x, **kwargs)),
    "outer": torch.outer,
    "pad": pad,
    "pow": torch.pow,
    "prod": reduction(prod),
    "relu": torch.relu,
    "reshape": lambda x, shape: x.reshape(shape),
    "rms_norm": lambda x, gain, eps=1e-5: F.rms_norm(x, gain.shape, gain, eps),
    "rsqrt": torch.rsqrt,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "sin": torch.sin,
    "softmax": lambda x, axis=-1: F.softmax(x, axis),
    "softplus": F.softplus,
    "sqrt": torch.sqrt,
    "squeeze": lambda x, axis=None: torch.squeeze(x) if axis is None else torch.squeeze(x, axis),
    "stack": lambda *arrays, axis: torch.stack(arrays, axis),
    "std": spread(torch.std),
    "sub": torch.sub,
    "sum": reduction(torch.sum),
    "swapaxes": lambda x, axis1, axis2: torch.swapaxes(x, axis1, axis2),
    "tanh": torch.tanh,
    "unembed": lambda x, table: x @ table.T,
    "transpose": lambda x, axes=None: x.permute(tuple(reversed(range(x.ndim))) if axes is None else axes),
    "var": spread(torch.var),
    "where": torch.where,
}
WITHOUT: dict[str, str] = {}  # ops that PyTorch lacks: name -> why
