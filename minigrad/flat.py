"""FlatBuffer: the one owner of parameter memory.

Parameters of one dtype lie side by side in one contiguous array, their gradients in a second one,
both in reverse parameter order: the order in which backward finishes them. An optimizer, a
gradient bucket, a shard or a checkpoint is then a slice, and nobody copies.

    parameters of the model   [w0, b0, w1, b1]
    flat.data                 | b1 |    w1    | b0 |    w0    |
    flat.grad                 | b1 |    w1    | b0 |    w0    |     param.grad is a view
    a bucket, a FlatRange     |<-------------->|

In a mixed precision `data` and `grad` stay float32, and `flat.copy`, the values in a narrower dtype, is what ops see.
After `widen_grad` contributions to a gradient are added up in a wider dtype than its own: the first one lies in
`flat.grad`, and with the second the gradient becomes a sum in `flat.sums`. Rounded, it is in `flat.grad` again.

Where gradients are needed only for a while, `cut_grad` gives their memory in parts: one is there from the first write
into one of its gradients until `close_grad`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NoReturn

from minigrad.backend import Array, xp_of
from minigrad.flat_range import FlatRange
from minigrad.parameter import Parameter, check_resettable
from minigrad.versions import Version


class FlatBuffer:
    """Contiguous memory for some parameters and their gradients; never re-ordered.

    Attributes:
        data, grad: (n,) arrays; the gradients are empty where their memory comes in parts.
        sums: (n,) in a wider dtype: what gradients of several contributions are added up in; None where it is `grad`.
        copy: (n,) what ops see instead of `data`, in a narrower dtype; None where they see `data` itself.
        params: in memory order.
        version: the in-place changes of `data`.
    """

    def __init__(self, params: Sequence[Parameter]) -> None:
        xp = xp_of(params[0].data)
        size = sum(p.size for p in params)
        self.data: Array = xp.empty(size, params[0].dtype)
        self.grad: Array = xp.zeros(size, params[0].dtype)
        self.copy: Array | None = None
        self.sums: Array | None = None
        self.params = tuple(params)
        self._part_of: dict[Parameter, FlatRange] = {}  # whose memory for gradients comes and goes together
        self._part_grads: dict[FlatRange, Array] = {}  # what is there now, by part
        self._part_sums: dict[FlatRange, Array] = {}
        self.version = Version()
        start = 0
        for p in params:
            shape, stop = p.shape, start + p.size
            data, grad = self.data[start:stop].reshape(shape), self.grad[start:stop].reshape(shape)
            data[...] = p.data
            if p.has_grad:
                grad[...] = p.grad
            self.version.absorb(p.version)
            p.move_to(self, start, data, grad)
            start = stop

    def __reduce__(self) -> Any:
        """Copy by adopting: copies of parameters have memory of their own, and a copy of their owner gathers it."""
        return FlatBuffer, (self.params,), None if self.copy is None else self.copy.dtype

    def __setstate__(self, seen_in: Any) -> None:
        self.keep_copy(seen_in)

    def __copy__(self) -> NoReturn:
        raise TypeError("a FlatBuffer is the one owner of its parameters' memory: copy it with them, by copy.deepcopy")

    def move_grad(self, storage: Array) -> None:
        """Let the gradients live in `storage` from now on.

        It may be memory from which a communicator reduces fastest. Values stay, and so does what counts as fresh.
        Whoever took `p.grad` before holds the old memory.

        Args:
            storage: (n,) contiguous, of the same dtype, used by nobody else.
        Raises:
            ValueError: `storage` has another shape or dtype, or is not contiguous.
            RuntimeError: somebody holds a gradient.
        """
        _check_storage("move_grad", storage, self.grad)
        check_resettable(self.params, "move_grad of")
        storage[...] = self.grad
        self.grad = storage
        self._place_params()

    def move_data(self, storage: Array) -> None:
        """Let the values live in `storage` from now on, as `move_grad` does for gradients.

        Args:
            storage: (n,) contiguous, of the same dtype, used by nobody else.
        Raises:
            ValueError: `storage` has another shape or dtype, or is not contiguous.
        """
        _check_storage("move_data", storage, self.data)
        for p in self.params:
            storage[p.start : p.stop] = p.data.reshape(-1)  # waits for values that are on their way
        self.data = storage
        self._place_params()

    def widen_grad(self, dtype: Any) -> None:
        """Add up the contributions to a gradient in a wider dtype from now on.

        Each of them is first computed in that of `grad`. Whoever takes gradients from a range gets them rounded.

        Raises:
            RuntimeError: somebody holds a gradient.
        """
        check_resettable(self.params, "widen_grad of")
        self.sums = xp_of(self.data).zeros(self.grad.size, dtype)

    @property
    def is_widened(self) -> bool:
        return self.sums is not None

    def move_sums(self, storage: Array) -> None:
        """Let gradients be added up in `storage` from now on. Those that are sums by now are rounded.

        Args:
            storage: (n,) contiguous, of the dtype of `sums`, used by nobody else.
        Raises:
            ValueError: `storage` has another shape or dtype, or is not contiguous; or gradients are not widened.
            RuntimeError: somebody holds a gradient.
        """
        if self.sums is None:
            raise ValueError("move_sums is for gradients that widen_grad has widened")
        _check_storage("move_sums", storage, self.sums)
        check_resettable(self.params, "move_sums of")
        for p in self.params:
            if p.is_sum:
                p.grad_view()
        self.sums = storage

    def cut_grad(self, parts: Sequence[FlatRange]) -> None:
        """Let memory for gradients come and go in these parts from now on.

        Gradients that are there are dropped.

        Args:
            parts: that hold each parameter once.
        Raises:
            RuntimeError: somebody holds a gradient.
        """
        check_resettable(self.params, "cut_grad of")
        self._part_of = {p: part for part in parts for p in part.params}
        self._part_grads.clear()
        self._part_sums.clear()
        self.grad = self.grad[:0].copy()
        self.sums = None if self.sums is None else self.sums[:0].copy()
        for p in self.params:
            p.place_grad(None)

    def open_grad(self, p: Parameter) -> Array:
        """Return memory for the gradient of a parameter that has none.

        That of its whole part comes with it.
        """
        part = self._part_of[p]
        memory = xp_of(self.data).empty(part.stop - part.start, self.grad.dtype)
        self._part_grads[part] = memory
        views = {q: memory[q.start - part.start : q.stop - part.start].reshape(q.shape) for q in part.params}
        for q, view in views.items():
            q.place_grad(view)
        return views[p]

    def close_grad(self, part: FlatRange) -> None:
        """Let go of a part's memory for gradients; they count as fresh."""
        self._part_grads.pop(part, None)
        self._part_sums.pop(part, None)
        for p in part.params:
            p.place_grad(None)

    def grad_slice(self, start: int, stop: int) -> Array:
        """Return the memory of gradients from `start` to `stop`, a view; within one part.

        Args:
            start, stop: in elements of the flat.
        """
        part = self._open_part(start, stop)
        return self.grad[start:stop] if part is None else _within(part, self._part_grads[part], start, stop)

    def sum_slice(self, start: int, stop: int) -> Array:
        """Return the memory of sums likewise; that of a part is there from now on.

        Args:
            start, stop: in elements of the flat, which is widened.
        """
        assert self.sums is not None
        part = self._open_part(start, stop)
        if part is None:
            return self.sums[start:stop]
        if part not in self._part_sums:
            self._part_sums[part] = xp_of(self.data).empty(part.stop - part.start, self.sums.dtype)
        return _within(part, self._part_sums[part], start, stop)

    def _open_part(self, start: int, stop: int) -> FlatRange | None:
        """Return the part with memory of its own that holds these elements, if there is one."""
        return next((part for part in self._part_grads if part.start <= start and stop <= part.stop), None)

    def keep_copy(self, dtype: Any) -> None:
        """Let ops see the values in this dtype from now on, in a copy.

        It follows `data`. With the dtype of `data` itself there is none.
        """
        self.copy = None if self.data.dtype == dtype else self.data.astype(dtype)
        self._place_params()
        self.version.note(self.data, f"{self.params[0].label} ... {self.params[-1].label} (by keep_copy)")

    def drop_master(self) -> None:
        """Keep the values only in the dtype that ops see.

        Whoever trains them has taken them in full.

        Raises:
            ValueError: ops see the values themselves.
        """
        if self.copy is None:
            raise ValueError("ops see these values themselves: there is no copy of them to keep instead")
        self.data, self.copy = self.copy, None
        self._place_params()

    def _place_params(self) -> None:
        """Tell the parameters where their memory is now."""
        for p in self.params:
            own = slice(p.start, p.stop)
            data = self.data[own].reshape(p.shape)
            grad = None if self._part_of else self.grad[own].reshape(p.shape)
            p.move_to(self, p.start, data, grad, None if self.copy is None else self.copy[own].reshape(p.shape))

    @staticmethod
    def adopt(params: Iterable[Parameter]) -> list[FlatRange]:
        """Give the parameters without an owner one.

        They get new flats, one for each dtype, in reverse parameter order. Those that have an owner stay where they
        are. The same parameter given twice counts once.

        Args:
            params: in the order of the model.
        Returns:
            Where they all lie now: see `ranges_of`.
        Raises:
            ValueError: two parameters have the same name; then none is moved.
        """
        wanted = _newest_first(params)
        orphans: dict[object, list[Parameter]] = {}
        for p in wanted:
            if p.flat is None:
                orphans.setdefault((p.dtype, xp_of(p.data)), []).append(p)
        for group in orphans.values():
            FlatBuffer(group)
        return FlatBuffer.ranges_of(reversed(wanted))

    @staticmethod
    def ranges_of(params: Iterable[Parameter]) -> list[FlatRange]:
        """Return the fewest contiguous ranges that hold exactly these parameters.

        It moves nothing.

        Args:
            params: in the order of the model, each with an owner.
        Returns:
            Ranges, ordered by where their parameters come last in `params`, the last one first.
        Raises:
            ValueError: two parameters have the same name, or one has no owner.
        """
        wanted = _newest_first(params)
        chosen = set(wanted)
        ranges: list[FlatRange] = []
        for flat in dict.fromkeys(p.flat for p in wanted):
            if flat is None:
                homeless = next(p for p in wanted if p.flat is None)
                raise ValueError(f"{homeless.label} lies in no FlatBuffer; call FlatBuffer.adopt first")
            runs = groupby(flat.params, chosen.__contains__)
            ranges += [FlatRange.over(tuple(run)) for is_chosen, run in runs if is_chosen]
        place = {p: i for i, p in enumerate(wanted)}
        return sorted(ranges, key=lambda r: min(place[p] for p in r.params))


