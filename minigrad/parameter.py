"""Parameter: a named leaf that a module owns. Hold: what somebody who works with its gradient leaves there.

A parameter may be seen by ops in a narrower dtype than it is trained in (`precision.py`): then `data`, the gradient
and all that an optimizer keeps are float32, and `_data`, what ops read, is a copy that follows `data`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from minigrad.arguments import as_array
from minigrad.backend import Array, round_to, xp_of
from minigrad.tensor import Tensor

if TYPE_CHECKING:
    from minigrad.flat import FlatBuffer


@dataclass(frozen=True)
class Hold:
    """A claim on a gradient: nobody else may touch it.

    Its holder takes it away with `parameter.hold = None`.

    Attributes:
        reason: what the gradient is, and the way out: it ends the message of the error that others get.
        open: the gradient is still being collected. It may be added to and reset, but not used: by a step, by a norm.
        final: the gradient has its last value. It may be used, but not added to; a reset ends the hold.
        partial: this process has only a part of the gradient. It cannot be read, nor used as a whole.
        after_reset: what takes the place of a final hold then.
        is_reset: the gradient is fresh already, so that zero_grad leaves it alone.
    """

    reason: str
    open: bool = False
    final: bool = False
    partial: bool = False
    after_reset: Hold | None = None
    is_reset: bool = False


class Parameter(Tensor):
    """A named leaf that a module owns and an optimizer changes.

    Its memory belongs to a FlatBuffer from the moment an optimizer or a data-parallel wrapper asks for one;
    `data` and `grad` are views into it from then on. A copy has memory of its own, and no owner yet.

    Values may be on their way (`defer`): the memory is then hidden, and whoever reads it first waits for them.

    Args:
        data: floating point array; copied, so that nobody else holds the memory.
        name: unique within a model; what errors, checkpoints and random streams call it.

    Attributes:
        flat, start: the owner of its memory, and where in it this parameter begins, in elements.
        hold: who has a claim on the gradient now, if anybody.
        part_of: where this process holds only a part of the model: of what, and how to get numbers of the whole; it
            ends the message of the error that a norm over this process alone raises.
    """

    __slots__ = ("_awaited", "_master", "_sum", "flat", "hold", "name", "part_of", "start")
    keeps_values = True

    def __init__(self, data: Any, name: str = "", *, requires_grad: bool = True) -> None:
        super().__init__(as_array(data).copy(order="C"), requires_grad=requires_grad)
        self.name = name
        self.weight_side = True  # frozen or not: what depends on parameters alone is weight work
        self.flat: FlatBuffer | None = None
        self.start = 0
        self.hold: Hold | None = None
        self.part_of = ""
        self._master: Array | None = None  # what is trained, where ops see a copy of it
        self._sum: Array | None = None  # the gradient while it is a sum in a wider dtype; else `_grad` has it
        # Hidden memory, what kind of parameter this is, and who brings the values.
        self._awaited: tuple[Array, Array | None, type[Parameter], Callable[[], None]] | None = None

    @property
    def data(self) -> Array:
        """The values. Assigning copies in: shape must match, the dtype is kept."""
        seen = self._data  # waits where the values are on their way
        return seen if self._master is None else self._master

    @data.setter
    def data(self, value: Any) -> None:
        self.data[...] = self.fitting("data", value)
        self.note_change()

    @property
    def grad(self) -> Array | None:
        """The gradient, or None where there is none.

        It is refused where only a part of it is here. It may be a sum in a wider dtype: see `FlatBuffer.widen_grad`.
        """
        if self.hold is not None and self.hold.partial:
            self.refuse_grad("reading .grad of")
        if self._sum is not None:
            return self._sum
        return None if self._fresh else self._grad

    @grad.setter
    def grad(self, value: Any) -> None:
        self._set_grad(value)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of `data`, also where ops see a narrower copy."""
        return self.data.dtype

    @property
    def label(self) -> str:
        return repr(self.name) if self.name else f"parameter of shape {self.shape}"

    @property
    def stop(self) -> int:
        """One past its last element in its flat."""
        return self.start + self.size

    def accumulate_grad(self, g: Array) -> None:
        """Add one contribution to the gradient.

        It is refused while it is held, unless the hold is open.
        """
        if self.hold is not None and not self.hold.open:
            self.refuse_grad("backward into")
        if self._adds_widely():
            total = self.sum_view()
            total += g
        else:
            super().accumulate_grad(g)

    def accumulate_from(self, write: Callable[[Array, Array, bool], None], g: Array) -> Array:
        """Let a `WeightVjp` write or add its contribution to the gradient.

        It is refused as `accumulate_grad` is.
        """
        if self.hold is not None and not self.hold.open:
            self.refuse_grad("backward into")
        if not self._adds_widely():
            return super().accumulate_from(write, g)
        assert self._grad is not None  # there is a first contribution
        own: Array = xp_of(g).empty(self.shape, self._grad.dtype)  # of which each is one, values may be narrower
        write(g, own, False)
        total = self.sum_view()
        total += own
        return total

    def _adds_widely(self) -> bool:
        """Return whether the next contribution makes the gradient a sum in a wider dtype: the first one is none."""
        return not self._fresh and self.flat is not None and self.flat.is_widened

    def refuse_grad(self, what: str) -> NoReturn:
        """Raise RuntimeError: `what` cannot be done while this gradient is held."""
        assert self.hold is not None
        raise RuntimeError(f"{what} {self.label}: {self.hold.reason}")

    def _open_grad(self) -> None:
        check_resettable([self], "a new grad for")
        self._sum = None
        if self.hold is not None and self.hold.final:
            self.hold = self.hold.after_reset

    def _new_grad(self) -> Array:
        return super()._new_grad() if self.flat is None else self.flat.open_grad(self)

    @property
    def has_grad(self) -> bool:
        """Whether something was added to the gradient since its last reset."""
        return not self._fresh

    def fill_missing_grad(self) -> None:
        """Make a gradient that no backward reached zeros."""
        if self._fresh:
            self.grad_view()[...] = 0

    def grad_view(self) -> Array:
        """Return the gradient's memory for writing; it counts as written from now on.

        A sum in a wider dtype is rounded into it.
        """
        if self._grad is None:
            self._grad = self._new_grad()
        if self._sum is not None:
            round_to(self._grad, self._sum)
            self._sum = None
        self._fresh = False
        return self._grad

    def sum_view(self) -> Array:
        """Return the memory in which the gradient is added up, for adding to: zeros where there is none yet.

        Of a wider dtype where its flat is widened; the gradient is a sum from now on, until `grad_view` rounds it.
        """
        if self.flat is None or not self.flat.is_widened:
            self.fill_missing_grad()
            return self.grad_view()
        if self._sum is None:
            if self._grad is None:
                self._grad = self._new_grad()
            self._sum = self.flat.sum_slice(self.start, self.stop).reshape(self.shape)
            self._sum[...] = 0 if self._fresh else self._grad
            self._fresh = False
        return self._sum

    @property
    def is_sum(self) -> bool:
        """Whether the gradient is a sum in a wider dtype, not rounded yet."""
        return self._sum is not None

    def drop_sum(self) -> None:
        """Let the gradient be what its own memory has: somebody has written it there."""
        self._sum = None

    def place_grad(self, grad: Array | None) -> None:
        """Let the gradient's memory be this from now on, not yet written.

        None: there is none until it is needed.
        """
        self._grad, self._sum, self._fresh = grad, None, True

    def defer(self, arrive: Callable[[], None]) -> None:
        """Hide the values, which are on their way.

        Whoever reads them first calls `arrive`, which calls `restore`.
        """
        kind: Any = type(self)
        self._awaited = self._data, self._master, kind, arrive
        del self._data
        self._master = None
        self.__class__ = _awaited(kind)

    def restore(self) -> None:
        """Show the values again that `defer` has hidden: they are there."""
        assert self._awaited is not None
        self._data, self._master, kind, _ = self._awaited
        self._awaited = None
        self.__class__ = kind

    def __getstate__(self) -> Any:
        check_resettable([self], "a copy of")
        attributes, slots = super().__getstate__()
        # A copy has no owner, and so no copy for ops to see: it is float32.
        own = {"_data": self.data.copy(), "_master": None, "_awaited": None, "_sum": None}
        if self._sum is not None:
            own["_grad"] = self._sum.astype(slots["_grad"].dtype)
        return attributes, slots | own | {"flat": None, "start": 0, "hold": None}

    def note_change(self, by: str = "") -> None:
        """Note that the values were changed in place.

        The copy that ops see follows.
        """
        if self._master is not None:
            self._data[...] = self._master
            self.version.note(self._master, self.label)
        super().note_change(by)

    def move_to(self, flat: FlatBuffer, start: int, data: Array, grad: Array | None, copy: Array | None = None) -> None:
        """Let `flat` own the memory from now on; the values are already there.

        Args:
            grad: None leaves it where it is.
            copy: what ops see instead of `data`, with the same values in a narrower dtype.
        """
        self._data, self._master = (data, None) if copy is None else (copy, data)
        self._grad = self._grad if grad is None else grad
        self.flat, self.start, self._version = flat, start, flat.version


