"""Check a gradient against finite differences, in one random direction.

For y = f(x) with Jacobian J, a random direction u and a random cotangent v, the number <v, J u> comes from central
differences of f and the number <J^T v, u> from the tape. They agree for random u and v only if J^T is right,
and the cost does not grow with the size of x. In float64, since differences cancel half of the digits.
Source: the idea of HIPS/autograd's and JAX's checkers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minigrad.autodiff.backprop import backward_with_grad
from minigrad.backend import Array, xp_of
from minigrad.tensor import Tensor


def check_vjp(
    function: Callable[..., Tensor], *args: Any, tolerance: float = 1e-6, seed: int = 0, **kwargs: Any
) -> None:
    """Compare the gradient of `function(*args, **kwargs)` with central differences.

    Args:
        function: from arrays to a Tensor; an op or any composition.
        args: float64 arrays are differentiated, other arguments are passed on.
        tolerance: of the relative difference.
        seed: of the random directions.
    Raises:
        AssertionError: they differ; names the function, the argument and both numbers.
        TypeError: no argument is a float64 array, or one has another floating point dtype.
    """
    arrays = [
        getattr(x, "dtype", None) is not None and x.dtype.kind == "f" and not isinstance(x, np.generic) for x in args
    ]
    floats = [x for x, is_array in zip(args, arrays, strict=True) if is_array]
    if not floats or any(x.dtype != np.float64 for x in floats):
        given = ", ".join(str(getattr(x, "dtype", type(x).__name__)) for x in args) or "no arguments"
        raise TypeError(f"check_vjp differentiates float64 arrays, and needs at least one, got {given}")
    xp = xp_of(floats[0])
    generator = np.random.default_rng(seed)

    def random(like: Any) -> Array:
        return xp.asarray(generator.standard_normal(like.shape), like.dtype)

    tensors = [Tensor(x, requires_grad=True) if is_array else x for x, is_array in zip(args, arrays, strict=True)]
    y = function(*tensors, **kwargs)
    cotangent = random(y)
    backward_with_grad(y, cotangent)

    def along(i: int, direction: Array, distance: float) -> float:
        moved = [Tensor(x.data + distance * direction) if j == i else x for j, x in enumerate(tensors)]
        return float(xp.vdot(cotangent, function(*moved, **kwargs).data))

    name = getattr(function, "__name__", repr(function))
    for i, x in enumerate(tensors):
        if not arrays[i]:
            continue
        direction = random(x)
        step = 1e-6 * max(1.0, float(xp.abs(x.data).max()) if x.size else 0.0)
        numeric = (along(i, direction, step) - along(i, direction, -step)) / (2 * step)
        terms = direction * (0 if x.grad is None else x.grad)
        analytic = float(terms.sum())
        # Both numbers are sums over x: measured against the size of their terms, or a cancelled sum would fail.
        size = float(xp.sqrt(xp.square(terms).sum())) + 1e-3
        if not abs(analytic - numeric) <= tolerance * max(size, abs(numeric)):
            raise AssertionError(
                f"{name}: the gradient of argument {i} is wrong: vjp {analytic:.9g}, finite differences {numeric:.9g}"
            )
