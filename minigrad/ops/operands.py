"""What operands do when they meet: broadcasting and dtypes, and how gradients find their way back from both.

Shapes broadcast and floating dtypes promote as in NumPy. Two things differ: an integer array beside a floating one
takes its dtype, where NumPy would widen float32 to float64, and half precision is added up in float32.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minigrad.arguments import as_int
from minigrad.autodiff.vjps import Vjp
from minigrad.backend import Array, is_half, xp_of
from minigrad.kernels import kernels_of

Axis = int | tuple[int, ...] | None
_FLOAT64 = np.dtype(np.float64)


def pair(name: str, a: Any, b: Any) -> tuple[Any, Any]:
    """Return the operands of an elementwise op, arrays or Python numbers, ready to meet.

    Raises:
        ValueError: the shapes do not broadcast.
    """
    dtype_a, dtype_b = getattr(a, "dtype", None), getattr(b, "dtype", None)
    if dtype_a is not dtype_b:
        if dtype_a is None:
            return _beside(b, a), b
        if dtype_b is None:
            return a, _beside(a, b)
        a, b = in_floating_dtype(a, b)
    elif dtype_a is None:
        return np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        check_broadcast(name, a, b)
    return a, b


def _beside(array: Array, number: Any) -> Any:
    """Return a number as NumPy should see it beside `array`: bfloat16 times a Python float would be float32."""
    return xp_of(array).asarray(number, array.dtype) if array.dtype.kind == "V" else number


def in_floating_dtype(*arrays: Array) -> list[Array]:
    """Return the arrays, those of integers or booleans in the dtype of the floating ones, if there are any."""
    floating = [x.dtype for x in arrays if x.dtype.kind not in "iub"]
    if not floating or len(floating) == len(arrays):
        return list(arrays)
    return _all_floating(arrays, np.result_type(*floating))


def _all_floating(arrays: Sequence[Array], dtype: np.dtype[Any]) -> list[Array]:
    """Return the arrays, those of integers or booleans in `dtype`."""
    return [x.astype(dtype) if x.dtype.kind in "iub" else x for x in arrays]


def _is_of_integers(x: Any) -> bool:
    """Return whether an array is of integers or booleans; a number has no dtype, and its op says what is wrong."""
    return getattr(x, "dtype", _FLOAT64).kind in "iub"


def check_broadcast(name: str, a: Array, b: Array) -> None:
    """Raise a ValueError unless the shapes broadcast."""
    if not all(m == n or m == 1 or n == 1 for m, n in zip(reversed(a.shape), reversed(b.shape), strict=False)):
        raise ValueError(f"{name}: shapes must be equal or broadcast, got {a.shape} and {b.shape}")


def given_beside(name: str, beside: Array | None, shape: tuple[int, ...]) -> list[Array]:
    """Return what an op adds to its result of this shape: one array, or none.

    Raises:
        ValueError: it has another shape.
    """
    if beside is None:
        return []
    if beside.shape != shape:
        raise ValueError(f"{name}: what is added must have the shape of the result, {shape}, got {beside.shape}")
    return [beside]


def pass_on(g: Array) -> Array:
    """Return a cotangent as it is: the vjp of what was added."""
    return g


def fit(a: Any, b: Any, y: Array, vjp_a: Vjp, vjp_b: Vjp) -> tuple[Vjp, Vjp]:
    """Return the vjps of two operands, made to end in the operand's own form.

    That is a sum over the axes along which it was broadcast, and a cast to its dtype: nothing at all where shape and
    dtype are those of the output y, as nearly always, and for a number, whose gradient nobody wants.
    """
    shape, dtype = y.shape, y.dtype
    if getattr(a, "dtype", dtype) is not dtype or getattr(a, "shape", shape) != shape:
        vjp_a = fit_one(a, vjp_a)
    if getattr(b, "dtype", dtype) is not dtype or getattr(b, "shape", shape) != shape:
        vjp_b = fit_one(b, vjp_b)
    return vjp_a, vjp_b


def broadcasting(function: Callable[[Array, Array], tuple[Array, tuple[Vjp, Vjp]]]) -> Callable[..., Any]:
    """Let an op's function of two equal shapes and dtypes take whatever operands broadcast: `pair`, then `fit`."""
    name = function.__name__

    @functools.wraps(function)
    def meeting(a: Any, b: Any) -> tuple[Array, tuple[Vjp, Vjp]]:
        if type(a) is type(b) is np.ndarray and a.dtype is b.dtype and a.shape == b.shape:
            return function(a, b)  # nothing to bring together or back
        a, b = pair(name, a, b)
        y, (vjp_a, vjp_b) = function(a, b)
        return y, fit(a, b, y, vjp_a, vjp_b)

    return meeting


