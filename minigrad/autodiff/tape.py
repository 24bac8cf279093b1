"""The tape: ops record nodes. Walking them in reverse is the business of `walk.py`.

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
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minigrad.arguments import Places, as_array
from minigrad.autodiff.mode import Seen, current_mode
from minigrad.autodiff.vjps import Joint, Replay, Vjp
from minigrad.backend import Array, xp_of
from minigrad.habits import check_options
from minigrad.parameter import Parameter
from minigrad.tensor import Tensor, made_by
from minigrad.versions import Version, tick

Edge = tuple[Any, Vjp]  # a parent, node or leaf, and the vjp that gives its contribution

_node_number = operator.attrgetter("number")
ALREADY_WALKED = "this tape was already walked and its residuals are freed; run the forward again"


class Node:
    """One op that ran: where its inputs came from and how gradients flow back to them.

    Attributes:
        number: the tick at which it was recorded, over all tapes.
        name: of the op.
        parents: for each input that needs a gradient the node that made it, or the leaf. None once walked.
        vjps: one per parent, or a Joint. None once walked.
        shape, dtype: of the output.
        weight_side: whether the output depends on parameters alone.
        within: numbers of the recomputed nodes that this one is part of, outermost first; None if of none.
        seen: what a hook remembers of it.
        versions: of the memory of those inputs that need no gradient; a leaf that needs one knows its own.
    """

    __slots__ = (
        "__weakref__",
        "dtype",
        "name",
        "number",
        "parents",
        "seen",
        "shape",
        "versions",
        "vjps",
        "weight_side",
        "within",
    )

    def __init__(
        self,
        name: str,
        parents: tuple[Node | Tensor, ...],
        vjps: tuple[Vjp, ...] | Joint | Replay,
        shape: tuple[int, ...],
        dtype: Any,
        weight_side: bool | None,
        seen: Seen | None = None,
        versions: tuple[Version, ...] = (),
    ) -> None:
        self.number = tick()
        self.name = name
        self.parents: tuple[Node | Tensor, ...] | None = parents
        self.vjps: tuple[Vjp, ...] | Joint | Replay | None = vjps
        self.shape = shape
        self.dtype = dtype
        self.weight_side = weight_side
        self.within: tuple[int, ...] | None = None
        self.seen = seen
        self.versions = versions


def op(function: Callable[..., tuple[Array, Any]]) -> Callable[..., Tensor]:
    """Turn a function on arrays into an op on tensors.

    Args:
        function: takes arrays (or Python numbers) positionally and everything else by keyword; returns `(y, vjps)`:
            one vjp per array, None for one without a derivative, or one `Joint`.
            A vjp never writes into its cotangent, and closes over what it needs and no more.
            Arrays in front of a `/` leave room for options that may be positional too, as `axis` is in NumPy:
            `def sum(x, /, axis=None, *, keepdims=False)`.
    Returns:
        The op: takes Tensors, arrays and Python numbers; returns a Tensor, recorded if an input needs a gradient.
    Raises:
        TypeError: at a call: an option that the op does not have, or that is a tensor with a gradient; or as many vjps
            as arrays were not returned, or none for one that needs a gradient.
    """
    name = function.__name__
    places = Places.of(function)
    num_arrays, options = places.num_arrays, places.options

    def check(given: dict[str, Any]) -> None:
        if options is not None:
            check_options(name, given, options)
        for option in given.values():
            if isinstance(option, (complex, np.complexfloating)):
                as_array(option)  # raises
            if isinstance(option, Tensor) and option.requires_grad:
                raise TypeError(f"{name}: an option has no gradient, got a Tensor that requires one; give its .data")

    @functools.wraps(function)
    def apply(*args: Any, **kwargs: Any) -> Tensor:
        if len(args) > num_arrays:
            args, kwargs = places.sort(args, kwargs)
        if kwargs:
            check(kwargs)
        arrays: list[Any] = []
        wanted = []  # positions of the arguments that need a gradient
        parents: list[Node | Tensor] = []  # where those come from
        versions: tuple[Version, ...] = ()
        weight_side: bool | None = None
        mode = current_mode.get()
        recording, hook = mode.recording, mode.hook
        for x in args:
            if isinstance(x, Tensor):
                if x.requires_grad:
                    wanted.append(len(arrays))
                    parents.append(x.node or x)
                elif recording:
                    versions += (x._version or x.version,)
                arrays.append(x._data)
                side = x.weight_side
            elif isinstance(x, (int, float, np.generic)):
                # A NumPy scalar would widen the result: float32 times float64 is float64. A number is neutral.
                arrays.append(as_array(x).item() if isinstance(x, np.generic) else x)
                continue
            else:
                arrays.append(as_array(x))
                side = False
            if side is not None and weight_side is not False:
                weight_side = side
        if weight_side is None and all(isinstance(x, (int, float)) for x in arrays):
            arrays = [np.asarray(x) for x in arrays]  # numbers alone have no dtype beside them to go by
        seen = None
        try:
            if hook is None:
                y, vjps = function(*arrays, **kwargs)
            else:
                y, vjps, seen = hook.forward(name, function, arrays, kwargs)
        except AttributeError as error:
            for i, x in enumerate(arrays):
                if error.obj is x and isinstance(x, (int, float)):
                    raise TypeError(f"{name} needs an array as argument {i}, got the number {x}") from error
            raise
        if type(y) is not np.ndarray and xp_of(y) is np:
            y = np.asarray(y)  # reductions give scalars
        node = None
        if wanted and recording:
            if type(vjps) is Joint:
                vjps.positions = tuple(wanted)
            else:
                if len(vjps) != len(args):
                    raise TypeError(
                        f"{name}: an op returns one vjp per array argument, got {len(vjps)} for {len(args)}"
                    )
                if len(wanted) < len(args):
                    vjps = tuple([vjps[i] for i in wanted])
                if None in vjps:
                    raise TypeError(f"{name}: argument {wanted[vjps.index(None)]} has no derivative but requires grad")
            node = Node(name, tuple(parents), vjps, y.shape, y.dtype, weight_side, seen, versions)
        return made_by(node, y, weight_side)

    return apply


def node_order(node: Node) -> tuple[int, ...]:
    """Return a node's place in the order of a forward without recomputation.

    It is a key to sort by.
    """
    return (*(node.within or ()), node.number)


def collect(root: Node, *, since: int = -1) -> list[Node]:
    """Return the nodes that `root` depends on, itself included, newest first.

    Args:
        since: a tick; only nodes that were recorded from then on.
    Raises:
        RuntimeError: the tape has been walked before.
    """
    seen = {root}
    stack = [root]
    while stack:
        parents = stack.pop().parents
        if parents is None:
            raise RuntimeError(ALREADY_WALKED)
        for parent in parents:
            if type(parent) is Node and parent not in seen and parent.number >= since:
                seen.add(parent)
                stack.append(parent)
    return sorted(seen, key=_node_number, reverse=True)


def leaf_uses(nodes: Sequence[Node]) -> dict[Tensor, int]:
    """Count for each leaf the edges that will bring it a contribution."""
    uses: dict[Any, int] = {}
    for node in nodes:
        for parent in node.parents or ():
            if type(parent) is not Node:
                uses[parent] = uses.get(parent, 0) + 1
    return uses


def parameter_uses(leaves: dict[Tensor, int]) -> dict[Parameter, int]:
    """Return those of the leaves that are parameters."""
    return {leaf: uses for leaf, uses in leaves.items() if isinstance(leaf, Parameter)}
