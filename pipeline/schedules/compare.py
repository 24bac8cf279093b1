"""Schedules side by side: the same work on the same ranks, at one size or at many.

Numbers are of a rank: where a schedule has several stages a rank, each has its share of the time and of the memory.
Memory may be in bytes. Over replicas the gradients of a stage are reduced beside what is still to compute; what is left
of that at the end lengthens a step.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import product

from pipeline.schedules.action import Skips, check_skips
from pipeline.schedules.held import Measured, search_within
from pipeline.schedules.per_stage import PerStage
from pipeline.schedules.placed import problem_of
from pipeline.schedules.reductions import Reductions, end_of_step, hidden_share, reduce_beside
from pipeline.schedules.schedule import SCHEDULES, Schedule
from pipeline.schedules.search import search_placements
from pipeline.schedules.simulate import link_of_host, simulate
from pipeline.schedules.timeline import Timeline
from pipeline.schedules.validate import validate


@dataclass(frozen=True)
class Work:
    """What a micro-batch and a step cost on one rank.

    Attributes:
        overlap: of the two of a pair; see `simulate`.
        latency: time of a message to another rank, beside its bytes.
        message_bytes: between two stages; one number for all boundaries, or one for each.
        bandwidth: bytes of a message in a unit of time.
        ranks_per_host: the messages that leave a host share its link; 0 where no messages share one.
        activations: memory of a micro-batch from F to B.
        deferred: memory of it from B to W.
        static: memory that is always held: weights, their gradients, optimizer state.
        measured: bytes that stages hold, in place of activations, deferred and static.
        skips: connections between stages beside those of neighbours; each schedule must have these stages.
        skip_bytes: size of what one takes, which travels as a message and waits in memory; one number for all, or one
            for each.
        memory: what a rank has.
        gradient_bytes: gradients of a rank, to reduce over replicas; 0 where there is one replica.
        bucket_bytes, reduction_latency, reduction_bandwidth: see `Reductions`.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    overlap: float = 0.0
    latency: float = 0.0
    message_bytes: PerStage = 0.0
    bandwidth: float = math.inf
    ranks_per_host: int = 0
    activations: float = 1.0
    deferred: float = 0.0
    static: float = 0.0
    measured: Measured | None = None
    skips: Skips = ()
    skip_bytes: PerStage = 0.0
    memory: float = math.inf
    gradient_bytes: float = 0.0
    bucket_bytes: float = math.inf
    reduction_latency: float = 0.0
    reduction_bandwidth: float = math.inf


