"""What Tensor can do by itself: operators, methods, and errors where Python or NumPy would mean something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minigrad import habits
from minigrad.arguments import as_int
from minigrad.autodiff.mode import is_recording
from minigrad.ops.elementwise import abs, add, astype, div, mul, neg, pow, sub
from minigrad.ops.indexing import getitem, split
from minigrad.ops.linalg import matmul
from minigrad.ops.reduce import cumsum, max, mean, min, prod, std, sum, var
from minigrad.ops.selection import clip
from minigrad.ops.shape import reshape, squeeze, swapaxes, transpose
from minigrad.tensor import Tensor


def _one_or_many(numbers: tuple[Any, ...]) -> Any:
    """Let a method take `(2, 3)` and `((2, 3))` alike, as NumPy's do."""
    return numbers[0] if len(numbers) == 1 and as_int(numbers[0]) is None else numbers


def _plain(x: Any) -> Any:
    return x.data if isinstance(x, Tensor) else x


def _in_place(function: Callable[[Any, Any], Tensor]) -> Callable[[Tensor, Any], Tensor]:
    """Make `x += y` of an op: it changes a leaf's values in place, and gives any other name a new tensor."""

    def change(self: Tensor, other: Any) -> Tensor:
        if not (self.keeps_values or (self.requires_grad and self.node is None)):
            return function(self, other)
        if self.requires_grad and is_recording():
            raise RuntimeError(
                f"{self.label} is a leaf, which += and the like change in place; no tape can record that: do it "
                "within minigrad.no_grad(), or write y = x + ... for a new tensor"
            )
        self.data = function(self.data, _plain(other)).data
        return self

    return change


def _equal(self: Tensor, other: object) -> Any:
    """Tell whether two tensors are the same object: they are keys of dicts and sets."""
    if isinstance(other, (int, float, complex, list, tuple)) or (
        hasattr(other, "dtype") and not isinstance(other, Tensor)
    ):
        raise TypeError("== of tensors is identity; to compare values take x.data == y, or (x.data == y).all()")
    return True if self is other else NotImplemented


def _transpose(self: Tensor, *axes: Any) -> Tensor:
    numbers = [as_int(axis) for axis in axes]
    if self.ndim == 2 and numbers in ([0, 1], [-2, -1], [0, -1], [-2, 1]):
        raise ValueError(
            f"transpose{axes} of a matrix changes nothing as an order of axes (NumPy), and swaps them as two axes "
            f"(PyTorch): write x.T or x.swapaxes{axes} to swap, x.transpose([0, 1]) for the order"
        )
    return transpose(self, axes=_one_or_many(axes) if axes else None)


# NumPy's arithmetic, of which it does not tell whether an operator or its name was written: `array + x`, `np.add`.
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": add,
    "subtract": sub,
    "multiply": mul,
    "divide": div,
    "power": pow,
    "matmul": matmul,
    "less": lambda a, b: _plain(a) < _plain(b),
    "less_equal": lambda a, b: _plain(a) <= _plain(b),
    "greater": lambda a, b: _plain(a) > _plain(b),
    "greater_equal": lambda a, b: _plain(a) >= _plain(b),
}


def _elementwise(self: Tensor, function: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Answer a NumPy array that meets a tensor, and NumPy's functions of single numbers."""
    name = function.__name__
    if method != "__call__":  # np.add.reduce and the like
        raise TypeError(f"numpy.{name}.{method} of a Tensor would lose its gradient: use minigrad's ops")
    if kwargs.get("out") is not None:
        raise TypeError(f"an array cannot take a Tensor in place (numpy.{name}): write a = a + x, or a += x.data")
    if name in ("equal", "not_equal"):
        return _equal(self, args[args[0] is self])
    if name in _ARITHMETIC and not kwargs:
        return _ARITHMETIC[name](*args)
    return _refuse_numpy(self, function, (), args, kwargs)


def _refuse_numpy(self: Tensor, function: Any, types: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Answer NumPy, which asks before its function looks at a tensor."""
    name = function.__name__
    if name in ("shape", "ndim", "size") and len(args) == 1 and not kwargs:
        return getattr(self, name)
    from minigrad import ops  # it imports this file

    known = name in ops.__all__
    advice = f"minigrad.{name}" if known else f"x.{name}" if name in _BOUND else "x.data where no gradient is meant"
    raise TypeError(f"numpy.{name} of a Tensor would lose its gradient: use {habits.NUMPY.get(name, advice)}")


# Comparisons have no gradient and give plain arrays of booleans.
_BOUND: dict[str, Any] = {
    "__add__": add,
    "__radd__": lambda self, other: add(other, self),
    "__iadd__": _in_place(add),
    "__sub__": sub,
    "__rsub__": lambda self, other: sub(other, self),
    "__isub__": _in_place(sub),
    "__mul__": mul,
    "__rmul__": lambda self, other: mul(other, self),
    "__imul__": _in_place(mul),
    "__truediv__": div,
    "__rtruediv__": lambda self, other: div(other, self),
    "__itruediv__": _in_place(div),
    "__pow__": pow,
    "__rpow__": lambda self, other: pow(other, self),
    "__ipow__": _in_place(pow),
    "__matmul__": matmul,
    "__rmatmul__": lambda self, other: matmul(other, self),
    "__imatmul__": _in_place(matmul),
    "__neg__": neg,
    "__abs__": abs,
    "__eq__": _equal,
    "__hash__": object.__hash__,
    "__lt__": lambda self, other: self.data < _plain(other),
    "__le__": lambda self, other: self.data <= _plain(other),
    "__gt__": lambda self, other: self.data > _plain(other),
    "__ge__": lambda self, other: self.data >= _plain(other),
    "__getitem__": lambda self, index: getitem(self, index=index),
    "__array_function__": _refuse_numpy,
    "__array_ufunc__": _elementwise,
    "__bool__": lambda self: bool(self.data),  # NumPy's rule: of one element, else an error
    "__float__": lambda self: float(self.item()),
    "__int__": lambda self: int(self.item()),
    "__format__": lambda self, spec: format(self.data, spec) if spec else str(self),  # NumPy's rule: of a 0-d one
    "__dir__": habits.own_names,
    "__iter__": lambda self: (self[i] for i in range(len(self))),
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
    "swapaxes": swapaxes,
    "astype": astype,
    "reshape": lambda self, *shape: reshape(self, shape=_one_or_many(shape)),
    "transpose": _transpose,
    "T": property(lambda self: transpose(self)),
}

for _name, _function in _BOUND.items():
    setattr(Tensor, _name, _function)
