"""What ranks did when, and what that costs in time and memory; `simulate` makes one, `measured` another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pipeline.schedules.action import Action, B, F, Kind, Skips
from pipeline.schedules.per_stage import PerStage, each

Changes = list[tuple[float, float]]
"""When what a rank holds changes, and by how much."""


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
        return self._busy[rank]

    @cached_property
    def _busy(self) -> list[float]:
        return [sum(end - start for _, start, end in row) for row in self.rows]

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
        return [round(_peak(changes_of(row, 1, 0), [])) for row in self.rows]

    @property
    def peak_microbatches_per_stage(self) -> list[int]:
        """The same for every stage alone; of several ranks that hold it, as replicas do, the one with the most."""
        peaks: dict[int, int] = {}
        for row in self.rows:
            rows: dict[int, list[Timed]] = {}
            for action, start, end in row:
                for single in action.singles:
                    rows.setdefault(single.stage, []).append(Timed(single, start, end))
            for stage, own in rows.items():
                peaks[stage] = max(peaks.get(stage, 0), round(_peak(changes_of(own, 1, 0), [])))
        return [peaks[stage] for stage in sorted(peaks)]

    def peak_memory(
        self,
        activations: PerStage,
        deferred: PerStage,
        *,
        skips: Skips = (),
        skip_memory: PerStage = 1.0,
    ) -> list[float]:
        """Return the most that each rank holds at a time.

        Args:
            activations: what one micro-batch keeps on one stage from F to B; one number for all, or one a stage.
            deferred: what it keeps from B to W; a full backward keeps nothing.
            skips: skip connections. What one takes waits on the rank that gave it, from F there to F where it is
                taken; its gradient on that rank, from B to B.
            skip_memory: what waits, of one micro-batch; one number for all, or one for each.
        """
        sizes = each("skip_memory", skip_memory, len(skips), "skips")
        waiting = self._waiting(dict(zip(skips, sizes, strict=True)))
        return [
            _peak(changes_of(row, activations, deferred), waits) for row, waits in zip(self.rows, waiting, strict=True)
        ]

    def _waiting(self, skips: Mapping[tuple[int, int], float]) -> list[Changes]:
        """Return when what waits for other stages changes on each rank, and by how much."""
        changes: list[Changes] = [[] for _ in self.rows]
        if not skips:
            return changes
        done = {part: (r, t.end) for r, row in enumerate(self.rows) for t in row for part in t.action.parts}
        microbatches = {part.microbatch for part in done}
        for (giver, taker), size in skips.items():
            for kind, made_in, taken_in in ((F, giver, taker), (B, taker, giver)):
                for i in microbatches:
                    if kind(taken_in, i) in done:
                        rank, since = done[kind(made_in, i)]
                        changes[rank] += [(since, size), (done[kind(taken_in, i)][1], -size)]
        return changes


def stages_in(row: Sequence[Timed]) -> set[int]:
    """Return the stages whose actions are in a row."""
    return {single.stage for timed in row for single in timed.action.singles}


def changes_of(row: Sequence[Timed], activations: PerStage, deferred: PerStage) -> Changes:
    """Return by how much what a rank keeps for backwards changes, and when."""
    done = [(end, single) for action, _, end in row for single in action.singles]  # of a pair both, when both are done
    backwards = (Kind.B, Kind.BW)
    with_backward = {(single.stage, single.microbatch) for _, single in done if single.kind in backwards}
    held: dict[int, tuple[float, float]] = {}
    for stage in {stage for stage, _ in with_backward}:
        kept = activations[stage] if isinstance(activations, Sequence) else activations
        later = deferred[stage] if isinstance(deferred, Sequence) else deferred
        held[stage] = kept, later
    changes = []
    for end, (kind, stage, microbatch, _, _) in done:
        if (stage, microbatch) in with_backward:
            kept, later = held[stage]
            match kind:
                case Kind.F:
                    changes.append((end, kept))
                case Kind.B:
                    changes.append((end, later - kept))
                case Kind.BW:
                    changes.append((end, -kept))
                case Kind.W:
                    changes.append((end, -later))
    return changes


def _peak(kept: Changes, waiting: Changes) -> float:
    """Return the most that is held at a time; at one time, what waits comes first, and of that what is made."""
    held = peak = 0.0
    changes = kept
    if waiting:
        changes = sorted([*sorted(waiting, key=lambda entry: (entry[0], -entry[1])), *kept], key=lambda entry: entry[0])
    for _, more in changes:
        held += more
        peak = max(peak, held)
    return peak
