"""What a search is asked: the work and its times, where the stages are, and how much a rank may hold.

Times and memory may be in any unit. A link is what `simulate` makes of latency and bandwidth: a delay a boundary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from operator import add

from pipeline.schedules.action import Action, Placement
from pipeline.schedules.per_stage import PerStage, each
from pipeline.schedules.simulate import simulate
from pipeline.schedules.timeline import Timeline
from pipeline.schedules.words import amount

ROUNDING = 1e-9  # relative: sums of memory are compared with a limit, and times with each other, with a little room
_MOST_GRAINS = 1e6  # in a time, where sums of floats still tell them apart


@dataclass(frozen=True)
class Problem:
    """Micro-batches through stages on ranks.

    Attributes:
        rank_of: which rank owns a stage.
        forward, backward_input, backward_weight: time of F, B and W of one micro-batch, a stage.
        transfer: time of a message, a boundary between stages, that behind stage 0 first; 0 inside a rank.
        activations: memory that one micro-batch takes from F to B, a stage.
        deferred: memory that it takes from B to W, a stage.
        limit: memory that a rank may hold of both, a rank; inf where it does not matter.
    """

    num_ranks: int
    num_microbatches: int
    rank_of: Placement
    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    transfer: tuple[float, ...]
    activations: tuple[float, ...]
    deferred: tuple[float, ...]
    limit: tuple[float, ...]

    @classmethod
    def of(
        cls,
        *,
        num_ranks: int,
        num_microbatches: int,
        rank_of: Placement,
        num_stages: int,
        forward: PerStage = 1.0,
        backward_input: PerStage = 1.0,
        backward_weight: PerStage = 1.0,
        latency: PerStage = 0.0,
        activations: PerStage = 1.0,
        deferred: PerStage = 0.0,
        limit: PerStage = math.inf,
    ) -> Problem:
        """Make a problem from one number for all stages, or boundaries, or ranks, or from one for each.

        Args:
            latency: time from the end of an action until another rank has its result.
        Raises:
            ValueError: a number is missing or negative, a time is not above 0, or a rank cannot hold what one
                micro-batch takes on all its stages.
        """
        for name, count in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        owners = [rank_of(stage, num_ranks) for stage in range(num_stages)]
        if sorted(set(owners)) != list(range(num_ranks)):
            raise ValueError(f"every rank below {num_ranks} needs a stage, got stages on ranks {owners}")
        delays = each("latency", latency, num_stages - 1, "boundaries")
        problem = cls(
            num_ranks,
            num_microbatches,
            rank_of,
            each("forward", forward, num_stages, "stages", positive=True),
            each("backward_input", backward_input, num_stages, "stages", positive=True),
            each("backward_weight", backward_weight, num_stages, "stages", positive=True),
            tuple(delay if owners[s] != owners[s + 1] else 0.0 for s, delay in enumerate(delays)),
            each("activations", activations, num_stages, "stages"),
            each("deferred", deferred, num_stages, "stages"),
            each("limit", limit, num_ranks, "ranks", positive=True, infinite=True),
        )
        for rank, stages in enumerate(problem.stages_of_rank):
            least = sum(max(problem.activations[s], problem.deferred[s]) for s in stages)
            if least > problem.limit[rank] * (1 + ROUNDING):
                raise ValueError(
                    f"a rank must hold one micro-batch on each of its stages, which takes {amount(least)} on rank "
                    f"{rank}, got a limit of {amount(problem.limit[rank])}"
                )
        return problem

    @property
    def num_stages(self) -> int:
        """How many stages there are on all ranks."""
        return len(self.forward)

    @cached_property
    def stages_of_rank(self) -> list[list[int]]:
        """The stages of every rank, in order."""
        stages: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage in range(self.num_stages):
            stages[self.rank_of(stage, self.num_ranks)].append(stage)
        return stages

    def down(self, first: int, last: int) -> float:
        """Return the time from the start of a forward on one stage until its data is on a later one."""
        return self._downs[last] - self._downs[first]

    def up(self, first: int, last: int) -> float:
        """Return the time from the start of a backward on one stage until its gradient is on an earlier one."""
        return self._ups[first] - self._ups[last]

    @cached_property
    def _downs(self) -> list[float]:
        """The time from the first stage to each: bounds ask for the way between any two."""
        return list(accumulate(map(add, self.forward, self.transfer), initial=0.0))

    @cached_property
    def _ups(self) -> list[float]:
        """The time from each stage back to the first."""
        return list(accumulate(map(add, self.backward_input[1:], self.transfer), initial=0.0))

    def round_trip(self, stage: int, back_on: int) -> float:
        """Return the time from the start of a forward on a stage to that of the same backward on another, at least."""
        last = self.num_stages - 1
        return self.down(stage, last) + self.forward[last] + self.up(last, back_on)

    @cached_property
    def grain(self) -> float:
        """The largest number of which all times, and so all starts and ends, are multiples; 18.5 and 9 have 0.5."""
        times = (*self.forward, *self.backward_input, *self.backward_weight, *self.transfer)
        parts = [Fraction(str(time)) for time in times]  # as they were written: the float of 0.1 is another number
        denominator = math.lcm(*(part.denominator for part in parts))
        return math.gcd(*(int(part * denominator) for part in parts)) / denominator

    def rounded_up(self, time: float) -> float:
        """Return the least multiple of the grain that is not below a time: what an order can take."""
        if not time < _MOST_GRAINS * self.grain:
            return time
        return max(time, math.ceil(time / self.grain - 1 / _MOST_GRAINS) * self.grain)

    def shorter_than(self, time: float) -> float:
        """Return the longest time below another that an order can take, with a little room for rounding."""
        if not time < _MOST_GRAINS * self.grain:
            return time * (1 - ROUNDING)
        return (self.rounded_up(time) - self.grain) * (1 + ROUNDING)

    def simulate(self, orders: Sequence[Sequence[Action]]) -> Timeline:
        """Run orders of these stages against the clock."""
        return simulate(
            orders,
            num_stages=self.num_stages,
            forward=self.forward,
            backward_input=self.backward_input,
            backward_weight=self.backward_weight,
            message_bytes=self.transfer,  # in units of time, over a link that takes one a unit
            bandwidth=1.0,
        )

    def peaks(self, timeline: Timeline) -> list[float]:
        """Return the most that each rank holds."""
        return timeline.peak_memory(self.activations, self.deferred)

    def fits(self, timeline: Timeline) -> bool:
        """Tell whether no rank holds more than it may."""
        if min(self.limit) == math.inf:
            return True
        peaks = self.peaks(timeline)
        return all(peak <= limit * (1 + ROUNDING) for peak, limit in zip(peaks, self.limit, strict=True))
