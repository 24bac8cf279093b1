"""Backward: walk a tape in reverse, accumulate gradients, and fire hooks when they are final.

    node 2: mean     ->  node 1: tanh  ->  node 0: matmul  ->  leaves w, x

Here is what users call; `walk.py` is the loop. Backward in two halves (zero-bubble pipelines): `backward_input`
computes only what data needs and leaves each edge into a weight behind as a smaller node; `backward_weight` walks
those. Whole equals B then W, bitwise.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

from minigrad.autodiff.deferred import DeferredGrads, side_by_side
from minigrad.autodiff.hooks import Hooks
from minigrad.autodiff.tape import Node, collect, leaf_uses, node_order, parameter_uses
from minigrad.autodiff.vjps import constant
from minigrad.autodiff.walk import walk
from minigrad.backend import Array, xp_of
from minigrad.habits import own_options
from minigrad.parameter import Parameter
from minigrad.tensor import Tensor
from minigrad.versions import Version
from minigrad.words import counted

Output = Tensor | Sequence[Tensor]
T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that is done a step at a time, and what it gives in the end."""


@own_options
def backward(loss: Tensor) -> None:
    """Compute the gradient of a scalar loss, and add it to the leaves' `.grad`.

    They are all leaves that it depends on. The tape is freed on the way.

    Raises:
        ValueError: `loss` is not a scalar, or depends on nothing that requires grad.
        RuntimeError: the tape has been walked before, or a value that it needs was changed in place.
    """
    backward_with_grad(loss)


@own_options
def backward_with_hooks(
    loss: Tensor,
    hooks: Hooks | None = None,
    *,
    on_start: Callable[[Sequence[Parameter]], None] | None = None,
    on_grad_ready: Callable[[Parameter], None] | None = None,
    between_ops: Callable[[], None] | None = None,
) -> None:
    """Run `backward`, and call hooks on the way: see `Hooks`.

    `hooks` come first, then the ones given by keyword. An exception in a hook reaches the caller.

    Args:
        loss: a scalar.
        hooks: a bundle of hooks, such as `ddp.hooks(...)`.
        on_start: called with the parameters that this backward will reach, before the first vjp.
        on_grad_ready: called with each of them when its gradient is final, between two vjps.
        between_ops: called after each op.
    """
    if any(hook is not None for hook in (on_start, on_grad_ready, between_ops)):
        hooks = Hooks.of(hooks) + Hooks(on_start, on_grad_ready, between_ops)
    backward_with_grad(loss, hooks=hooks)


def backward_with_grad(output: Output, grad: Any = None, *, hooks: Hooks | None = None) -> None:
    """Propagate a cotangent to every leaf that `output` depends on.

    Args:
        output: any shape; without `grad` it must be a scalar. Or a sequence of tensors, walked as one tape.
        grad: array or number of the output's shape and dtype; not changed. One by default. Of several outputs,
            a sequence with one for each.
        hooks: see `Hooks`.
    """
    to_the_end(backward_steps(output, grad, hooks=Hooks.of(hooks)))


def backward_steps(output: Output, grad: Any, *, hooks: Hooks) -> Steps[None]:
    """Do as `backward_with_grad`, one op at a time.

    Something else can run in between. It must change no value that the tape needs; with a `between_ops` hook it is
    refused when it does.

    Args:
        output: a tensor, or several.
        grad: its cotangent, of its shape; of several one for each.
        hooks: called on the way.
    """
    root, g = _root(output, grad, hooks.share)
    with hooks.told_of_errors():
        yield from walk(collect(root), {root: g}, hooks, set())


def backward_input(output: Output, grad: Any = None, *, hooks: Hooks | None = None) -> DeferredGrads:
    """Do the input half (B) of a backward: gradients of data leaves only.

    Args:
        output, grad: as in `backward_with_grad`.
        hooks: only `between_ops` and `on_error` can fire here; parameters get their gradients in the weight half.
    Returns:
        What is left to do, for `backward_weight`.
    """
    return to_the_end(backward_input_steps(output, grad, hooks=Hooks.of(hooks)))