class _Awaited:
    """What a parameter is too while its values are on their way: what it is like can be read without them.

    Not always, since Python reads each attribute of whatever has a `__getattr__` in a slower way.
    """

    __slots__ = ()
    _awaited: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self._hidden.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._hidden.dtype

    @property
    def ndim(self) -> int:
        return self._hidden.ndim

    @property
    def size(self) -> int:
        return self._hidden.size

    @property
    def _hidden(self) -> Array:
        """The memory of `data`."""
        seen: Array
        master: Array | None
        seen, master, *_ = self._awaited
        return seen if master is None else master

    if not TYPE_CHECKING:  # called only for what is not there

        def __getattr__(self, name: str) -> Any:
            if name != "_data" or self._awaited is None:
                return object.__getattribute__(self, name)  # raises, with what is to be said of this name
            self._awaited[-1]()
            return self._data

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Copy what it is when the values are there."""
            _ = self._data
            return self.__reduce_ex__(protocol)


@cache
def _awaited(kind: type[Parameter]) -> type[Parameter]:
    """Return the class of a parameter of some kind, a user's too, while its values are on their way."""
    return type(f"Awaited{kind.__name__}", (_Awaited, kind), {"__slots__": ()})


def check_usable(params: Iterable[Parameter], what: str, *, in_part: bool = False) -> None:
    """Raise RuntimeError if one of these gradients is held and not final.

    `what` would use it too early.

    Args:
        in_part: `what` can do with the part of a gradient that is here.
    """
    for p in params:
        if p.hold is not None and (not p.hold.final or (p.hold.partial and not in_part)):
            p.refuse_grad(what)


def check_resettable(params: Iterable[Parameter], what: str) -> None:
    """Raise RuntimeError if a reset would disturb a gradient's holder.

    That is where it is held, neither open nor final.
    """
    for p in params:
        if p.hold is not None and not (p.hold.open or p.hold.final):
            p.refuse_grad(what)
