"""Gradients of plain functions: from arrays to arrays, without leaves or `.grad`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from minigrad.arguments import as_int
from minigrad.autodiff.backprop import backward
from minigrad.autodiff.mode import enable_grad
from minigrad.backend import Array, xp_of
from minigrad.tensor import Tensor


def value_and_grad(
    function: Callable[..., Tensor], *, argnums: int | tuple[int, ...] = 0
) -> Callable[..., tuple[Array, Any]]:
    """Return a function that gives a function's value and its gradients.

    The gradients are by some of its arguments.

        value, grad = value_and_grad(lambda w: mg.sum(w * w))(np.array([1.0, 2.0]))    # 5.0, [2.0, 4.0]

    Args:
        function: from tensors (and anything else) to a scalar Tensor. Parameters that it captures get their
            gradients too, in `.grad`.
        argnums: position, or positions, of the arguments to differentiate: floating point arrays.
    Returns:
        Takes what `function` takes, arrays in those places; gives the value, 0-d, and one gradient, or a tuple of them.
        An argument that the value does not depend on has a gradient of zeros.
    Raises:
        ValueError: the value is not a scalar, or there is no such argument.
    """
    one = as_int(argnums)
    wanted: tuple[int, ...] = tuple(argnums) if one is None else (one,)  # type: ignore[arg-type]

    @functools.wraps(function)
    def both(*args: Any, **kwargs: Any) -> tuple[Array, Any]:
        if any(not -len(args) <= i < len(args) for i in wanted):
            raise ValueError(f"value_and_grad: argnums must be places of arguments, got {argnums} for {len(args)}")
        inputs = list(args)
        for i in wanted:
            inputs[i] = Tensor(args[i].data if isinstance(args[i], Tensor) else args[i], requires_grad=True)
        with enable_grad():
            value = function(*inputs, **kwargs)
        if value.requires_grad:
            backward(value)
        elif value.ndim:
            raise ValueError(f"value_and_grad needs a scalar value, got shape {value.shape}")
        leaves = [inputs[i] for i in wanted]
        grads = tuple(xp_of(leaf.data).zeros_like(leaf.data) if leaf.grad is None else leaf.grad for leaf in leaves)
        return value.data, grads if one is None else grads[0]

    return both
