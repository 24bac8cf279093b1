"""Shards: where a bucket is cut so that each rank has a part of it, and how the parts travel.

reduce_to_shards    whole on every rank   ->  the sum of its own shard on each
average_to_shards   the same, of equal shares by which nothing is multiplied yet
gather_shards       its own on each       ->  all shards on every rank
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from distributed.comm.communicator import Array, Communicator, Work
from distributed.comm.work import JoinedWork
from minigrad.flat_range import FlatRange
from minigrad.parameter import Parameter


def even_bounds(part: FlatRange, num_ranks: int) -> list[int]:
    """Return where each rank's share of a bucket begins: equal ones, and the last rank has the rest; and the end."""
    share = (part.stop - part.start) // num_ranks
    return [part.start + rank * share for rank in range(num_ranks)] + [part.stop]


def whole_bounds(part: FlatRange, is_whole: Callable[[Parameter], bool], loads: list[int]) -> list[int]:
    """Return likewise where some parameters must not be cut: the least laden ranks get the most.

    Args:
        loads: elements that each rank has got so far; this bucket's are added.
    """
    level = (sum(loads) + part.stop - part.start) / len(loads)
    wanted = [max(level - load, 0.0) for load in loads]
    bounds, end = [part.start], 0.0
    for share in wanted[:-1]:
        end += share / max(sum(wanted), 1) * (part.stop - part.start)
        bounds.append(max(bounds[-1], _uncut(part, part.start + round(end), is_whole)))
    bounds.append(part.stop)
    for rank, (start, stop) in enumerate(pairwise(bounds)):
        loads[rank] += stop - start
    return bounds


def _uncut(part: FlatRange, place: int, is_whole: Callable[[Parameter], bool]) -> int:
    """Return a place, or the nearer end of the parameter that it would cut and that must not be."""
    for p in part.params:
        if p.start < place < p.stop and is_whole(p):
            return p.start if place - p.start < p.stop - place else p.stop
    return place


def reduce_to_shards(grad: Array, comm: Communicator) -> Work:
    """Sum gradients over ranks, each rank its own shard: a comm hook. The rest of the array is undefined afterwards."""
    even = grad.size - grad.size % comm.size
    works = [comm.reduce_scatter(grad[:even])] if even else []
    if even < grad.size:
        works.append(comm.allreduce(grad[even:]))
    return JoinedWork(works, lambda _: grad)


def average_to_shards(grad: Array, comm: Communicator) -> Work:
    """Reduce likewise what `comm_hooks.average` does."""
    even = grad.size - grad.size % comm.size
    works = [comm.average(grad[:even], everywhere=False)] if even else []
    if even < grad.size:
        works.append(comm.average(grad[even:]))
    return JoinedWork(works, lambda _: grad)


def gather_shards(buckets: Sequence[tuple[Array, Sequence[int] | None]], comm: Communicator) -> Work:
    """Collect the shards of all ranks in place; what is not this rank's own is undefined until the Work is done.

    Args:
        buckets: of each its values, and where each rank's shard of them begins, and the end, where not equal.
    """
    evens, works = [], []
    for values, bounds in buckets:
        if bounds is not None:
            shards = [values[start:stop] for start, stop in pairwise(bounds)]
            works += [comm.broadcast(own, root=root) for root, own in enumerate(shards) if own.size]
            continue
        even = values.size - values.size % comm.size
        if even:
            evens.append(values[:even])
        if even < values.size:
            works.append(comm.broadcast(values[even:], root=comm.size - 1))
    if evens:
        works.append(comm.allgather_in_place(*evens))
    return JoinedWork(works, lambda _: buckets[0][0])
