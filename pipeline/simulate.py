"""When each action of a schedule runs, and what it costs in time and memory.

The model of a machine: a rank runs its order one action at a time; an action starts when its rank is free and its
inputs have arrived; what comes from another rank arrives `latency` after it was made; a send never blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.action import Action, Kind, ScheduleError

Time = float | Sequence[float]
"""One time for every stage, or one for each."""


class Timed(NamedTuple):
    """An action with its place in time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What every rank did when, in its order, from time 0 on.

    There are several "bubbles" in the literature; each one here says which it is.
    """

    rows: list[list[Timed]]

    @property
    def makespan(self) -> float:
        """End of the last action on any rank."""
        return max(row[-1].end for row in self.rows)

    def busy(self, rank: int) -> float:
        """Sum of the times of one rank's actions."""
        return sum(end - start for _, start, end in self.rows[rank])

    def span(self, rank: int) -> float:
        """Time from the start of a rank's first action to the end of its last."""
        return self.rows[rank][-1].end - self.rows[rank][0].start

    def makespan_bubble(self, rank: int) -> float:
        """Idle time of one rank, from 0 to the end of everything: makespan - busy."""
        return self.makespan - self.busy(rank)

    @property
    def span_bubble(self) -> float:
        """Idle time inside a rank's span, span - busy, of the rank that has most of it."""
        return max(self.span(rank) - self.busy(rank) for rank in range(len(self.rows)))

    @property
    def span_bubble_rate(self) -> float:
        """Largest idle share of any rank's span, (span - busy) / span.

        Where all ranks are equally busy, this is the "bubble rate" of the zero-bubble paper.
        """
        return max(1 - self.busy(rank) / self.span(rank) for rank in range(len(self.rows)))

    @property
    def ideal(self) -> float:
        """Busy time of the busiest rank: no order of the same work ends sooner."""
        return max(self.busy(rank) for rank in range(len(self.rows)))

    @property
    def bubble_fraction(self) -> float:
        """Ratio to ideal time, (makespan - ideal) / ideal.

        With equal stages it is (P - 1) / M for GPipe and 1F1B.
        """
        return (self.makespan - self.ideal) / self.ideal

    @property
    def efficiency(self) -> float:
        """Share of the makespan in which the busiest rank works, ideal / makespan."""
        return self.ideal / self.makespan

    @property
    def peak_microbatches(self) -> list[int]:
        """Per rank, the most micro-batches in flight: F has run, B or BW has not.

        A rank with several stages counts a micro-batch once for each stage that holds it.
        """
        return [_peak(row) for row in self.rows]

    @property
    def peak_microbatches_per_stage(self) -> list[int]:
        """The same for every stage alone."""
        rows: dict[int, list[Timed]] = {}
        for row in self.rows:
            for timed in row:
                rows.setdefault(timed.action.stage, []).append(timed)
        return [_peak(rows[stage]) for stage in sorted(rows)]


def _peak(row: Sequence[Timed]) -> int:
    held = peak = 0
    for action, _, _ in row:
        if action.kind is Kind.F:
            held += 1
        elif action.kind in (Kind.B, Kind.BW):
            held -= 1
        peak = max(peak, held)
    return peak


def walk(orders: Sequence[Sequence[Action]], num_stages: int) -> Iterator[tuple[int, Action]]:
    """Yield (rank, action) in an order in which everything finds its inputs done.

    Raises:
        ScheduleError: no rank can go on; its cells are where each one is stuck.
    """
    done: set[Action] = set()
    at = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order) and done.issuperset(order[at[rank]].needs(num_stages)):
                action = order[at[rank]]
                done.update(action.parts)
                at[rank] += 1
                moved = True
                yield rank, action
    stuck = [(rank, index) for rank, index in enumerate(at) if index < len(orders[rank])]
    if stuck:
        waits = []
        for rank, index in stuck:
            action = orders[rank][index]
            missing = [need for need in action.needs(num_stages) if need not in done]
            waits.append(f"rank {rank} is at {action} and needs {', '.join(map(str, missing))}")
        raise ScheduleError(f"no rank can go on: {'; '.join(waits)}", stuck)


def simulate(
    orders: Sequence[Sequence[Action]],
    *,
    num_stages: int,
    forward: Time = 1.0,
    backward_input: Time = 1.0,
    backward_weight: Time = 1.0,
    latency: float = 0.0,
) -> Timeline:
    """Run the orders against a clock.

    Args:
        orders: per rank, compute actions that `validate` accepts.
        forward, backward_input, backward_weight: time of F, B and W; BW takes B + W.
        latency: time from the end of an action until another rank has its result.
    Raises:
        ValueError: a time is not positive or not one a stage, latency is negative, a rank has nothing to do.
        ScheduleError: the orders cannot be run to their end.
    """
    for rank, order in enumerate(orders):
        if not order:
            raise ValueError(f"every rank needs at least one action, got none on rank {rank}")
    if not 0 <= latency < math.inf:
        raise ValueError(f"latency must be at least 0 and finite, got {latency}")
    times = {
        Kind.F: _per_stage("forward", forward, num_stages),
        Kind.B: _per_stage("backward_input", backward_input, num_stages),
        Kind.W: _per_stage("backward_weight", backward_weight, num_stages),
    }
    rows: list[list[Timed]] = [[] for _ in orders]
    made: dict[Action, tuple[int, float]] = {}  # what is done: on which rank, when
    for rank, action in walk(orders, num_stages):
        start = rows[rank][-1].end if rows[rank] else 0.0
        for need in action.needs(num_stages):
            maker, end = made[need]
            start = max(start, end if maker == rank else end + latency)
        end = start + sum(times[part.kind][action.stage] for part in action.parts)
        rows[rank].append(Timed(action, start, end))
        made.update(dict.fromkeys(action.parts, (rank, end)))
    return Timeline(rows)


def _per_stage(name: str, time: Time, num_stages: int) -> Sequence[float]:
    times = time if isinstance(time, Sequence) else [time] * num_stages
    if len(times) != num_stages:
        raise ValueError(f"{name} must be one time or one for each of {num_stages} stages, got {len(times)} times")
    if not all(0 < t < math.inf for t in times):
        raise ValueError(f"{name} must be positive and finite, got {time}")
    return times
