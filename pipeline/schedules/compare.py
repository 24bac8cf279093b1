"""Schedules side by side: the same work on the same ranks, at one size or at many.

Numbers are of a rank: where a schedule has several stages a rank, each has its share of the time and of the memory.
Memory may be in bytes. Over replicas the gradients of a stage are reduced when its last weight half is done, beside
what is still to compute; a rank's reductions go one after the other. What is left of them at the end lengthens a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from pipeline.schedules.problem import Problem
from pipeline.schedules.schedule import Schedule
from pipeline.schedules.simulate import Timeline


@dataclass(frozen=True)
class Work:
    """What a micro-batch and a step cost on one rank.

    Attributes:
        latency: time of a message to another rank.
        activations: memory of a micro-batch from F to B.
        deferred: memory of it from B to W.
        static: memory that is always held: weights, their gradients, optimizer state.
        memory: what a rank has.
        reduction: time to reduce the gradients of a rank over replicas; 0 where there is one replica.
        reduction_latency: time that each reduction takes besides.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    latency: float = 0.0
    activations: float = 1.0
    deferred: float = 0.0
    static: float = 0.0
    memory: float = math.inf
    reduction: float = 0.0
    reduction_latency: float = 0.0


@dataclass(frozen=True)
class Result:
    """What a schedule costs at one size.

    Attributes:
        bubble: idle time of the busiest rank until the end of everything, as a ratio to its work.
        span_bubble: the largest idle share of a rank's span.
        peak_memory: the most that a rank holds, `static` included.
        fits: whether every rank has so much memory.
        with_reductions: the makespan, and what of the reductions over replicas comes after it.
    """

    schedule: str
    num_ranks: int
    num_microbatches: int
    makespan: float
    bubble: float
    span_bubble: float
    peak_memory: float
    fits: bool
    with_reductions: float


def measure(schedule: Schedule, num_ranks: int, num_microbatches: int, work: Work) -> Result:
    """Simulate a schedule at one size.

    Raises:
        ValueError: it does not allow this size, or the work has a number out of its range.
    """
    share = 1 / schedule.num_chunks
    orders = schedule.orders(num_ranks, num_microbatches)
    problem = Problem.of(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        rank_of=schedule.rank_of,
        num_stages=schedule.num_stages(num_ranks),
        forward=work.forward * share,
        backward_input=work.backward_input * share,
        backward_weight=work.backward_weight * share,
        latency=work.latency,
        activations=work.activations * share,
        deferred=work.deferred * share,
    )
    timeline = problem.simulate(orders)
    peak = work.static + max(problem.peaks(timeline))
    reduced = reductions_end(timeline, share * work.reduction, latency=work.reduction_latency)
    return Result(
        schedule.name,
        num_ranks,
        num_microbatches,
        timeline.makespan,
        timeline.bubble_fraction,
        timeline.span_bubble_rate,
        peak,
        peak <= work.memory,
        max(timeline.makespan, reduced) if work.reduction or work.reduction_latency else timeline.makespan,
    )


def reductions_end(timeline: Timeline, duration: float, *, latency: float = 0.0) -> float:
    """Return when the last rank has reduced its gradients over replicas, each stage's for so long.

    rank 0 |F0|F1|B0   |B1   |           one stage: nothing to hide behind
                             [reduce]
    rank 0 |...|1B0   |1B1   |0B0   |0B1   |        two: that of stage 1 is hidden
                             [reduce]      [reduce]
    """
    ends = []
    for row in timeline.rows:
        final = {action.stage: end for action, _, end in row}  # the last one of each stage
        done = 0.0
        for ready in sorted(final.values()):
            done = max(done, ready) + latency + duration
        ends.append(done)
    return max(ends)


def sweep(schedules: Iterable[Schedule], ranks: Iterable[int], microbatches: Iterable[int], work: Work) -> list[Result]:
    """Measure every schedule at every size that it allows.

    Args:
        ranks, microbatches: the numbers of each.
    """
    sizes = [(p, m) for p in ranks for m in microbatches]
    results = []
    for schedule in schedules:
        for num_ranks, num_microbatches in sizes:
            try:
                schedule.orders(num_ranks, num_microbatches)
            except ValueError:  # not this one: interleaved 1F1B takes whole rounds only
                continue
            results.append(measure(schedule, num_ranks, num_microbatches, work))
    return results


def to_csv(results: Sequence[Result]) -> str:
    """Write results as CSV, with a line of names first."""
    names = [field.name for field in fields(Result)]
    lines = [",".join(names)]
    for result in results:
        values = (getattr(result, name) for name in names)
        lines.append(",".join(f"{value:.10g}" if isinstance(value, float) else str(value) for value in values))
    return "\n".join([*lines, ""])
