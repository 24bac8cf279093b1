"""All that ranks wait for in a step of dp x pp, proved at once: messages, buckets of gradients, and what ends a step.

A rank launches its buckets in one order, each where the last backward of its stages has made it final:

    rank 0      0F0 ... 0BW3 | 0SEND ..     | bucket 0 is of stage 0, as in its replicas
    at the end  sends complete; tied gradients are summed over the pipeline; buckets with them; the losses are told

Here every reduction waits for the others where it is launched. That is stricter than those of DDP, which start there
and are waited for after the step; a comm_hook of one's own may be as strict. (A parameter that no backward reaches is
final sooner than said here.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.schedules.action import Action, Kind, Placement, Skips
from pipeline.schedules.deadlock import Collective, Step, check_deadlock_free
from pipeline.schedules.lower import lower

Bucket = tuple[int, ...]
"""The stages whose gradients are in a bucket; none where it is final only after the sums of tied gradients."""


@dataclass(frozen=True)
class Replica:
    """What the ranks of one pipeline do in a step.

    Attributes:
        orders: of every rank.
        buckets: of every rank, in the order in which it launches them.
        tied: groups of ranks that hold copies of the same parameters, in the order in which they sum.
    """

    orders: list[list[Action]]
    buckets: list[list[Bucket]]
    tied: list[tuple[int, ...]]

    @classmethod
    def by_stage(cls, orders: list[list[Action]]) -> Replica:
        """Return one with a bucket for each stage, the last one first, and nothing tied."""
        stages = [sorted({action.stage for action in order}, reverse=True) for order in orders]
        return cls(orders, [[(stage,) for stage in own] for own in stages], [])


def check_whole_step(replicas: Sequence[Replica], *, rank_of: Placement, num_stages: int, skips: Skips = ()) -> None:
    """Refuse pipelines side by side whose messages and reductions could make their ranks wait for each other.

    Args:
        replicas: rank p of replica k is rank k * P + p of all; ranks p reduce their buckets together.
    Raises:
        ScheduleError: as `check_deadlock_free`; ranks in it are of all replicas.
    """
    num_ranks = len(replicas[0].orders)
    steps: list[list[Step]] = []
    closing: list[list[Collective]] = []
    for number, replica in enumerate(replicas):
        first = number * num_ranks
        for rank, program in enumerate(lower(replica.orders, rank_of=rank_of, num_stages=num_stages, skips=skips)):
            copies = tuple(rank + k * num_ranks for k in range(len(replicas)))
            own, late = _with_buckets(program, replica.buckets[rank], copies)
            sums = [Collective("sum tied", tuple(first + r for r in group)) for group in replica.tied if rank in group]
            losses = Collective("tell losses", tuple(range(first, first + num_ranks)))
            steps.append(own)
            closing.append([*sums, *late, losses])
    check_deadlock_free(
        steps, rank_of=rank_of, num_stages=num_stages, skips=skips, num_replicas=len(replicas), closing=closing
    )


def _with_buckets(
    program: Sequence[Action], buckets: Sequence[Bucket], ranks: tuple[int, ...]
) -> tuple[list[Step], list[Collective]]:
    """Return a rank's program with its buckets where they are launched, and those that come after it."""
    last = {part.stage: i for i, action in enumerate(program) for part in action.parts if part.kind is Kind.W}
    launched: dict[int, list[Collective]] = {}
    late: list[Collective] = []
    place = -1
    for number, stages in enumerate(buckets):
        of = f"stage {', '.join(map(str, stages))}" if stages else "tied gradients"
        bucket = Collective(f"bucket {number} of {of}", ranks)  # replicas must agree on what is in it, too
        if late or not stages:
            late.append(bucket)
            continue
        place = max([place, *(last[stage] for stage in stages)])  # none before the one in front of it
        launched.setdefault(place, []).append(bucket)
    steps: list[Step] = []
    for index, action in enumerate(program):
        steps += [action, *launched.get(index, ())]
    return steps, late
