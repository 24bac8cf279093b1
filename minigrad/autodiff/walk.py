"""The walk: one loop over the nodes of a tape, newest first, without recursion, that frees them as it goes.

A parameter is *ready* when the last of its pending uses is done, and its hook fires right there, between two vjps, so
that its gradient can travel to other ranks while the rest of the backward computes. Recomputed blocks are replayed in
their place, and the edges into weights can be left to the weight half (`deferred.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any

from minigrad.autodiff.deferred import DeferredGrads, defer_weights
from minigrad.autodiff.hooks import Hooks
from minigrad.autodiff.mode import OpHook, current_mode, enable_grad
from minigrad.autodiff.op_hooks import progressing
from minigrad.autodiff.tape import ALREADY_WALKED, Edge, Node, collect, leaf_uses, node_order, parameter_uses
from minigrad.autodiff.vjps import AddingVjp, Replay, WeightVjp, constant, kept_arrays
from minigrad.backend import Array
from minigrad.kernels import kernels_of
from minigrad.parameter import Parameter
from minigrad.tensor import Tensor
from minigrad.versions import Version


def walk(
    nodes: Sequence[Node],
    cotangents: dict[Node, Array],
    hooks: Hooks,
    versions: set[Version],
    deferred: DeferredGrads | None = None,
) -> Iterator[None]:
    """Run the vjps of `nodes`, newest first, and free each node on the way.

    Yields after each op, so that something else can run in between; `between_ops` comes after that.

    Args:
        cotangents: of the nodes that have no consumer among `nodes`; emptied.
        versions: of memory outside the tape that vjps may read, beside that which `nodes` tell of; added to.
        deferred: if given, edges into weights are not followed but left here, as smaller nodes with their cotangents.
    Raises:
        RuntimeError: a value that a vjp keeps was changed in place since the forward, or the tape was walked before.
        ValueError: a vjp gave a contribution of another shape than its leaf.
    """
    leaves = leaf_uses(nodes)
    pending: dict[Any, int] = {}
    if deferred is None:
        pending.update(parameter_uses(leaves))
        if hooks.on_start is not None:
            hooks.on_start(tuple(pending))
    versions |= _versions(nodes, leaves)
    on_grad_ready, between_ops, op_hook = hooks.on_grad_ready, hooks.between_ops, current_mode.get().hook
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
            # Of one length, as @op has seen to; both are None once walked. A keyword would cost as much as a vjp.
            edges = zip(node.parents, vjps)  # type: ignore[arg-type]  # noqa: B905
            node.parents = node.vjps = None
        else:
            edges = _joint_edges(node, g, op_hook)
        if deferred is not None:
            edges = defer_weights(node, edges, g, deferred)
        for parent, vjp in edges:
            if type(parent) is Node:
                if type(vjp) is AddingVjp and parent in cotangents:
                    onto = vjp.adding_to(cotangents[parent])
                    cotangents[parent] = onto(g) if op_hook is None else op_hook.backward(node, onto, g)
                    owned.add(parent)
                    continue
                c = vjp(g) if op_hook is None else op_hook.backward(node, vjp, g)
                if parent not in cotangents:
                    cotangents[parent] = c
                elif parent in owned:
                    have = cotangents[parent]
                    have += c
                else:
                    cotangents[parent] = kernels_of(c).add(cotangents[parent], c)
                    if parent.shape:  # a sum of 0-d arrays is a NumPy scalar, which cannot be added to in place
                        owned.add(parent)
                continue
            if type(vjp) is WeightVjp:
                take = partial(parent.accumulate_from, vjp.write)
                _ = take(g) if op_hook is None else op_hook.backward(node, take, g)
            else:
                if type(vjp) is AddingVjp and type(parent) is Tensor and parent.grad is not None:
                    vjp, parent.grad = vjp.adding_to(parent.grad), None  # as between nodes, so a cut shows in no bit
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
        yield
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
    return [(parent, constant(c)) for parent, c in zip(parents, contributions, strict=True)]


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
    leaves = leaf_uses(nodes)
    versions |= _versions(nodes, leaves)
    for inner in nodes:
        inner.within = node_order(node)
    cotangents[output.node] = g
    if deferred is not None:
        for inner in nodes:
            if inner.weight_side:
                deferred.add(inner)
        return [inner for inner in reversed(nodes) if not inner.weight_side]
    for parameter, uses in parameter_uses(leaves).items():
        pending[parameter] = pending.get(parameter, 0) + uses
    for parent in parents:
        if parent in pending:
            pending[parent] -= 1
    return nodes[::-1]


def _versions(nodes: Iterable[Node], leaves: Iterable[Tensor]) -> set[Version]:
    """Return the versions of the memory outside a tape that its vjps may read: of leaves and of constants."""
    return {version for node in nodes for version in node.versions}.union(
        [leaf._version or leaf.version for leaf in leaves]
    )


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
