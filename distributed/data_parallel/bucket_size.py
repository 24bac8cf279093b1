"""How large a bucket of gradients should be on this link: measured, and chosen from a model of one backward.

A backward of T seconds brings S bytes of gradients, evenly, in the buckets that a size cuts them into (`plan.py`: no
gradient is cut, and the edges are smaller). Each launch holds the backward up for c seconds, and the link carries one
bucket after another, in a + b s seconds one of s bytes, each once it is ready and its predecessor is through:

    backward  |------c-----c------c------c------|---|           n launches make it T + n c
    buckets          [a + b s][a + b s]   [a + b s][last]       what is after T, launches included, is what a size costs

Smaller buckets cost latencies and launches, and leave less at the end. On one host a message takes microseconds, and
launches alone keep buckets from becoming as small as can be. A comm hook's buckets are measured as it sends them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from types import ModuleType

import numpy as np

from distributed.comm.communicator import Array, Communicator
from distributed.data_parallel.buckets.plan import plan_buckets
from distributed.data_parallel.comm_hooks import CommHook, allreduce
from distributed.data_parallel.compression.feedback import FeedbackHook
from minigrad.backend import synchronize, xp_of
from minigrad.flat import FlatBuffer
from minigrad.flat_range import FlatRange
from minigrad.parameter import Parameter

SMALLEST_BYTES = 4 << 10  # of a bucket, and of what is measured
LARGEST_BYTES = 4 << 20  # of what is measured
NUM_REPETITIONS = 5
SLOW_SECONDS = 0.02  # a message that takes longer is the last to be measured: the whole stays well under a second


@dataclass(frozen=True)
class Link:
    """What it costs that a bucket travels.

    Attributes:
        latency: seconds, of one however small.
        seconds_a_byte: besides.
        launch: seconds that the call takes which starts one, and that nothing can be computed in.

    Raises:
        ValueError: one of them is negative or not finite.
    """

    latency: float
    seconds_a_byte: float
    launch: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _check(name, value)

    @classmethod
    def fit(cls, sizes: Sequence[int], seconds: Sequence[float], launch: float = 0.0) -> Link:
        """Return the line closest to what was measured.

        It has the least squares of the relative error. Of the absolute error the largest message would decide alone,
        and the latency would be its noise.

        Args:
            sizes: of the messages, in bytes.
            seconds: that each took.
            launch: seconds that the call took which started one.
        """
        times = np.maximum(seconds, 1e-9)  # a clock may stand still
        lines = np.stack([np.ones(len(times)), np.asarray(sizes, float)], axis=1) / times[:, None]
        latency, seconds_a_byte = np.linalg.lstsq(lines, np.ones(len(times)), rcond=None)[0]
        return cls(max(0.0, float(latency)), max(0.0, float(seconds_a_byte)), launch)


@dataclass(frozen=True)
class BucketChoice:
    """A bucket size, and what it was chosen for."""

    bucket_bytes: int
    link: Link
    backward_seconds: float

    def __str__(self) -> str:
        seconds_a_mib = self.link.seconds_a_byte * 2**20
        return (
            f"buckets of {self.bucket_bytes / 1024:,.0f} KiB: one takes {self.link.latency * 1e3:.3g} ms and "
            f"{seconds_a_mib * 1e3:.3g} ms a MiB, {self.link.launch * 1e3:.2g} ms of it in the call, beside a backward "
            f"of {self.backward_seconds * 1e3:.3g} ms"
        )


def choose_bucket_bytes(
    comm: Communicator, params: Sequence[Parameter], backward_seconds: float, comm_hook: CommHook = allreduce
) -> BucketChoice:
    """Choose the bucket size that leaves least after the backward. Collective.

    It measures the link first.

    Args:
        comm: the ranks that average gradients.
        params: whose gradients are averaged; they get their place in memory, as from DistributedDataParallel.
        backward_seconds: how long they take to become final, one after the other; rank 0's counts.
        comm_hook: how they will travel; one with a memory is left as it is.
    Returns:
        Rank 0's, on every rank.
    Raises:
        ValueError: backward_seconds of rank 0 is negative or not finite; the same on every rank.
    """
    link = measure_link(comm, xp_of(params[0].data) if params else np, comm_hook)
    seconds = comm.broadcast_object(backward_seconds)

    def cut(bucket_bytes: int) -> list[int]:
        return [_num_bytes(part) for part in plan_buckets(params, bucket_bytes)]

    return comm.broadcast_object(BucketChoice(best_bucket_bytes(link, cut, seconds), link, seconds))


def measure_link(comm: Communicator, xp: ModuleType = np, comm_hook: CommHook = allreduce) -> Link:
    """Return what it costs that a bucket travels, as rank 0 measures it.

    Collective, under a second; the same on every rank.

    Args:
        xp: numpy or cupy, of the arrays that are reduced.
        comm_hook: how they are.
    """
    sizes = _powers(SMALLEST_BYTES, LARGEST_BYTES, 4)
    if isinstance(comm_hook, FeedbackHook):
        comm_hook = comm_hook.anew()
        parts = [_bucket(num_bytes // 4, xp) for num_bytes in sizes]
        arrays = [part.grad for part in parts]
        comm_hook.attach_to(zip(arrays, parts, strict=True), comm)
    else:
        memory = comm.buffer(LARGEST_BYTES // 4, np.float32) if xp is np else xp.zeros(LARGEST_BYTES // 4, np.float32)
        arrays = [memory[: num_bytes // 4] for num_bytes in sizes]
    seconds: list[float] = []
    launches: list[float] = []
    for array in arrays:
        times = [_seconds_of(comm_hook, array, comm) for _ in range(1 + NUM_REPETITIONS)][1:]  # ranks may come late
        launches.append(median(launch for launch, _ in times))
        seconds.append(comm.broadcast_object(median(whole for _, whole in times)))
        if seconds[-1] > SLOW_SECONDS and len(seconds) > 2:
            break
    # Larger ones copy in the call: that is no launch's.
    return comm.broadcast_object(Link.fit(sizes[: len(seconds)], seconds, min(launches)))


def best_bucket_bytes(link: Link, cut: Callable[[int], Sequence[int]], backward_seconds: float) -> int:
    """Return the size whose buckets add least to the backward.

    It is `SMALLEST_BYTES` at least. Tried are the sizes that would cut all gradients into equal parts, in steps of a
    tenth of their number. Of equals the largest, which is fewest messages.

    Args:
        link: that they travel over.
        cut: gives the bytes of the buckets that a size makes, in their order.
        backward_seconds: in which gradients become final.
    Raises:
        ValueError: backward_seconds is negative or not finite.
    """
    _check("backward_seconds", backward_seconds)
    num_bytes = sum(cut(SMALLEST_BYTES))

    def cost(size: int) -> tuple[float, int]:
        return added_seconds(cut(size), link, backward_seconds), -size

    num_buckets = 1
    sizes: list[int] = []
    while not sizes or sizes[-1] > SMALLEST_BYTES:
        sizes.append(max(SMALLEST_BYTES, math.ceil(num_bytes / num_buckets)))
        num_buckets = max(num_buckets + 1, round(1.1 * num_buckets))
    return min(sizes, key=cost)


def added_seconds(sizes: Sequence[int], link: Link, backward_seconds: float) -> float:
    """Return how long after a backward without launches all is reduced; see this file's docstring.

    Args:
        sizes: of the buckets, in bytes, in the order in which they become ready.
        link: that they travel over.
        backward_seconds: of computing alone.
    """
    if not sizes:
        return 0.0
    num_bytes, before, end = sum(sizes), 0, 0.0
    for number, size in enumerate(sizes, start=1):
        before += size
        ready = backward_seconds * before / max(1, num_bytes) + number * link.launch
        end = max(ready, end) + link.latency + link.seconds_a_byte * size
    return end - backward_seconds


def _bucket(num_floats: int, xp: ModuleType) -> FlatRange:
    """Return a bucket of one matrix."""
    p = Parameter(xp.zeros((num_floats // 256, 256), np.float32), "measured")
    (part,) = FlatBuffer.adopt([p])
    return part


def _num_bytes(part: FlatRange) -> int:
    return int(part.flat.data.itemsize) * (part.stop - part.start)


def _seconds_of(comm_hook: CommHook, array: Array, comm: Communicator) -> tuple[float, float]:
    """Return how long the call takes, and how long all of it."""
    synchronize(array)
    start = time.perf_counter()
    work = comm_hook(array, comm)
    launched = time.perf_counter()
    work.wait()
    synchronize(array)
    return launched - start, time.perf_counter() - start


def _check(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be at least 0 and finite, got {value}")


def _powers(first: int, last: int, factor: int) -> list[int]:
    """Return first, first * factor, ... up to `last`."""
    powers = [first]
    while powers[-1] * factor <= last:
        powers.append(powers[-1] * factor)
    return powers
