"""What stages hold in bytes, and what a rank needs for those that it has, under a schedule.

`pipeline.runtime.memory` measures it; a file keeps it, for stages of one model cut in one way or in several:

    {"micro_batches": 8, "shards": 1, "stages": {"4": [{"weights": 1024, ...}, ...], "8": [...]}}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from pipeline.schedules.action import Placement, Skips
from pipeline.schedules.per_stage import PerStage
from pipeline.schedules.schedule import Schedule
from pipeline.schedules.simulate import simulate
from pipeline.schedules.timeline import Timeline


class Gift(NamedTuple):
    """What a stage gives by a skip connection, of one micro-batch.

    Attributes:
        taker: the stage that takes it.
        size: its bytes.
        kept: those of them that the giver keeps for its backward anyway, so that they are in its activations.
    """

    taker: int
    size: int
    kept: int


@dataclass(frozen=True)
class StageBytes:
    """What one stage holds, in bytes.

    Attributes:
        weights, gradients: of its parameters.
        optimizer: state of the rule.
        activations: what one micro-batch keeps from F to B, its input included.
        deferred: what it keeps from B to W.
        working: the most that an action needs besides, while it runs.
        message: its input, for which a receive is posted before it is needed.
        gifts: what it gives by skip connections, and waits on its rank until it is taken.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    deferred: int
    working: int
    message: int
    gifts: tuple[Gift, ...] = ()

    def static(self, *, num_shards: int = 1, sharded: Sequence[str] = ("optimizer",)) -> float:
        """Return what is held in any case.

        Args:
            num_shards: replicas that share what is sharded, a part each.
            sharded: which of weights, gradients and optimizer are.
        """
        names = ("weights", "gradients", "optimizer")
        unknown = [name for name in sharded if name not in names]
        if unknown or num_shards < 1:
            raise ValueError(f"{', '.join(names)} are shared by at least 1 shard, got {list(sharded)} and {num_shards}")
        return sum(getattr(self, name) / (num_shards if name in sharded else 1) for name in names)


@dataclass(frozen=True)
class Measured:
    """What the stages of a model hold, for as many stages as it is cut into.

    Attributes:
        stages_of: so many stages -> what each holds; a ValueError says that this was not measured.
        num_shards: replicas that share the optimizer's state.
    """

    stages_of: Callable[[int], Sequence[StageBytes]]
    num_shards: int = 1

    def always(self, num_stages: int, rank_of: Placement, num_ranks: int) -> list[float]:
        """Return what each rank holds beside its micro-batches: weights and their like, what an action works with."""
        stages = self.stages_of(num_stages)
        held = []
        for rank in range(num_ranks):
            own = [stage for s, stage in enumerate(stages) if rank_of(s, num_ranks) == rank]
            static = sum(stage.static(num_shards=self.num_shards) for stage in own)
            held.append(static + max(stage.working for stage in own) + max(stage.message for stage in own))
        return held

    def peaks(
        self,
        timeline: Timeline,
        num_stages: int,
        rank_of: Placement,
        *,
        skips: Skips = (),
        skip_bytes: PerStage = 0.0,
    ) -> list[float]:
        """Return the most bytes that each rank of a timeline holds.

        Args:
            skips, skip_bytes: what waits for later stages, in place of the model's own `gifts`; all of it comes on
                top of the activations.

        Not seen: messages under way (a U-Net of small layers under 1f1b held 7% more than is said), and that two
        stages of one rank share what passes between them (in a V it held 17% less).
        """
        stages = self.stages_of(num_stages)
        activations, deferred = [s.activations for s in stages], [s.deferred for s in stages]
        in_activations: PerStage = 0.0
        if not skips:
            gifts = {(s, gift.taker): gift for s, stage in enumerate(stages) for gift in stage.gifts}
            skips, skip_bytes = list(gifts), [gift.size for gift in gifts.values()]
            in_activations = [gift.kept for gift in gifts.values()]
        kept = timeline.peak_memory(
            activations, deferred, skips=skips, skip_memory=skip_bytes, skip_kept=in_activations
        )
        always = self.always(num_stages, rank_of, len(timeline.rows))
        return [a + b for a, b in zip(kept, always, strict=True)]

    def activations(self, num_stages: int) -> list[float]:
        """Return what a micro-batch keeps on each stage from F to B, with what waits there for later stages.

        That is taken before B; here it stays until then, which is at most a little more.
        """
        stages = self.stages_of(num_stages)
        return [float(stage.activations + sum(gift.size - gift.kept for gift in stage.gifts)) for stage in stages]


def rank_bytes(
    stages: Sequence[StageBytes], schedule: Schedule, *, num_ranks: int, num_microbatches: int, num_shards: int = 1
) -> list[float]:
    """Return the most bytes that each rank holds in a step.

    Args:
        num_shards: replicas that share the optimizer's state.
    Raises:
        ValueError: the schedule does not allow these sizes, or has another number of stages.
    """
    num_stages = schedule.num_stages(num_ranks)
    if len(stages) != num_stages:
        raise ValueError(f"{schedule.name} has {num_stages} stages, got {len(stages)}")
    timeline = simulate(schedule.orders(num_ranks, num_microbatches), num_stages=num_stages)
    return Measured(lambda _: stages, num_shards).peaks(timeline, num_stages, schedule.rank_of)


def to_json(stages: Mapping[int, Sequence[StageBytes]], *, num_microbatches: int, num_shards: int) -> str:
    """Write what was measured, by numbers of stages."""
    cuts = {str(count): [asdict(stage) for stage in cut] for count, cut in stages.items()}
    return json.dumps({"micro_batches": num_microbatches, "shards": num_shards, "stages": cuts}, indent=2)


def from_json(text: str, name: str) -> Measured:
    """Read it back.

    Args:
        name: of the file, for errors.
    Raises:
        ValueError: it is not such a file.
    """
    try:
        read: dict[str, Any] = json.loads(text)
        cuts = {int(count): [_stage(row) for row in cut] for count, cut in read["stages"].items()}
        num_shards = read["shards"]
        whole = isinstance(num_shards, int) and num_shards > 0 and all(len(cuts[count]) == count > 0 for count in cuts)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise ValueError(f"{name} is nothing that `python -m pipeline memory --json` writes")

    def stages_of(num_stages: int) -> list[StageBytes]:
        if num_stages not in cuts:
            raise ValueError(f"{name} has a model cut into {', '.join(map(str, cuts))} stages, and not {num_stages}")
        return cuts[num_stages]

    return Measured(stages_of, num_shards)


def _stage(row: Mapping[str, Any]) -> StageBytes:
    values = {field.name: row[field.name] for field in fields(StageBytes) if field.name != "gifts"}
    gifts = tuple(Gift(*gift) for gift in row.get("gifts", ()))  # which files of earlier versions have not
    numbers = [*values.values(), *(number for gift in gifts for number in gift)]
    if not all(isinstance(value, int) and value >= 0 for value in numbers):
        raise ValueError("bytes are whole numbers")
    return StageBytes(**values, gifts=gifts)
