"""Every call of an op or an update rule: its seconds, the bytes that it reads and writes, its matrix products.

The seconds of a kind of call (same op, same shapes) are counted at their median, so that a first call, which compiles,
and a moment when the machine was busy are no matter. `minigrad.profiling.profiler` has the plain sums.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from minigrad.autodiff.mode import Seen, hooked_by
from minigrad.autodiff.tape import Node
from minigrad.backend import Array, synchronize
from minigrad.kernels import replaced
from minigrad.kernels.common import KEPT_QUERIES, QUERIES

RULES = ("adamw", "sgd")  # kernels that update parameters, outside of any op
FORWARD, BACKWARD = "forward", "backward"


class Kind(NamedTuple):
    """What calls must have in common to be compared.

    Attributes:
        op: its name, or that of an update rule.
        direction: forward or backward.
        shapes: of the arrays that go in.
    """

    op: str
    direction: str
    shapes: tuple[tuple[int, ...], ...]


class Operand(NamedTuple):
    """One side of a matrix product: what BLAS sees of it."""

    shape: tuple[int, ...]
    dtype: str
    transposed: bool  # its columns are contiguous, not its rows


class Calls:
    """An op hook that notes every call while `watching` it.

    Attributes:
        seconds: of each call, by kind.
        moved: bytes that one call of a kind reads and writes.
        products: (op, left, right) of each matrix product on the CPU, with how often it was computed.
        wall_seconds: from beginning to end.
    """

    def __init__(self) -> None:
        self.seconds: dict[Kind, list[float]] = {}
        self.moved: dict[Kind, int] = {}
        self.products: Counter[tuple[str, Operand, Operand]] = Counter()
        self.wall_seconds = 0.0
        self._op = ""  # that is running

    def forward(self, name: str, function: Any, arrays: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Seen]:
        y, vjps = self._note(name, FORWARD, lambda: function(*arrays, **kwargs), arrays, lambda result: result[0])
        return y, vjps, Seen("", self.seconds[_kind(name, FORWARD, arrays)][-1])

    def backward(self, node: Node, vjp: Any, g: Array) -> Any:
        return self._note(node.name, BACKWARD, lambda: vjp(g), [g], lambda result: result)

    def module(self, module: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def _note(
        self, op: str, direction: str, call: Callable[[], Any], arrays: list[Any], made: Callable[[Any], Any]
    ) -> Any:
        kind, outer, self._op = _kind(op, direction, arrays), self._op, op
        start = time.perf_counter()
        try:
            result = call()
        finally:
            self._op = outer
        outputs = made(result)
        outputs = [x for x in (outputs if isinstance(outputs, (tuple, list)) else [outputs]) if hasattr(x, "nbytes")]
        for x in outputs[:1]:
            synchronize(x)  # on a GPU the call only queued the work
        self.seconds.setdefault(kind, []).append(time.perf_counter() - start)
        self.moved[kind] = sum(getattr(x, "nbytes", 0) for x in (*arrays, *outputs))
        return result

    def of_products(self, kernel: Callable[..., Any], *, turned: bool = False) -> Callable[..., Any]:
        """Return a kernel that multiplies a by b, and notes which."""

        def product(a: Array, b: Array, *rest: Any, **options: Any) -> Any:
            if type(a) is type(b) is np.ndarray and a.size and b.size:
                self.products[self._op, _operand(a), _operand(b.T if turned else b)] += 1
            return kernel(a, b, *rest, **options)

        return product

    def of_attention(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Return a kernel of causal attention that is watched.

        It also notes the products that the kernel makes out of our sight, block by block.
        """

        def attention(qkv: Array, num_heads: int) -> Any:
            made = kernel(qkv, num_heads)
            if made is None or type(qkv) is not np.ndarray:
                return made
            y, vjp = made
            batch, time, width3 = qkv.shape
            stack, d, dtype = (batch, num_heads), width3 // 3 // num_heads, qkv.dtype.name
            num_scores = 1 if time <= KEPT_QUERIES else 2  # products like scores in the backward

            def note(op: str, scores: int, by_weights: int, by_turned: int) -> None:
                for start in range(0, time, QUERIES):
                    stop = min(time, start + QUERIES)
                    rows = stop - start
                    queries, keys = Operand((*stack, rows, d), dtype, False), Operand((*stack, stop, d), dtype, False)
                    self.products[op, queries, Operand((*stack, d, stop), dtype, False)] += scores
                    self.products[op, Operand((*stack, rows, stop), dtype, False), keys] += by_weights
                    self.products[op, Operand((*stack, stop, rows), dtype, True), queries] += by_turned

            note(self._op, 1, 1, 0)

            def back(g: Array) -> Array:
                note(self._op, num_scores, 1, 2)
                dqkv: Array = vjp(g)
                return dqkv

            return y, back

        return attention

    def of_rule(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Return a kernel that updates parameters, watched.

        It notes its time, and the bytes of all passes.
        """

        def update(w: Array, g: Array, *rest: Any) -> None:
            arrays: list[Any] = [x for x in (w, g, *rest) if getattr(x, "ndim", None) == 1]
            self._note("the optimizer", FORWARD, lambda: kernel(w, g, *rest), arrays, lambda _: w)
            kind = _kind("the optimizer", FORWARD, arrays)
            self.moved[kind] = 2 * sum(x.nbytes for x in arrays) - g.nbytes  # all but the gradient is written too

        return update

    def by_op(self) -> dict[str, tuple[float, float, int]]:
        """Return of each op the seconds forward and backward, and the bytes that it moved."""
        totals: dict[str, tuple[float, float, int]] = {}
        for kind, seconds in self.seconds.items():
            typical = median(seconds) * len(seconds)
            forward, backward, moved = totals.get(kind.op, (0.0, 0.0, 0))
            moved += self.moved[kind] * len(seconds)
            if kind.direction == FORWARD:
                totals[kind.op] = forward + typical, backward, moved
            else:
                totals[kind.op] = forward, backward + typical, moved
        return totals


@contextmanager
def watching() -> Iterator[Calls]:
    """Note every call inside.

    It notes those of this thread's ops, and of all products and update rules.
    """
    calls = Calls()
    with ExitStack() as stack:
        for name in ("product", "linear", "linear_gelu"):
            stack.enter_context(replaced(name, calls.of_products))
        stack.enter_context(replaced("linear_gelu_back", partial(calls.of_products, turned=True)))
        stack.enter_context(replaced("causal_attention", calls.of_attention))
        for name in RULES:
            stack.enter_context(replaced(name, calls.of_rule))
        stack.enter_context(hooked_by(calls))
        start = time.perf_counter()
        try:
            yield calls
        finally:
            calls.wall_seconds = time.perf_counter() - start


def _kind(op: str, direction: str, arrays: list[Any]) -> Kind:
    return Kind(op, direction, tuple([getattr(x, "shape", ()) for x in arrays]))


def _operand(x: Array) -> Operand:
    transposed = x.ndim >= 2 and x.strides[-2] == x.itemsize and x.shape[-1] > 1 and x.strides[-1] != x.itemsize
    return Operand(x.shape, x.dtype.name, transposed)
