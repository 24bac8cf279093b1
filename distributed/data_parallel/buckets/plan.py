"""Where gradients are cut into buckets, and in which order these are launched at first. The same on every rank.

    flat.grad   | head | block3 | block2 | block1 | block0 | embed |      in the order that backward finishes them
    buckets     |--0---|--------1--------|--------2--------|---3---|

The first bucket is small so that communication starts early, the last one because nothing is left to hide it behind.

A bias comes before its weight here, and both are final at once, when an op's backward ends. So a bucket ends behind a
large gradient and never behind a small one, for which it would have to wait:

    gradients   | proj | fc's bias | fc | qkv's bias | qkv |
    buckets     |--0---|-------1--------|--------2---------|
"""

from __future__ import annotations

from collections.abc import Sequence

from minigrad.flat import FlatBuffer
from minigrad.flat_range import FlatRange
from minigrad.parameter import Parameter

MOST_BUCKET_BYTES = 25 << 20  # where nobody has asked for another size
EDGE_BUCKET_BYTES = 256 << 10  # of the first and the last bucket; smaller ones cost more in calls than they hide
LEAST_BUCKET_BYTES = 512 << 10  # of the others, where nobody has asked: launching 256 KiB costs more than it hides
SMALL_SHARE = 16  # of what a bucket may have; a gradient below that goes with the next one
MIN_NUM_BUCKETS = 16  # that a model is cut into, if this makes no bucket smaller than that: one bucket hides nothing


def default_bucket_bytes(params: Sequence[Parameter]) -> int:
    """Return how large a bucket of this model may become where nobody says it."""
    share_bytes = sum(p.data.nbytes for p in params) // MIN_NUM_BUCKETS
    return min(MOST_BUCKET_BYTES, max(LEAST_BUCKET_BYTES, share_bytes))


def plan_buckets(params: Sequence[Parameter], bucket_bytes: int, last: Sequence[Parameter] = ()) -> list[FlatRange]:
    """Cut the gradients of `params` into buckets, in launch order.

    A bucket lies within one contiguous range of one flat, so it has one dtype. Buckets are ordered by
    when backward finishes them: by their parameter that comes first in the model.

    Args:
        params: in model order.
        bucket_bytes: that a bucket has at most, but for one gradient that is larger, and small ones before it.
        last: of these, one bucket each, after all others.
    """
    FlatBuffer.adopt(params)  # together, before they are cut
    apart = set(last)
    parts = FlatBuffer.ranges_of(p for p in params if p not in apart)
    buckets = [FlatRange.over(run) for part in parts for run in _runs(part.params, bucket_bytes)]
    place = {p: i for i, p in enumerate(params)}

    def launch_order(bucket: FlatRange) -> int:
        return -min(place[p] for p in bucket.params)

    buckets.sort(key=launch_order)
    edge_bytes = min(bucket_bytes, EDGE_BUCKET_BYTES)
    if buckets:
        buckets[:1] = _split(buckets[0], len(_runs(buckets[0].params, edge_bytes)[0]))
        buckets[-1:] = _split(buckets[-1], -len(_last_run(buckets[-1].params, edge_bytes)))
        buckets.sort(key=launch_order)  # what is left of the last one may finish before its neighbours of another dtype
    return buckets + [part for p in last for part in FlatBuffer.ranges_of([p])]


def _runs(params: Sequence[Parameter], limit_bytes: int) -> list[tuple[Parameter, ...]]:
    """Cut parameters into runs of at most `limit_bytes`, each of whole units; a larger one is a run of its own."""
    runs: list[list[Parameter]] = []
    run_bytes = 0
    for unit in _units(params, limit_bytes // SMALL_SHARE):
        unit_bytes = sum(p.data.nbytes for p in unit)
        run_bytes += unit_bytes
        if not runs or run_bytes > limit_bytes:
            runs.append([])
            run_bytes = unit_bytes
        runs[-1] += unit
    return [tuple(run) for run in runs]


def _last_run(params: Sequence[Parameter], limit_bytes: int) -> list[Parameter]:
    """Return the longest run at the end of at most `limit_bytes`, of whole units: one, if that is larger."""
    run: list[Parameter] = []
    for unit in reversed(_units(params, limit_bytes // SMALL_SHARE)):
        if run and sum(p.data.nbytes for p in [*unit, *run]) > limit_bytes:
            break
        run = unit + run
    return run


def _units(params: Sequence[Parameter], small_bytes: int) -> list[list[Parameter]]:
    """Put small ones together with what comes after them."""
    units: list[list[Parameter]] = []
    is_open = False
    for p in params:
        if not is_open:
            units.append([])
        units[-1].append(p)
        is_open = sum(q.data.nbytes for q in units[-1]) < small_bytes
    return units


def _split(bucket: FlatRange, index: int) -> list[FlatRange]:
    """Cut a bucket in two before its parameter `index`; one if a part would be empty."""
    parts = (bucket.params[:index], bucket.params[index:])
    return [FlatRange.over(part) for part in parts if part]
