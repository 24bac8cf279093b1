"""The weight half of a backward: what the input half leaves behind, and how several of them are walked at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field

from minigrad.autodiff.tape import ALREADY_WALKED, Edge, Node, leaf_uses, parameter_uses
from minigrad.backend import Array
from minigrad.parameter import Parameter
from minigrad.versions import Version


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


def defer_weights(node: Node, edges: Iterable[Edge], g: Array, deferred: DeferredGrads) -> list[Edge]:
    """Leave the edges of a node into weights to the weight half; return the others.

    The number stays, so that contributions arrive in the same order as in a whole backward.

    Args:
        node: whose vjps the walk is about to run.
        edges: out of it.
        g: the cotangent of its output.
        deferred: where the others are kept.
    """
    edges = list(edges)
    weight_edges = [edge for edge in edges if edge[0].weight_side]
    if weight_edges:
        rest = copy(node)
        rest.parents, rest.vjps = zip(*weight_edges, strict=True)
        deferred.add(rest, g)
    return [edge for edge in edges if not edge[0].weight_side]


def side_by_side(tapes: Sequence[Sequence[Node]]) -> Sequence[Node]:
    """Interleave the nodes of tapes: a0 b0 c0 and a1 b1 c1 become a0 a1 b0 b1 c0 c1.

    Each parameter gets all contributions of one tape before those of the next, as if tapes were walked one after the
    other: sums keep their bits. Where a tape has several uses of a parameter, the next tape waits before its first.

    Raises:
        RuntimeError: a tape was walked before.
    """
    if len(tapes) == 1:
        return tapes[0]
    uses_left = [parameter_uses(leaf_uses(nodes)) for nodes in tapes]
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
