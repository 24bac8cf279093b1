"""Backward: walk a tape in reverse, accumulate gradients, and fire hooks when they are final.

    node 2: mean     ->  node 1: tanh  ->  node 0: matmul  ->  leaves w, x

The walk is one loop over nodes sorted by number, without recursion. A parameter is *ready* when the last of its
pending uses is done, and its hook fires right there, between two vjps, so that its gradient can travel
to other ranks while the rest of the backward computes.

Backward in two halves (zero-bubble pipelines): `backward_input` computes only what data needs and
leaves each edge into a weight behind as a smaller node; `backward_weight` walks those. Whole equals B then W, bitwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from minigrad.backend import Array, xp_of
from minigrad.hooks import Hooks
from minigrad.op_hooks import progressing
from minigrad.parameter import Parameter
from minigrad.tape import (
    ALREADY_WALKED,
    Node,
    OpHook,
    Replay,
    Vjp,
    WeightVjp,
    collect,
    current_hook,
    enable_grad,
    kept_arrays,
    node_order,
)
from minigrad.tensor import Tensor
from minigrad.versions import Version

Output = Tensor | Sequence[Tensor]
Edge = tuple[Any, Vjp]  # a parent, node or leaf, and the vjp that gives its contribution


def backward(loss: Tensor) -> None:
    """Compute the gradient of a scalar `loss` and add it to `.grad` of every leaf that it depends on.

    Frees the tape as it goes.

    Raises:
        ValueError: `loss` is not a scalar, or depends on nothing that requires grad.
        RuntimeError: the tape has been walked before, or a value that it needs was changed in place.
    """
    backward_with_grad(loss)


def backward_with_hooks(
    loss: Tensor,
    hooks: Hooks | None = None,
    *,
    on_start: Callable[[Sequence[Parameter]], None] | None = None,
    on_grad_ready: Callable[[Parameter], None] | None = None,
    between_ops: Callable[[], None] | None = None,
) -> None:
    """Like `backward`, and call hooks on the way: see `Hooks`.

    `hooks` come first, then the ones given by keyword. An exception in a hook reaches the caller.
    """
    backward_with_grad(loss, hooks=(hooks or Hooks()) + Hooks(on_start, on_grad_ready, between_ops))


def backward_with_grad(output: Output, grad: Any = None, *, hooks: Hooks | None = None) -> None:
    """Propagate `grad`, the cotangent of `output`, to every leaf that `output` depends on.

    Args:
        output: any shape; without `grad` it must be a scalar. Or a sequence of tensors, walked as one tape.
        grad: array or number of the output's shape and dtype; not changed. One by default. Of several outputs,
            a sequence with one for each.
        hooks: see `Hooks`.
    """
    root, g = _root(output, grad)
    hooks = hooks or Hooks()
    with hooks.told_of_errors():
        _walk(collect(root), {root: g}, hooks, set())


def backward_input(output: Output, grad: Any = None, *, hooks: Hooks | None = None) -> DeferredGrads:
    """Do the input half (B) of a backward: gradients of data leaves only.

    Args:
        output, grad: as in `backward_with_grad`.
        hooks: only `between_ops` and `on_error` can fire here; parameters get their gradients in the weight half.
    Returns:
        What is left to do, for `backward_weight`.
    """
    root, g = _root(output, grad)
    nodes = collect(root)
    if root.weight_side:
        return DeferredGrads(nodes, {root: g})
    deferred = DeferredGrads([node for node in nodes if node.weight_side], {})
    data_side = [node for node in nodes if not node.weight_side]
    hooks = hooks or Hooks()
    with hooks.told_of_errors():
        _walk(data_side, {root: g}, hooks, deferred.versions, deferred)
    assert deferred.nodes is not None
    deferred.nodes.sort(key=node_order, reverse=True)
    return deferred


def backward_weight(deferred: DeferredGrads | Sequence[DeferredGrads], *, hooks: Hooks | None = None) -> None:
    """Do the weight half (W) of a backward: gradients of parameters, with the hooks of `backward_with_hooks`.

    Args:
        deferred: of one backward or of several. Several are walked side by side, so that a parameter is ready long
            before the end, with the same bits as one after the other.
    Raises:
        RuntimeError: called twice with the same `deferred`.
    """
    halves = (deferred,) if isinstance(deferred, DeferredGrads) else deferred
    tapes: list[list[Node]] = []
    cotangents: dict[Node, Array] = {}
    versions: set[Version] = set()
    for half in halves:
        nodes, half.nodes = half.nodes, None
        if nodes is None:
            raise RuntimeError("backward_weight: these deferred gradients were already computed")
        tapes.append(nodes)
        cotangents |= half.cotangents
        half.cotangents.clear()
        versions |= half.versions
    hooks = hooks or Hooks()
    with hooks.told_of_errors():
        _walk(_side_by_side(tapes), cotangents, hooks, versions)


@dataclass
class DeferredGrads:
    """The weight half of a backward that is still to be done.

    Attributes:
        nodes: newest first: weight-side nodes, and of each data-side one its edges into weights. None once done.
        cotangents: of those whose consumers are all done.
        versions: of all memory outside the tape that vjps may read.
    """

    nodes: list[Node] | None
    cotangents: dict[Node, Array]
    versions: set[Version] = field(default_factory=set)

    def add(self, node: Node, g: Array | None = None) -> None:
        """Leave a node to the weight half, with its cotangent where that is known."""
        assert self.nodes is not None
        self.nodes.append(node)
        if g is not None:
            self.cotangents[node] = g


def reached_parameters(output: Output) -> list[Parameter]:
    """Return the parameters that a backward from `output`, one or several, will reach, each once."""
    outputs = (output,) if isinstance(output, Tensor) else output
    nodes = dict.fromkeys(node for x in outputs if x.requires_grad for node in collect(_node(x)))
    return list(_of_parameters(_leaf_uses(sorted(nodes, key=node_order, reverse=True))))


def _seed(output: Tensor, grad: Any) -> Array:
    """Return the cotangent that a backward starts from, checked against the output."""
    if not output.requires_grad:
        raise ValueError("backward: the output depends on no tensor that requires grad")
    data = output._data
    xp = xp_of(data)
    if grad is None:
        if data.ndim:
            raise ValueError(f"backward without a grad needs a scalar output, got shape {data.shape}")
        return xp.ones_like(data)
    g = xp.asarray(grad, dtype=None if hasattr(grad, "dtype") else data.dtype)
    if g.shape != data.shape or g.dtype != data.dtype:
        raise ValueError(
            "the grad of an output must have its shape and dtype, "
            f"got {g.shape} {g.dtype} for {data.shape} {data.dtype}"
        )
    return g


def _root(output: Output, grad: Any) -> tuple[Node, Array]:
    """Return the node that a backward starts from, and its cotangent; several outputs get a node that joins them."""
    if isinstance(output, Tensor):
        return _node(output), _seed(output, grad)
    if not output or grad is None or len(grad) != len(output):
        raise ValueError(
            f"backward of {len(output)} outputs needs as many grads, got {0 if grad is None else len(grad)}"
        )
    seeds = [_seed(x, g) for x, g in zip(output, grad, strict=True)]
    weight_side = all(x.weight_side for x in output)
    parents = tuple([x.node or x for x in output])
    joined = Node("outputs", parents, tuple(_constant(g) for g in seeds), (), seeds[0].dtype, weight_side)
    return joined, seeds[0]  # the cotangent of the joining node itself is never read


def _node(output: Tensor) -> Node:
    """Return the node that made `output`; a leaf gets one that passes the cotangent on."""
    if output.node is not None:
        return output.node
    return Node("identity", (output,), (lambda g: g,), output.shape, output.dtype, output.weight_side)


def _leaf_uses(nodes: Sequence[Node]) -> dict[Tensor, int]:
    """Count for each leaf the edges that will bring it a contribution."""
    uses: dict[Any, int] = {}
    for node in nodes:
        for parent in node.parents or ():
            if type(parent) is not Node:
                uses[parent] = uses.get(parent, 0) + 1
    return uses


def _of_parameters(leaves: dict[Tensor, int]) -> dict[Parameter, int]:
    return {leaf: uses for leaf, uses in leaves.items() if isinstance(leaf, Parameter)}


def _side_by_side(tapes: Sequence[Sequence[Node]]) -> Sequence[Node]:
    """Interleave the nodes of tapes: a0 b0 c0 and a1 b1 c1 become a0 a1 b0 b1 c0 c1.

    Each parameter gets all contributions of one tape before those of the next, as if tapes were walked one after the
    other: sums keep their bits. Where a tape has several uses of a parameter, the next tape waits before its first.
    """
    if len(tapes) == 1:
        return tapes[0]
    uses_left = [_of_parameters(_leaf_uses(nodes)) for nodes in tapes]
    queues = [deque(nodes) for nodes in tapes]
    merged: list[Node] = []
    while any(queues):
        for index, queue in enumerate(queues):
            parents = (queue[0].parents or ()) if queue else ()
            if not queue or any(parent in uses for uses in uses_left[:index] for parent in parents):
                continue
            merged.append(queue.popleft())
            uses = uses_left[index]
            for parent in parents:
                if isinstance(parent, Parameter):
                    uses[parent] -= 1
                    if not uses[parent]:
                        del uses[parent]
    if len(set(merged)) < len(merged):
        raise RuntimeError(ALREADY_WALKED)
    return merged


def _walk(
    nodes: Sequence[Node],
    cotangents: dict[Node, Array],
    hooks: Hooks,
    versions: set[Version],
    deferred: DeferredGrads | None = None,
) -> None:
    """Run the vjps of `nodes`, newest first, and free each node on the way.

    Args:
        cotangents: of the nodes that have no consumer among `nodes`; emptied.
        versions: of memory outside the tape that vjps may read, beside that which `nodes` tell of; added to.
        deferred: if given, edges into weights are not followed but left here, as smaller nodes with their cotangents.
    """
    leaves = _leaf_uses(nodes)
    pending: dict[Any, int] = {}
    if deferred is None:
        pending.update(_of_parameters(leaves))
        if hooks.on_start is not None:
            hooks.on_start(tuple(pending))
    versions |= _versions(nodes, leaves)
    on_grad_ready, between_ops, op_hook = hooks.on_grad_ready, hooks.between_ops, current_hook()
    newest_change = _newest(versions)
    owned: set[Node] = set()  # nodes whose cotangent is an array that this walk made, so that it may add in place
    left = list(reversed(nodes))  # the next one is at the end
    while left:
        node = left.pop()
        g = cotangents.pop(node)
        if newest_change > node.number:
            _check_unchanged(node, versions)
        vjps = node.vjps
        if type(vjps) is Replay:
            left += _replay(node, g, cotangents, pending, between_ops, versions, deferred)
            newest_change = _newest(versions)
            continue
        edges: Iterable[Edge]
        if type(vjps) is tuple:
            edges = zip(node.parents, vjps, strict=True)  # type: ignore[arg-type]  # both are None once walked
            node.parents = node.vjps = None
        else:
            edges = _joint_edges(node, g, op_hook)
        if deferred is not None:
            edges = _defer_weights(node, edges, g, deferred)
        for parent, vjp in edges:
            if type(parent) is Node:
                c = vjp(g) if op_hook is None else op_hook.backward(node, vjp, g)
                if parent not in cotangents:
                    cotangents[parent] = c
                elif parent in owned:
                    have = cotangents[parent]
                    have += c
                else:
                    cotangents[parent] = cotangents[parent] + c
                    if parent.shape:  # a sum of 0-d arrays is a NumPy scalar, which cannot be added to in place
                        owned.add(parent)
                continue
            if type(vjp) is WeightVjp:
                take = partial(parent.accumulate_from, vjp.write)
                _ = take(g) if op_hook is None else op_hook.backward(node, take, g)
            else:
                c = vjp(g) if op_hook is None else op_hook.backward(node, vjp, g)
                if c.shape != parent._data.shape:
                    where = f"{parent.label} of shape {parent.shape}"
                    raise ValueError(f"{node.name}: a vjp gave shape {c.shape} to {where}")
                parent.accumulate_grad(c)
            if parent in pending:
                pending[parent] -= 1
                if not pending[parent] and on_grad_ready is not None:
                    _fire(on_grad_ready, parent)
                    newest_change = _newest(versions)
        if between_ops is not None:
            between_ops()
            newest_change = _newest(versions)


def _fire(on_grad_ready: Callable[[Parameter], None], parameter: Parameter) -> None:
    try:
        on_grad_ready(parameter)
    except Exception as error:
        error.add_note(f"in on_grad_ready of {parameter.label}")
        raise


def _joint_edges(node: Node, g: Array, op_hook: OpHook | None) -> Iterable[Edge]:
    """Take the edges off a node with a joint vjp, which runs here: each edge only hands its part over."""
    parents, joint = node.parents, node.vjps
    if parents is None or joint is None:  # two weight halves can meet in a node, such as one w.T for two outputs
        raise RuntimeError(ALREADY_WALKED)
    node.parents = node.vjps = None
    contributions = joint(g) if op_hook is None else op_hook.backward(node, joint, g)  # type: ignore[operator]
    return [(parent, _constant(c)) for parent, c in zip(parents, contributions, strict=True)]


def _constant(c: Array) -> Vjp:
    return lambda _: c


def _defer_weights(node: Node, edges: Iterable[Edge], g: Array, deferred: DeferredGrads) -> list[Edge]:
    """Leave the edges of `node` into weights to the weight half; return the other edges.

    The number stays, so that contributions arrive in the same order as in a whole backward.
    """
    edges = list(edges)
    weight_edges = [edge for edge in edges if edge[0].weight_side]
    if weight_edges:
        rest = copy(node)
        rest.parents, rest.vjps = zip(*weight_edges, strict=True)
        deferred.add(rest, g)
    return [edge for edge in edges if not edge[0].weight_side]


def _replay(
    node: Node,
    g: Array,
    cotangents: dict[Node, Array],
    pending: dict[Any, int],
    between_ops: Callable[[], None] | None,
    versions: set[Version],
    deferred: DeferredGrads | None,
) -> list[Node]:
    """Run a recomputed block's forward again and return the nodes that the walk has to go on with, oldest first.

    They take the place of `node`: its cotangent, its uses of parameters, and its place in the order.
    """
    parents, replay = node.parents, node.vjps
    if parents is None or not isinstance(replay, Replay):
        raise RuntimeError(ALREADY_WALKED)
    if deferred is not None and all(parent.weight_side for parent in parents):
        deferred.add(copy(node), g)  # no data waits for this block: all of it is weight work
        node.parents = node.vjps = None
        return []
    node.parents = node.vjps = None
    with enable_grad(), progressing(between_ops):
        output, since = replay.run()
    assert output.node is not None
    nodes = collect(output.node, since=since)
    leaves = _leaf_uses(nodes)
    versions |= _versions(nodes, leaves)
    for inner in nodes:
        inner.within = node_order(node)
    cotangents[output.node] = g
    if deferred is not None:
        for inner in nodes:
            if inner.weight_side:
                deferred.add(inner)
        return [inner for inner in reversed(nodes) if not inner.weight_side]
    for parameter, uses in _of_parameters(leaves).items():
        pending[parameter] = pending.get(parameter, 0) + uses
    for parent in parents:
        if parent in pending:
            pending[parent] -= 1
    return nodes[::-1]


def _versions(nodes: Iterable[Node], leaves: Iterable[Tensor]) -> set[Version]:
    """Return the versions of the memory outside a tape that its vjps may read: of leaves and of constants."""
    return {version for node in nodes for version in node.versions}.union([leaf.version for leaf in leaves])


def _newest(versions: set[Version]) -> int:
    return max([version.newest for version in versions], default=-1)


def _check_unchanged(node: Node, versions: Iterable[Version]) -> None:
    """Raise if a value that `node`'s vjps keep was changed in place since the forward."""
    for array in kept_arrays(node.vjps):
        for version in versions:
            name = version.since(node.number, array)
            if name is not None:
                rule = f"{node.name} needs {name} as it was in the forward"
                raise RuntimeError(f"{rule}, but it was changed in place since")