def fit_one(x: Array, vjp: Vjp) -> Vjp:
    """Return `vjp`, followed by what brings a gradient to the shape and dtype of x."""
    shape, dtype = x.shape, x.dtype
    return lambda g: unbroadcast(vjp(g), shape).astype(dtype, copy=False)


def unbroadcast(g: Array, shape: tuple[int, ...]) -> Array:
    """Sum a gradient over the axes along which an operand of this shape was broadcast."""
    if g.shape == shape:
        return g
    extra = g.ndim - len(shape)
    stretched = tuple(extra + i for i, n in enumerate(shape) if n == 1 and g.shape[extra + i] != 1)
    if extra and not stretched:
        return kernels_of(g).sum_leading(g, extra).reshape(shape)
    return add_up(g, axis=(*range(extra), *stretched)).reshape(shape)


def add_up(x: Array, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """Sum as NumPy does, but half precision in float32: in float16 a sum of ones stops at 2048."""
    if is_half(x.dtype):
        return x.sum(axis=axis, keepdims=keepdims, dtype=np.float32).astype(x.dtype)
    return x.sum(axis=axis, keepdims=keepdims)


def as_rows(x: Array) -> Array:
    """Return x as one matrix: all axes but the last become one."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def product(a: Array, b: Array) -> Array:
    """Multiply matrices, or stacks of them."""
    return kernels_of(a, b).product(a, b)


def select(condition: Array, a: Any, b: Any, dtype: np.dtype[Any]) -> Array:
    """Take a where the condition holds, else b, in this dtype: CuPy's `where` makes float32 of bfloat16."""
    return xp_of(condition).where(condition, a, b).astype(dtype, copy=False)


def in_floats(function: Callable[..., tuple[Array, Any]]) -> Callable[..., tuple[Array, Any]]:
    """Let an op's function have integers and booleans in the floating dtype of its other arrays, or in float64.

    It is for functions whose result is no integer: in the dtype of their input it would be cut to one.
    """

    @functools.wraps(function)
    def floating(*arrays: Array, **kwargs: Any) -> tuple[Array, Any]:
        if any(map(_is_of_integers, arrays)):
            arrays = tuple(_all_floating(in_floating_dtype(*arrays), _FLOAT64))
        return function(*arrays, **kwargs)

    return floating


def half_in_float32(function: Callable[..., tuple[Array, Any]]) -> Callable[..., tuple[Array, Any]]:
    """Let an op's function compute in float32, forward and backward, where its arrays are of one half dtype.

    Those of integers or booleans come in the dtype of the floating ones.
    """

    @functools.wraps(function)
    def wide(*arrays: Array, **kwargs: Any) -> tuple[Array, Any]:
        if len(arrays) > 1 and any(map(_is_of_integers, arrays)):
            arrays = tuple(in_floating_dtype(*arrays))
        dtype = arrays[0].dtype
        if not is_half(dtype) or any(x.dtype != dtype for x in arrays):
            return function(*arrays, **kwargs)
        y, vjps = function(*[x.astype(np.float32) for x in arrays], **kwargs)
        return y.astype(dtype), tuple([_narrow(vjp, dtype) for vjp in vjps])

    return wide


def _narrow(vjp: Vjp, dtype: np.dtype[Any]) -> Vjp:
    return lambda g: vjp(g.astype(np.float32)).astype(dtype)


def axes_of(name: str, x: Array, axis: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the axes that `axis` means, counted from the front; None means all of them.

    Raises:
        ValueError: one does not exist, or comes twice.
        TypeError: one is no integer.
    """
    if axis is None:
        return tuple(range(x.ndim))
    one = as_int(axis)
    try:
        given = tuple([operator.index(i) for i in axis]) if one is None else (one,)  # type: ignore[union-attr]
    except TypeError:
        raise TypeError(f"{name}: an axis must be an integer, or several, got {axis!r}") from None
    axes = tuple([i + x.ndim if i < 0 else i for i in given])
    if not all(0 <= i < x.ndim for i in axes) or len(set(axes)) < len(axes):
        raise ValueError(f"{name}: axes must be distinct and exist, got {axis} for shape {x.shape}")
    return axes
