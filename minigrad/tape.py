"""The tape: ops record nodes. Walking them in reverse is the business of `backward.py`.

A node is made by each op whose result needs a gradient. It keeps the nodes (or leaf tensors)
that its inputs came from and, for each of them, a *vjp*: a closure from the cotangent of the output to
this input's contribution. Nothing points forward, so dropping the loss frees everything.

    w (leaf)   x (leaf)          node 0: matmul, parents (x, w)
        \\      /                 node 1: tanh,   parents (node 0,)
         matmul                  node 2: mean,   parents (node 1,)
           |
          tanh
           |
          mean
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from .backend import Array, xp_of
from .tensor import Tensor, changes

Vjp = Callable[[Array], Array]

_recording: ContextVar[bool] = ContextVar("recording", default=True)
_node_numbers = itertools.count()
ALREADY_WALKED = "this tape was already walked and its residuals are freed; run the forward again"


class Node:
    """One op that ran: where its inputs came from and how gradients flow back to them.

    Attributes:
        number: place in creation order, over all tapes.
        name: of the op.
        parents: for each input that needs a gradient the node that made it, or the leaf. None once walked.
        vjps: one per parent, or a Joint. None once walked.
        shape, dtype: of the output.
        weight_side: whether the output depends on parameters alone.
        changes: the count of in-place changes when it was recorded.
    """

    __slots__ = ("__weakref__", "changes", "dtype", "name", "number", "parents", "shape", "vjps", "weight_side")

    def __init__(
        self,
        name: str,
        parents: tuple[Node | Tensor, ...],
        vjps: tuple[Vjp, ...] | Joint,
        shape: tuple[int, ...],
        dtype: Any,
        weight_side: bool | None,
        number: int | None = None,
    ) -> None:
        self.number = next(_node_numbers) if number is None else number
        self.name = name
        self.parents: tuple[Node | Tensor, ...] | None = parents
        self.vjps: tuple[Vjp, ...] | Joint | None = vjps
        self.shape = shape
        self.dtype = dtype
        self.weight_side = weight_side
        self.changes = changes.count


class Joint:
    """One vjp for all inputs of an op, where the work is shared: cotangent -> a gradient per array argument.

    Args:
        vjp: `g -> (grad, ...)`, one for each positional argument of the op.
    """

    __slots__ = ("positions", "vjp")

    def __init__(self, vjp: Callable[[Array], Sequence[Array | None]]) -> None:
        self.vjp = vjp
        self.positions: tuple[int, ...] = ()  # of the arguments that need a gradient; @op fills it in

    def __call__(self, g: Array) -> list[Array]:
        grads = self.vjp(g)
        return [grads[i] for i in self.positions]  # type: ignore[misc]


def op(function: Callable[..., tuple[Array, Any]]) -> Callable[..., Tensor]:
    """Turn a function on arrays into an op on tensors.

    Args:
        function: takes arrays (or Python numbers) positionally and everything else by keyword; returns `(y, vjps)`:
            one vjp per positional argument, None for an argument without a derivative, or one `Joint`.
            A vjp never writes into its cotangent, and closes over what it needs and no more.
    Returns:
        The op: takes Tensors, arrays and Python numbers; returns a Tensor, recorded if an input needs a gradient.
    """
    name = function.__name__

    @functools.wraps(function)
    def apply(*args: Any, **kwargs: Any) -> Tensor:
        arrays = []
        wanted = []  # positions of the arguments that need a gradient
        weight_side: bool | None = None
        for i, x in enumerate(args):
            side: bool | None = None  # a number is neutral
            if isinstance(x, Tensor):
                side = x.weight_side
                if x.requires_grad:
                    wanted.append(i)
                x = x._data
            elif isinstance(x, np.generic):
                x = x.item()  # a NumPy scalar would widen the result: float32 times float64 is float64
            elif not isinstance(x, (int, float)):
                x = x if hasattr(x, "dtype") else np.asarray(x)
                side = False
            arrays.append(x)
            if side is not None:
                weight_side = side if weight_side is None else weight_side and side
        y, vjps = function(*arrays, **kwargs)
        if type(y) is not np.ndarray and xp_of(y) is np:
            y = np.asarray(y)  # reductions give scalars
        out = Tensor.__new__(Tensor)
        out._data, out._grad, out._fresh, out.node, out.requires_grad = y, None, True, None, False
        out.weight_side = weight_side
        if wanted and _recording.get():
            out.requires_grad = True
            parents = tuple([args[i].node or args[i] for i in wanted])
            if type(vjps) is Joint:
                vjps.positions = tuple(wanted)
            else:
                if len(vjps) != len(args):
                    raise TypeError(
                        f"{name}: an op returns one vjp per array argument, got {len(vjps)} for {len(args)}"
                    )
                vjps = tuple([vjps[i] for i in wanted])
                if None in vjps:
                    raise TypeError(f"{name}: argument {wanted[vjps.index(None)]} has no derivative but requires grad")
            out.node = Node(name, parents, vjps, y.shape, y.dtype, weight_side)
        return out

    return apply


@contextmanager
def no_grad() -> Iterator[None]:
    """Record nothing inside: for evaluation. Works as a decorator too."""
    token = _recording.set(False)
    try:
        yield
    finally:
        _recording.reset(token)


def node_number(node: Node) -> int:
    """Sort key: nodes in the order in which they were recorded."""
    return node.number


def collect(root: Node) -> list[Node]:
    """Return the nodes that `root` depends on, itself included, newest first."""
    seen = {root}
    stack = [root]
    while stack:
        parents = stack.pop().parents
        if parents is None:
            raise RuntimeError(ALREADY_WALKED)
        for parent in parents:
            if type(parent) is Node and parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return sorted(seen, key=node_number, reverse=True)


def kept_arrays(held: Any) -> Iterator[Array]:
    """Yield the arrays that a vjp (or a container of vjps) keeps alive through closures."""
    if isinstance(held, (tuple, list)):
        for item in held:
            yield from kept_arrays(item)
    elif isinstance(held, Joint):
        yield from kept_arrays(held.vjp)
    elif hasattr(held, "__closure__"):
        for cell in held.__closure__ or ():
            yield from kept_arrays(cell.cell_contents)
    elif hasattr(held, "__array_interface__") or hasattr(held, "__cuda_array_interface__"):
        yield held


@dataclass(frozen=True)
class TapeEntry:
    """One line of a `Tape`: which op, what it made, and the bytes of residuals that it alone keeps."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    kept_bytes: int


