"""Gradients reduced over replicas while a step goes on: when each bucket is ready, under way and done.

A stage's gradients become final in its last weight half, or in the last ones, where several stand in a row and run side
by side: one parameter after the other, from the last to the first. They are cut into buckets, which a rank reduces one
after another, those of its last stage first, whatever is ready first: all replicas must agree on the order.

    rank 0      |... 1W0|0F1|0B0|0W0|
    stage 1         [a ][b ]                under way beside what is still to compute
    stage 0                       [a ][b ]  the last bucket has nothing left to hide behind
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.schedules.action import Kind
from pipeline.schedules.per_stage import PerStage
from pipeline.schedules.timeline import Timed, Timeline, stages_in

MOST_BUCKETS = 100_000  # of a stage: each is an entry of its own, on every rank


@dataclass(frozen=True)
class Reductions:
    """What reducing gradients costs.

    Attributes:
        gradient_bytes: of a stage; one number for all, or one for each.
        bucket_bytes: the most that a bucket holds.
        latency: time that each bucket takes besides its bytes.
        bandwidth: bytes that are reduced in a unit of time.
    """

    gradient_bytes: PerStage
    bucket_bytes: float = math.inf
    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        sizes = self.gradient_bytes if isinstance(self.gradient_bytes, Sequence) else [self.gradient_bytes]
        if not all(0 <= size < math.inf for size in sizes):
            raise ValueError(f"gradient_bytes must be at least 0 and finite, got {self.gradient_bytes}")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency must be at least 0 and finite, got {self.latency}")
        for name in ("bucket_bytes", "bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        most = max(sizes, default=0) / self.bucket_bytes
        if most > MOST_BUCKETS:
            raise ValueError(f"a stage must have at most {MOST_BUCKETS:,} buckets, got {most:,.0f}: make them larger")


class Reduction(NamedTuple):
    """One bucket of a stage: when its gradients are final, and when it is under way."""

    stage: int
    ready: float
    start: float
    end: float


def reduce_beside(timeline: Timeline, reductions: Reductions) -> list[list[Reduction]]:
    """Return what each rank reduces, in its order, beside the actions of a timeline."""
    return [_of_rank(row, reductions) for row in timeline.rows]


def end_of_step(timeline: Timeline, reduced: Sequence[Sequence[Reduction]]) -> float:
    """Return when everything is computed and reduced."""
    return max([timeline.makespan, *(row[-1].end for row in reduced if row)])


def hidden_share(timeline: Timeline, reduced: Sequence[Sequence[Reduction]]) -> float:
    """Return how much of the time of reductions does not lengthen a rank's part of the step, on the worst rank."""
    shares = [1.0]
    for row, own in zip(timeline.rows, reduced, strict=True):
        under_way = sum(end - start for _, _, start, end in own)
        if under_way > 0:
            shares.append(1 - max(0.0, own[-1].end - row[-1].end) / under_way)
    return min(shares)


def _of_rank(row: Sequence[Timed], reductions: Reductions) -> list[Reduction]:
    reduced: list[Reduction] = []
    free = 0.0
    for stage in sorted(stages_in(row), reverse=True):
        size = reductions.gradient_bytes
        size = size[stage] if isinstance(size, Sequence) else size
        if not size:
            continue
        begin, end = _window(row, stage)
        bucket = min(reductions.bucket_bytes, size)
        for number in range(math.ceil(size / bucket)):
            stop = min(size, (number + 1) * bucket)  # the parameters up to here are final when it is ready
            ready = begin + stop / size * (end - begin)
            start = max(ready, free)
            free = start + reductions.latency + (stop - number * bucket) / reductions.bandwidth
            reduced.append(Reduction(stage, ready, start, free))
    return reduced


def _window(row: Sequence[Timed], stage: int) -> tuple[float, float]:
    """Return from when until when the gradients of a stage become final."""
    weights = [i for i, (action, _, _) in enumerate(row) for p in action.parts if (p.stage, p.kind) == (stage, Kind.W)]
    if not weights:
        raise ValueError(f"reductions need a training step, got no backward of stage {stage}")
    last = weights[-1]
    first = last
    if row[last].action.kind is Kind.W:  # side by side with those right before it
        while first and row[first - 1].action.kind is Kind.W and row[first - 1].action.stage == stage:
            first -= 1
    return row[first].start, row[last].end
