"""What the references of several families share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from minigrad.backend import Array, is_half

BLOCK = 1 << 16  # elements: a chain of ufuncs stays in the cache from here on; smaller blocks cost calls
# Of causal attention whole, on a CPU. Queries of a block: with fewer, products are slow; with more, more of them is cut
# off. And of a head up to which all its weights are kept for the backward, which else computes them again.
QUERIES, KEPT_QUERIES = 32, 64


def half_in_float32(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Let a kernel whose arrays are all of one half dtype compute in float32."""

    @functools.wraps(kernel)
    def wide(*args: Any) -> Any:
        dtype = args[0].dtype
        if not is_half(dtype):
            return kernel(*args)
        result = kernel(*[x.astype(np.float32) if getattr(x, "dtype", None) == dtype else x for x in args])
        return tuple([x.astype(dtype) for x in result]) if isinstance(result, tuple) else result.astype(dtype)

    return wide


def put(c: Array, out: Array, add: bool) -> Array:
    """Write c into `out`, or add it: the end of a gradient of weights, for example."""
    if add and out.dtype == c.dtype:
        out += c
    else:
        out[...] = out + c if add else c
    return out
