"""Tensor: an array with a place on the tape.

A tensor knows its data, its grad (leaves only) and the node that made it. What is done with them is the tape's
business. `parameter.py` has the leaf that a module owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from minigrad.arguments import as_array
from minigrad.backend import Array, xp_of
from minigrad.versions import Version

if TYPE_CHECKING:
    from minigrad.autodiff.tape import Node


class Tensor:
    """An array on the tape.

    Args:
        data: array or nested list; floating point if it requires grad. Not copied.
        requires_grad: whether backward stores this leaf's gradient in `.grad`.
    Raises:
        TypeError: the data is a Tensor, or of a dtype with which nothing here computes, or of integers and requires a
            gradient.
    """

    __slots__ = ("__weakref__", "_data", "_fresh", "_grad", "_version", "node", "requires_grad", "weight_side")
    keeps_values = False  # whether it stands for memory that stays, so that `x += y` changes it in place

    def __init__(self, data: Any, *, requires_grad: bool = False) -> None:
        if isinstance(data, Tensor):
            raise TypeError("Tensor(tensor): the data must be an array; use tensor.detach() to leave the tape")
        array = as_array(data)
        if requires_grad and array.dtype.kind in "iub":
            raise TypeError(f"only floating point tensors can require grad, got dtype {array.dtype}")
        self._data: Array = array
        self._grad: Array | None = None
        self._fresh = True  # no gradient yet: the first contribution overwrites whatever `_grad` holds
        self._version: Version | None = Version()
        self.node: Node | None = None
        self.requires_grad = requires_grad
        # Does this value depend on parameters alone (True), on data (False), or on neither (None)?
        self.weight_side: bool | None = False

    # -- values ---------------------------------------------------------------------------

    @property
    def data(self) -> Array:
        """The values. Assigning copies in: shape must match, the dtype is kept.

        Values may be rounded, not cut.
        """
        return self._data

    @data.setter
    def data(self, value: Any) -> None:
        self._data[...] = self.fitting("data", value)
        self.note_change()

    @property
    def version(self) -> Version:
        """The in-place changes of the memory that the values lie in."""
        if self._version is None:  # an op made this tensor, and nobody asked so far
            self._version = Version()
            if self.node is not None:
                self.node.versions += (self._version,)  # every tape that needs these values holds this node
        return self._version

    def note_change(self, by: str = "") -> None:
        """Note that the values were changed in place.

        A backward that still needs them can then say so.

        Args:
            by: whose doing it was, for the message.
        """
        self.version.note(self._data, f"{self.label} (by {by})" if by else self.label)

    @property
    def grad(self) -> Array | None:
        """The gradient that backward stored, or None.

        Assigning copies in; None marks it fresh.
        """
        return None if self._fresh else self._grad

    @grad.setter
    def grad(self, value: Any) -> None:
        self._set_grad(value)

    def _set_grad(self, value: Any) -> None:
        self._open_grad()
        if value is None:
            self._fresh = True
            return
        value = self.fitting("grad", value)
        self._fresh = True
        self.accumulate_grad(value)

    def fitting(self, attribute: str, value: Any) -> Array:
        """Return a value that is to be copied into this tensor as an array.

        Raises:
            ValueError: its shape is another one.
            TypeError: its dtype is none that a tensor can have, or this tensor's integers cannot hold it.
        """
        array = as_array(value)
        if array.shape != self.shape:
            raise ValueError(f"{self.label}.{attribute} has shape {self.shape}, got {array.shape}")
        if self.dtype.kind in "iub" and array.dtype != self.dtype:
            whole = array.dtype.kind in "iub"
            if not whole or not bool((array.astype(self.dtype) == array).all()):
                raise TypeError(f"{self.label}.{attribute} is of {self.dtype}, which cannot hold these {array.dtype}")
        return array

    def accumulate_grad(self, g: Array) -> None:
        """Add one contribution to the gradient; the first one after a reset overwrites."""
        if not self._fresh:
            self._grad += g
            return
        if self._grad is None:
            self._grad = self._new_grad()
        self._grad[...] = g
        self._fresh = False

    def accumulate_from(self, write: Callable[[Array, Array, bool], None], g: Array) -> Array:
        """Let a `WeightVjp` write its contribution straight into the gradient.

        It may also add it to what is there.

        Returns:
            The gradient.
        """
        add = not self._fresh
        if self._grad is None:
            self._grad = self._new_grad()
        write(g, self._grad, add)
        self._fresh = False
        return self._grad

    def _new_grad(self) -> Array:
        """Return memory for a gradient that has none yet."""
        return xp_of(self._data).empty_like(self.data)

    def _open_grad(self) -> None:
        """Check that the gradient may be replaced: a parameter's may be held by somebody."""

    def detach(self) -> Tensor:
        """Return a tensor that shares this one's data and is cut from the tape."""
        cut = Tensor(self._data)
        cut._version = self.version
        cut.weight_side = self.weight_side
        return cut

    def __getstate__(self) -> Any:
        """Return what a copy or a pickle takes along: values and gradient, and never a place in somebody's memory."""
        if self.node is not None:
            raise TypeError("a tensor that an op made cannot be copied: its tape would be lost; copy tensor.detach()")
        state: Any = object.__getstate__(self)
        attributes, slots = state
        grad = None if self._fresh or self._grad is None else self._grad.copy()
        return attributes, slots | {"_data": self._data.copy(), "_grad": grad, "_version": None}

    def drop_data(self) -> None:
        """Let go of the values and keep the place on the tape.

        Shape and dtype stay, `data` reads as zeros.
        """
        xp = xp_of(self._data)
        self._data = xp.broadcast_to(xp.zeros((), self.dtype), self.shape)

    def item(self) -> float:
        """Return the only element as a Python number."""
        return self._data.item()

    # -- looks ----------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return self._data.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._data.dtype

    @property
    def ndim(self) -> int:
        return self._data.ndim

    @property
    def size(self) -> int:
        return self._data.size

    @property
    def label(self) -> str:
        """What an error message calls this tensor."""
        return "tensor"

    def __len__(self) -> int:
        return len(self._data)

    def __repr__(self) -> str:
        made_by = f", op={self.node.name}" if self.node is not None else ", requires_grad" * self.requires_grad
        return f"{type(self).__name__}({self._data!r}{made_by})"

    def __array__(self, *args: Any, **kwargs: Any) -> Array:
        raise TypeError(
            "a Tensor is not an array, and NumPy would lose its gradient: use minigrad's ops (minigrad.stack for "
            "a list of tensors), or x.data where no gradient is meant"
        )

    if TYPE_CHECKING:  # bound in ops/operators.py, in one table

        def __add__(self, other: Any) -> Tensor: ...
        def __radd__(self, other: Any) -> Tensor: ...
        def __sub__(self, other: Any) -> Tensor: ...
        def __rsub__(self, other: Any) -> Tensor: ...
        def __mul__(self, other: Any) -> Tensor: ...
        def __rmul__(self, other: Any) -> Tensor: ...
        def __truediv__(self, other: Any) -> Tensor: ...
        def __rtruediv__(self, other: Any) -> Tensor: ...
        def __pow__(self, other: Any) -> Tensor: ...
        def __rpow__(self, other: Any) -> Tensor: ...
        def __matmul__(self, other: Any) -> Tensor: ...
        def __rmatmul__(self, other: Any) -> Tensor: ...
        def __neg__(self) -> Tensor: ...
        def __abs__(self) -> Tensor: ...
        def __lt__(self, other: Any) -> Array: ...
        def __le__(self, other: Any) -> Array: ...
        def __gt__(self, other: Any) -> Array: ...
        def __ge__(self, other: Any) -> Array: ...
        def __getitem__(self, index: Any) -> Tensor: ...
        def __bool__(self) -> bool: ...
        def __float__(self) -> float: ...
        def __int__(self) -> int: ...
        def __iter__(self) -> Iterator[Tensor]: ...
        def sum(self, axis: Any = None, *, keepdims: bool = False) -> Tensor: ...
        def mean(self, axis: Any = None, *, keepdims: bool = False) -> Tensor: ...
        def max(self, axis: Any = None, *, keepdims: bool = False) -> Tensor: ...
        def min(self, axis: Any = None, *, keepdims: bool = False) -> Tensor: ...
        def prod(self, axis: Any = None, *, keepdims: bool = False) -> Tensor: ...
        def var(self, axis: Any = None, *, keepdims: bool = False, ddof: int = 0) -> Tensor: ...
        def std(self, axis: Any = None, *, keepdims: bool = False, ddof: int = 0) -> Tensor: ...
        def cumsum(self, axis: int) -> Tensor: ...
        def clip(self, low: float | None = None, high: float | None = None) -> Tensor: ...
        def split(self, parts: Any, axis: int = 0) -> list[Tensor]: ...
        def squeeze(self, axis: Any = None) -> Tensor: ...
        def swapaxes(self, axis1: int, axis2: int) -> Tensor: ...
        def reshape(self, *shape: Any) -> Tensor: ...
        def transpose(self, *axes: Any) -> Tensor: ...
        def astype(self, dtype: Any) -> Tensor: ...
        @property
        def T(self) -> Tensor: ...


def made_by(node: Node | None, data: Array, weight_side: bool | None) -> Tensor:
    """Return the output of an op.

    It is `Tensor(data)` without its checks, on the tape if there is a node.

    Args:
        node: that recorded the op; None where nothing was recorded.
        data: its output.
        weight_side: whether it depends on parameters alone; None for numbers.
    """
    tensor = Tensor.__new__(Tensor)
    tensor._data = data
    tensor._grad = None
    tensor._fresh = True
    tensor._version = None
    tensor.node = node
    tensor.requires_grad = node is not None
    tensor.weight_side = weight_side
    return tensor
