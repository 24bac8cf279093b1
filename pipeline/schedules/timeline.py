"""What ranks did when, and what that costs in time and memory; `simulate` makes one, `measured` another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.schedules.action import Action, B, F, Kind, Skips
from pipeline.schedules.per_stage import PerStage, each


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

        A rank with several stages counts a micro-batch once for each stage that holds it. A forward that no backward
        follows, as in evaluation, keeps nothing.
        """
        return [round(_peak(row)) for row in self.rows]

    @property
    def peak_microbatches_per_stage(self) -> list[int]:
        """The same for every stage alone; of several ranks that hold it, as replicas do, the one with the most."""
        peaks: dict[int, int] = {}
        for row in self.rows:
            stages = stages_in(row)
            for stage in stages:
                peak = round(_peak(row, [float(other == stage) for other in range(max(stages) + 1)]))
                peaks[stage] = max(peaks.get(stage, 0), peak)
        return [peaks[stage] for stage in sorted(peaks)]

    def peak_memory(
        self,
        activations: PerStage,
        deferred: PerStage,
        *,
        skips: Skips = (),
        skip_memory: PerStage = 1.0,
        skip_kept: PerStage = 0.0,
    ) -> list[float]:
        """Return the most that each rank holds at a time.

        Args:
            activations: what one micro-batch keeps on one stage from F to B; one number for all, or one a stage.
            deferred: what it keeps from B to W; a full backward keeps nothing.
            skips: skip connections. What one takes waits on the rank that gave it, from F there to F where it is
                taken; its gradient on that rank, from B to B.
            skip_memory: what waits, of one micro-batch; one number for all, or one for each.
            skip_kept: of that, what the stage that gives it keeps for its backward anyway, and `activations` has.
        """
        sizes = each("skip_memory", skip_memory, len(skips), "skips")
        kept = each("skip_kept", skip_kept, len(skips), "skips")
        waiting = self._waiting(dict(zip(skips, zip(sizes, kept, strict=True), strict=True)))
        return [_peak(row, activations, deferred, waits) for row, waits in zip(self.rows, waiting, strict=True)]

    def _waiting(self, skips: Mapping[tuple[int, int], tuple[float, float]]) -> list[list[tuple[float, float]]]:
        """Return when what waits for other stages changes on each rank, and by how much."""
        changes: list[list[tuple[float, float]]] = [[] for _ in self.rows]
        done = {part: (r, t.end) for r, row in enumerate(self.rows) for t in row for part in t.action.parts}
        for (giver, taker), (given, kept) in skips.items():
            for kind, made_in, taken_in, size in ((F, giver, taker, given - kept), (B, taker, giver, given)):
                for i in [part.microbatch for part in done if part == kind(taken_in, part.microbatch)]:
                    rank, since = done[kind(made_in, i)]
                    changes[rank] += [(since, size), (done[kind(taken_in, i)][1], -size)]
        return [
            sorted(own, key=lambda entry: (entry[0], -entry[1])) for own in changes
        ]  # at one time, what is made first


def stages_in(row: Sequence[Timed]) -> set[int]:
    """Return the stages whose actions are in a row."""
    return {single.stage for timed in row for single in timed.action.singles}


def _peak(
    row: Sequence[Timed],
    activations: PerStage = 1,
    deferred: PerStage = 0,
    waiting: Sequence[tuple[float, float]] = (),
) -> float:
    def change(part: Action) -> float:
        kept, later = (x[part.stage] if isinstance(x, Sequence) else x for x in (activations, deferred))
        return {Kind.F: kept, Kind.B: later - kept, Kind.W: -later}[part.kind]

    # Of a pair both are held, until its backward is done.
    done = [(end, single.parts) for action, _, end in row for single in action.singles]
    with_backward = {(part.stage, part.microbatch) for _, parts in done for part in parts if part.kind is Kind.B}
    kept = [
        (end, sum(change(part) for part in parts if (part.stage, part.microbatch) in with_backward))
        for end, parts in done
    ]
    held = peak = 0.0
    for _, more in sorted([*waiting, *kept], key=lambda entry: entry[0]):  # at the same time, what waits comes first
        held += more
        peak = max(peak, held)
    return peak
