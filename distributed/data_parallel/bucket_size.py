"""How large a bucket of gradients should be on this link: measured, and chosen from a model of one backward.

A backward of T seconds brings S bytes of gradients, evenly. They are cut into n = ceil(S / s) buckets of s bytes, the
last one smaller. Each launch holds the backward up for c seconds, and the link carries one bucket after another, in
a + b s seconds each:

    backward  |------c-----c------c------c------|---|           n launches make it T + n c
    buckets          [a + b s][a + b s]   [a + b s][last]       what is after T, launches included, is what a size costs
                     ready at T s / S + c

A bucket starts when it is ready and its predecessor is through. So the end is the latest, over the buckets k, of when k
is ready plus what k and all after it take: linear in k for the full ones, which leaves three that can be the latest,

    k = 1        T s / S + c                + n a + b S                 the link is never idle: latencies count
    k = n - 1    (n - 1) (T s / S + c)      + 2 a + b (s + last)        for n > 1
    k = n        T + n c                    + a + b last                all is hidden but the last one

Smaller buckets cost latencies and launches, and leave less at the end. On one host a message takes microseconds, and
launches alone keep buckets from becoming as small as can be. That the first and the last bucket are smaller
(`buckets/plan.py`), and that no gradient is cut, is left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from types import ModuleType

import numpy as np

from distributed.comm.communicator import Communicator
from minigrad.backend import synchronize, xp_of
from minigrad.parameter import Parameter

SMALLEST_BYTES = 4 << 10  # of a bucket, and of what is measured
LARGEST_BYTES = 4 << 20  # of what is measured
NUM_REPETITIONS = 5
SLOW_SECONDS = 0.02  # a message that takes longer is the last to be measured: the whole stays well under a second


@dataclass(frozen=True)
class Link:
    """What an allreduce costs.

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
            seconds: that an allreduce of each took.
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
            f"buckets of {self.bucket_bytes / 1024:,.0f} KiB: an allreduce takes {self.link.latency * 1e3:.3g} ms and "
            f"{seconds_a_mib * 1e3:.3g} ms a MiB, {self.link.launch * 1e3:.2g} ms of it in the call, beside a backward "
            f"of {self.backward_seconds * 1e3:.3g} ms"
        )


def choose_bucket_bytes(comm: Communicator, params: Sequence[Parameter], backward_seconds: float) -> BucketChoice:
    """Choose the bucket size that leaves least after the backward. Collective.

    It measures the link first.

    Args:
        comm: the ranks that average gradients; an allreduce is measured, whatever a comm hook sends instead.
        params: whose gradients are averaged.
        backward_seconds: how long they take to become final, one after the other; rank 0's counts.
    Returns:
        Rank 0's, on every rank.
    Raises:
        ValueError: backward_seconds of rank 0 is negative or not finite; the same on every rank.
    """
    link = measure_link(comm, xp_of(params[0].data) if params else np)
    seconds = comm.broadcast_object(backward_seconds)
    num_bytes = sum(p.data.nbytes for p in params)
    best = best_bucket_bytes(link, num_bytes, seconds)
    return comm.broadcast_object(BucketChoice(best, link, seconds))


def measure_link(comm: Communicator, xp: ModuleType = np) -> Link:
    """Return what an allreduce costs, as rank 0 measures it.

    Collective, under a second; the same on every rank.

    Args:
        xp: numpy or cupy, of the arrays that are reduced.
    """
    num_floats = LARGEST_BYTES // 4
    memory = comm.buffer(num_floats, np.float32) if xp is np else xp.zeros(num_floats, np.float32)
    sizes: list[int] = []
    seconds: list[float] = []
    launches: list[float] = []
    for num_bytes in _powers(SMALLEST_BYTES, LARGEST_BYTES, 4):
        array = memory[: num_bytes // 4]
        times = [_seconds_of_allreduce(comm, array) for _ in range(1 + NUM_REPETITIONS)][1:]  # ranks may come late
        sizes.append(num_bytes)
        launches.append(median(launch for launch, _ in times))
        seconds.append(comm.broadcast_object(median(whole for _, whole in times)))
        if seconds[-1] > SLOW_SECONDS and len(sizes) > 2:
            break
    return comm.broadcast_object(Link.fit(sizes, seconds, min(launches)))  # larger ones copy: that is no launch's


def best_bucket_bytes(link: Link, num_bytes: int, backward_seconds: float) -> int:
    """Return the size whose buckets add least to the backward.

    It is `SMALLEST_BYTES` at least. Tried are the sizes that cut all gradients into equal parts, in steps of a tenth of
    their number. Of equals the largest, which is fewest messages.

    Args:
        link: that they travel over.
        num_bytes: of gradients.
        backward_seconds: in which these become final.
    Raises:
        ValueError: one of them is negative or not finite.
    """
    _check("num_bytes", num_bytes)
    _check("backward_seconds", backward_seconds)

    def cost(size: int) -> tuple[float, int]:
        return added_seconds(size, link, num_bytes, backward_seconds), -size

    num_buckets = 1
    sizes: list[int] = []
    while not sizes or sizes[-1] > SMALLEST_BYTES:
        sizes.append(max(SMALLEST_BYTES, math.ceil(num_bytes / num_buckets)))
        num_buckets = max(num_buckets + 1, round(1.1 * num_buckets))
    return min(sizes, key=cost)


def added_seconds(bucket_bytes: int, link: Link, num_bytes: int, backward_seconds: float) -> float:
    """Return how long after a backward without launches all is reduced.

    The equations are in this file's docstring.

    Args:
        bucket_bytes: the size of a bucket.
        link: that it travels over.
        num_bytes: of all gradients.
        backward_seconds: of computing alone.
    """
    if num_bytes == 0:
        return 0.0
    num_buckets = math.ceil(num_bytes / bucket_bytes)
    last_bytes = num_bytes - (num_buckets - 1) * bucket_bytes
    ends = [backward_seconds + num_buckets * link.launch + link.latency + link.seconds_a_byte * last_bytes]
    if num_buckets > 1:
        between = backward_seconds * bucket_bytes / num_bytes + link.launch
        ends.append(between + num_buckets * link.latency + link.seconds_a_byte * num_bytes)
        last_two = 2 * link.latency + link.seconds_a_byte * (bucket_bytes + last_bytes)
        ends.append((num_buckets - 1) * between + last_two)
    return max(ends) - backward_seconds


def _seconds_of_allreduce(comm: Communicator, array: np.ndarray) -> tuple[float, float]:
    """Return how long the call takes, and how long all of it."""
    synchronize(array)
    start = time.perf_counter()
    work = comm.allreduce(array)
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
