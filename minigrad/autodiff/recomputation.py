"""Recomputation (activation checkpointing): trade a second forward for the memory of the first one's residuals.

    forward    block -> output; its tape is looked at for the parameters in it, then dropped
    backward   the block runs again, and the tape that it records takes the place of the dropped one

To the tape a recomputed block is one node whose parents are the block's inputs and parameters. When the walk reaches
it, `walk.py` puts the new nodes in its place, so hooks, B/W halves and sums go on as if nothing had been
recomputed. Dropout draws the same masks, since it is keyed (`rng.py`).

Source: Chen et al. 2016, Training deep nets with sublinear memory cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minigrad import rng
from minigrad.autodiff.mode import replaying
from minigrad.autodiff.tape import Node, collect
from minigrad.autodiff.vjps import Replay
from minigrad.parameter import Parameter
from minigrad.tensor import Tensor, made_by
from minigrad.versions import tick


def recompute(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call `function(*args)` and keep none of its residuals.

    They are recomputed in the backward.

    Args:
        function: a module or function of tensors that gives one tensor, the same each time. Parameters may be captured.
        args: tensors, arrays and others. A tensor that needs a gradient must be passed here, not captured.
    Returns:
        The output. Its backward gives the gradients of a plain call, bit by bit, unless a parameter is used twice.
    Raises:
        ValueError: `function` uses a tensor with a gradient that is not among `args`.
    """
    scope = rng.current_scope()
    since = tick()
    output = function(*args)
    if output.node is None or output.node.number < since:
        return output  # nothing was recorded inside
    name = getattr(function, "__name__", type(function).__name__)
    inputs = {x.node or x for x in args if isinstance(x, Tensor) and x.requires_grad}
    nodes = collect(output.node, since=since)
    inside = set(nodes)
    parents = dict.fromkeys(parent for node in nodes for parent in node.parents or () if parent not in inside)
    for parent in parents:
        if parent not in inputs and not isinstance(parent, Parameter):
            what = parent.name if isinstance(parent, Node) else parent.label
            raise ValueError(f"recompute of {name}: it uses a tensor from outside ({what}); pass it as an argument")

    held = [_held(x) for x in args]

    def run() -> tuple[Tensor, int]:
        since = tick()
        with rng.replay(scope), replaying():
            return function(*held), since

    kept = [x for x in (*held, *parents) if isinstance(x, Tensor)]
    versions = {version for node in nodes for version in node.versions} | {x.version for x in kept}
    output.node = Node(
        "recompute",
        tuple(parents),
        Replay(run, [x.data for x in kept]),
        output.shape,
        output.dtype,
        output.weight_side,
        versions=tuple(versions),
    )
    return output


def _held(x: Any) -> Any:
    """Return an argument with its values of now: who has sent them off may let go of them before the replay."""
    if not isinstance(x, Tensor) or x.node is None:
        return x
    held = made_by(x.node, x.data, x.weight_side)
    held._version = x.version
    return held