@dataclass(frozen=True)
class Result:
    """What a schedule costs at one size.

    Attributes:
        bubble: idle time of the busiest rank until the end of everything, as a ratio to its work.
        span_bubble: the largest idle share of a rank's span.
        peak_memory: the most that a rank holds, `static` included.
        fits: whether every rank has so much memory.
        with_reductions: the makespan, and what of the reductions over replicas comes after it.
        hidden: the share of their time that lengthens nothing, on the worst rank; 1 where nothing is reduced.
        latency, bandwidth, memory: of the work.
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
    hidden: float
    latency: float
    bandwidth: float
    memory: float


def timeline_of(schedule: Schedule, num_ranks: int, num_microbatches: int, work: Work) -> Timeline:
    """Simulate a schedule at one size.

    Raises:
        ValueError: it does not allow this size, or the work has a number out of its range.
    """
    share = 1 / schedule.num_chunks
    return simulate(
        schedule.orders(num_ranks, num_microbatches),
        num_stages=schedule.num_stages(num_ranks),
        forward=work.forward * share,
        backward_input=work.backward_input * share,
        backward_weight=work.backward_weight * share,
        overlap=work.overlap,
        latency=work.latency,
        message_bytes=work.message_bytes,
        bandwidth=work.bandwidth,
        link_of=link_of_host(work.ranks_per_host) if work.ranks_per_host else None,
        skips=work.skips,
        skip_bytes=work.skip_bytes,
    )


def peaks_of(schedule: Schedule, timeline: Timeline, work: Work) -> list[float]:
    """Return the most that each rank holds in a timeline of a schedule."""
    if work.measured is not None:
        num_stages = schedule.num_stages(len(timeline.rows))
        return work.measured.peaks(timeline, num_stages, schedule.rank_of, skips=work.skips, skip_bytes=work.skip_bytes)
    share = 1 / schedule.num_chunks
    peaks = timeline.peak_memory(
        work.activations * share, work.deferred * share, skips=work.skips, skip_memory=work.skip_bytes
    )
    return [work.static + peak for peak in peaks]


def measure(schedule: Schedule, num_ranks: int, num_microbatches: int, work: Work) -> Result:
    """Return what a schedule costs at one size.

    Raises:
        ValueError: as `timeline_of`.
    """
    return result_of(schedule, timeline_of(schedule, num_ranks, num_microbatches, work), num_microbatches, work)


def result_of(schedule: Schedule, timeline: Timeline, num_microbatches: int, work: Work) -> Result:
    """Return what a schedule costs whose timeline is known."""
    num_ranks = len(timeline.rows)
    peak = max(peaks_of(schedule, timeline, work))
    reductions = Reductions(
        work.gradient_bytes / schedule.num_chunks, work.bucket_bytes, work.reduction_latency, work.reduction_bandwidth
    )
    reduced = reduce_beside(timeline, reductions)
    return Result(
        schedule.name,
        num_ranks,
        num_microbatches,
        timeline.makespan,
        timeline.bubble_fraction,
        timeline.span_bubble_rate,
        peak,
        peak <= work.memory,
        end_of_step(timeline, reduced),
        hidden_share(timeline, reduced),
        work.latency,
        work.bandwidth,
        work.memory,
    )


def searched(
    num_ranks: int, num_microbatches: int, work: Work, *, seconds: float = 10.0, num_tries: int = 2000, seed: int = 0
) -> Schedule:
    """Search an order for some work, in the best of all placements.

    Links that messages share are no part of a search: there a message takes as long as it would alone.

    Raises:
        ValueError: as `search_placements`.
    """

    def find(reserve: float) -> Schedule:
        problem_in = partial(
            problem_of,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            forward=work.forward,
            backward_input=work.backward_input,
            backward_weight=work.backward_weight,
            latency=work.latency,
            message_bytes=work.message_bytes,
            bandwidth=work.bandwidth,
            activations=work.activations,
            deferred=work.deferred,
            static=work.static,
            memory=work.memory,
            measured=work.measured,
            skips=work.skips,
            skip_bytes=work.skip_bytes,
            reserve=reserve,
        )
        found = search_placements(problem_in, seconds=seconds, num_tries=num_tries, seed=seed, name="search")
        return next(iter(found.values())).schedule

    def excess(schedule: Schedule) -> float:
        if work.measured is None and not work.skips:
            return 0.0
        return max(peaks_of(schedule, timeline_of(schedule, num_ranks, num_microbatches, work), work)) - work.memory

    return search_within(find, excess)


Candidate = Schedule | Callable[[int, int, Work], Schedule]
"""A schedule, or how one is made for a size and its work, as by `searched`."""


def at_size(candidate: Candidate, num_ranks: int, num_microbatches: int, work: Work) -> Schedule:
    """Return the schedule that a candidate is at one size."""
    return candidate if isinstance(candidate, Schedule) else candidate(num_ranks, num_microbatches, work)


def sweep(
    candidates: Iterable[Candidate], ranks: Iterable[int], microbatches: Iterable[int], works: Iterable[Work]
) -> list[Result]:
    """Measure every schedule at every size that it allows, for every work.

    Args:
        ranks, microbatches: the numbers of each.
        works: they may differ in anything, as in links and memory.
    Raises:
        ValueError: no schedule allows any of these sizes: what the first one says.
    """
    sizes = list(product(ranks, microbatches, works))
    results = []
    refusals = []
    for candidate in candidates:
        for p, m, work in sizes:
            try:
                schedule = at_size(candidate, p, m, work)
                check_skips(work.skips, schedule.num_stages(p))
                orders = schedule.orders(p, m)
                if schedule is not SCHEDULES.get(schedule.name):  # those are known to be valid
                    validate(
                        orders,
                        num_stages=schedule.num_stages(p),
                        num_microbatches=m,
                        rank_of=schedule.rank_of,
                        trains=schedule.trains,
                    )
            except ValueError as rule:  # not this one: interleaved 1F1B takes whole rounds only
                refusals.append(rule)
                continue
            results.append(measure(schedule, p, m, work))
    if not results:
        raise refusals[0] if refusals else ValueError("a sweep needs a schedule and a size")
    return results


def to_csv(results: Sequence[Result]) -> str:
    """Write results as CSV, with a line of names first."""
    names = [field.name for field in fields(Result)]
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")  # a schedule may be named after a file with a comma
    writer.writerow(names)
    for result in results:
        values = (getattr(result, name) for name in names)
        writer.writerow(f"{value:.10g}" if isinstance(value, float) else value for value in values)
    return table.getvalue()