def _within(part: FlatRange, memory: Array, start: int, stop: int) -> Array:
    return memory[start - part.start : stop - part.start]


def _check_storage(call: str, storage: Array, present: Array) -> None:
    """Raise ValueError if memory cannot take the place of what is there."""
    if (storage.shape, storage.dtype, storage.flags.c_contiguous) != (present.shape, present.dtype, True):
        raise ValueError(
            f"{call} needs contiguous memory of {present.dtype}{list(present.shape)}, "
            f"got {storage.dtype}{list(storage.shape)} with strides {storage.strides}"
        )


def grads_of(params: Iterable[Parameter]) -> list[Array]:
    """Return all gradients as 1-D views, as few as there can be without moving any.

    What no backward reached counts as zeros.

    Args:
        params: with an owner or without one yet.
    """
    distinct = list(dict.fromkeys(params))
    ranges = FlatBuffer.ranges_of(p for p in distinct if p.flat is not None)
    alone = [p.grad for p in distinct if p.flat is None and p.grad is not None]
    return [part.grad for part in ranges] + [grad.reshape(-1) for grad in alone]


def zero_grad(params: Iterable[Parameter]) -> None:
    """Mark gradients fresh: the next contribution overwrites. Touches no memory.

    Raises:
        RuntimeError: somebody holds one of them; then none is marked.
    """
    params = [p for p in params if p.hold is None or not p.hold.is_reset]
    check_resettable(params, "zero_grad() of")
    for p in params:
        p.grad = None


def _newest_first(params: Iterable[Parameter]) -> list[Parameter]:
    """Return distinct parameters, the last of the model first: the order in which backward finishes them.

    Raises:
        ValueError: two of them have the same name.
    """
    distinct = list(dict.fromkeys(reversed(list(params))))
    check_names(distinct)
    return distinct


def check_names(params: Iterable[Parameter]) -> None:
    """Raise ValueError if two distinct parameters share a name; nameless ones may."""
    seen: dict[str, Parameter] = {}
    for p in params:
        if p.name and seen.setdefault(p.name, p) is not p:
            raise ValueError(
                f"parameter names must be unique, got {p.label} twice: shapes {seen[p.name].shape} and {p.shape}"
            )