@dataclass(frozen=True)
class Tape:
    """The ops that a tensor depends on, for a person to look at. `print(Tape.of(loss))`."""

    entries: tuple[TapeEntry, ...]

    @staticmethod
    def of(output: Tensor) -> Tape:
        """List the tape of `output`, oldest op first. A residual that several ops keep counts once, at the oldest."""
        counted: set[int] = set()
        entries = []
        for node in reversed(collect(output.node) if output.node is not None else []):
            kept = 0
            for array in kept_arrays(node.vjps):
                base: Any = array.base
                owner = base if hasattr(base, "nbytes") else array  # bytes and files can own memory too
                if id(owner) not in counted:
                    counted.add(id(owner))
                    kept += owner.nbytes
            entries.append(TapeEntry(node.name, node.shape, node.dtype, kept))
        return Tape(tuple(entries))

    @property
    def kept_bytes(self) -> int:
        """Bytes that the tape keeps alive, parameters that vjps hold included."""
        return sum(entry.kept_bytes for entry in self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        rows = [("op", "output", "kept bytes")]
        rows += [(e.name, f"{e.dtype}{list(e.shape)}", f"{e.kept_bytes:,}") for e in self.entries]
        rows.append((f"{len(self)} ops", "", f"{self.kept_bytes:,}"))
        return "\n".join(f"{name:<20} {shape:<28} {kept:>14}" for name, shape, kept in rows)