def backward_input_steps(output: Output, grad: Any, *, hooks: Hooks) -> Steps[DeferredGrads]:
    """Do as `backward_input`, one op at a time, as `backward_steps` does.

    The generator returns what is left to do.

    Args:
        output, grad, hooks: see `backward_steps`.
    """
    root, g = _root(output, grad, hooks.share)
    nodes = collect(root)
    if root.weight_side:
        return DeferredGrads(nodes, {root: g})
    deferred = DeferredGrads([node for node in nodes if node.weight_side], {})
    data_side = [node for node in nodes if not node.weight_side]
    with hooks.told_of_errors():
        yield from walk(data_side, {root: g}, hooks, deferred.versions, deferred)
    assert deferred.nodes is not None
    deferred.nodes.sort(key=node_order, reverse=True)
    return deferred


def backward_weight(deferred: DeferredGrads | Sequence[DeferredGrads], *, hooks: Hooks | None = None) -> None:
    """Do the weight half (W) of a backward: gradients of parameters.

    It calls hooks as `backward_with_hooks` does.

    Args:
        deferred: of one backward or of several. Several are walked side by side, so that a parameter is ready long
            before the end, with the same bits as one after the other.
    Raises:
        RuntimeError: called twice with the same `deferred`.
    """
    halves = (deferred,) if isinstance(deferred, DeferredGrads) else deferred
    hooks = Hooks.of(hooks)
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
    with hooks.told_of_errors():
        to_the_end(walk(side_by_side(tapes), cotangents, hooks, versions))


def to_the_end(steps: Iterator[None]) -> Any:
    """Do all steps; return what a generator returns."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return end.value


def reached_parameters(output: Output) -> list[Parameter]:
    """Return the parameters that a backward from `output` will reach, each once.

    `output` is one tensor, or several.
    """
    outputs = (output,) if isinstance(output, Tensor) else output
    _check_tensors(outputs)
    nodes = dict.fromkeys(node for x in outputs if x.requires_grad for node in collect(_node(x)))
    return list(parameter_uses(leaf_uses(sorted(nodes, key=node_order, reverse=True))))


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


def _root(output: Output, grad: Any, share: float) -> tuple[Node, Array]:
    """Return the node that a backward starts from, and its cotangent; several outputs get a node that joins them.

    Args:
        share: that cotangents are multiplied by.
    """
    if isinstance(output, Tensor):
        return _node(output), _scaled(_seed(output, grad), share)
    _check_tensors(output)
    if not output or grad is None or len(grad) != len(output):
        raise ValueError(
            f"backward of {counted(len(output), 'output')} needs as many grads, got {0 if grad is None else len(grad)}"
        )
    seeds = [_scaled(_seed(x, g), share) for x, g in zip(output, grad, strict=True)]
    weight_side = all(x.weight_side for x in output)
    parents = tuple([x.node or x for x in output])
    joined = Node("outputs", parents, tuple(constant(g) for g in seeds), (), seeds[0].dtype, weight_side)
    return joined, seeds[0]  # the cotangent of the joining node itself is never read


def _check_tensors(outputs: Any) -> None:
    if not isinstance(outputs, (list, tuple)) or not all(isinstance(x, Tensor) for x in outputs):
        found = [type(x).__name__ for x in outputs] if isinstance(outputs, (list, tuple)) else type(outputs).__name__
        raise TypeError(f"a backward starts from a Tensor, or from several, got {found}")


def _scaled(g: Array, share: float) -> Array:
    return g if share == 1 else g * g.dtype.type(share)


def _node(output: Tensor) -> Node:
    """Return the node that made `output`; a leaf gets one that passes the cotangent on."""
    if output.node is not None:
        return output.node
    return Node("identity", (output,), (lambda g: g,), output.shape, output.dtype, output.weight_side)
