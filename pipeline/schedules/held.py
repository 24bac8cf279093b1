"""What stages hold in bytes, and what a rank needs for those that it has, under a schedule.

`pipeline.runtime.memory` measures it; a file keeps it, for stages of one model cut in one way or in several:

    {"micro_batches": 8, "shards": 1, "stages": {"4": [{"weights": 1024, ...}, ...], "8": [...]}}
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from pipeline.schedules.action import Action, B, F, Kind, Placement, Skips, W
from pipeline.schedules.per_stage import PerStage, each
from pipeline.schedules.schedule import Schedule
from pipeline.schedules.simulate import simulate
from pipeline.schedules.timeline import Changes, Timed, Timeline, changes_of
from pipeline.schedules.words import counted

T = TypeVar("T")


class Gift(NamedTuple):
    """What a stage gives to the next one, or by a skip connection to a later one, of one micro-batch.

    Attributes:
        taker: the stage that takes it.
        size: its bytes.
        kept: those of them that the giver keeps for its B anyway, so that they are in its activations.
        taken: those that the taker keeps for its own; on one rank that is the same memory.
        kept_later, taken_later: those of them that each keeps for W too.
    """

    taker: int
    size: float
    kept: float = 0
    taken: float = 0
    kept_later: float = 0
    taken_later: float = 0


@dataclass(frozen=True)
class StageBytes:
    """What one stage holds, in bytes.

    Attributes:
        weights, gradients: of its parameters.
        optimizer: state of the rule.
        activations: what one micro-batch keeps from F to B, its input included.
        deferred: what it keeps from B to W.
        forward, backward_input, backward_weight, backward: the most that F, B, W and BW need while they run, beside
            what is held before; of what they get they have a copy, as if it came from another rank.
        message: its input, for which a receive is posted while the action before runs.
        gifts: what it gives to the next stage, if there is one, and then by skip connections.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    deferred: int
    forward: int
    backward_input: int
    backward_weight: int
    backward: int
    message: int
    gifts: tuple[Gift, ...] = ()

    @property
    def sent_on(self) -> float:
        """What it gives to other stages, of one micro-batch, and gets the gradients of."""
        return sum(gift.size for gift in self.gifts)

    @property
    def working(self) -> float:
        """The most that any action needs beside what is held before it and after it."""
        forward = self.forward - self.activations - self.sent_on
        backward_input = self.backward_input - max(0, self.deferred + self.message - self.activations)
        return max(0, forward, backward_input, self.backward_weight, self.backward)

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
        for rank, static in enumerate(self._static(num_stages, rank_of, num_ranks)):
            own = [stage for s, stage in enumerate(stages) if rank_of(s, num_ranks) == rank]
            posted = max(max(stage.message, stage.sent_on) for stage in own)
            held.append(static + max(stage.working for stage in own) + posted)
        return held

    def _static(self, num_stages: int, rank_of: Placement, num_ranks: int) -> list[float]:
        held = [0.0] * num_ranks
        for s, stage in enumerate(self.stages_of(num_stages)):
            held[rank_of(s, num_ranks)] += stage.static(num_shards=self.num_shards)
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
            skips, skip_bytes: what waits for later stages, in place of the model's own skip connections; all of it
                comes on top of the activations.
        """
        stages = self.stages_of(num_stages)
        gifts = [(s, gift) for s, stage in enumerate(stages) for gift in stage.gifts[: 1 if skips else None]]
        sizes = each("skip_bytes", skip_bytes, len(skips), "skips")
        gifts += [(giver, Gift(taker, size)) for (giver, taker), size in zip(skips, sizes, strict=True)]
        changes = _passing(timeline, gifts)
        for rank, row in enumerate(timeline.rows):
            changes[rank] += changes_of(row, [s.activations for s in stages], [s.deferred for s in stages])
            changes[rank] += _working(row, stages, gifts, lambda stage: rank_of(stage, len(timeline.rows)))
        static = self._static(num_stages, rank_of, len(timeline.rows))
        return [a + _most(own) for a, own in zip(static, changes, strict=True)]

    def activations(self, num_stages: int, *, own: bool = True) -> list[float]:
        """Return what a micro-batch keeps on each stage from F to B.

        Args:
            own: whether what waits there for the model's own skip connections is in it. That is taken before B; here
                it stays until then, which is at most a little more.
        """
        stages = self.stages_of(num_stages)
        return [
            float(stage.activations + sum(gift.size - gift.kept for gift in stage.gifts[1:] if own)) for stage in stages
        ]


def with_skips(activations: PerStage, num_stages: int, skips: Skips, skip_bytes: PerStage) -> PerStage:
    """Return what a micro-batch keeps on each stage, with what waits there for later ones until its backward."""
    if not skips:
        return activations
    kept = list(each("activations", activations, num_stages, "stages"))
    for (giver, _), size in zip(skips, each("skip_bytes", skip_bytes, len(skips), "skips"), strict=True):
        kept[giver] += size
    return kept


def _passing(timeline: Timeline, gifts: Sequence[tuple[int, Gift]]) -> list[Changes]:
    """Return what each rank of a timeline holds of what stages give each other, beside their activations.

    A forward's result, and then its gradient on the way back, is there from its end until the action that takes it
    starts, which holds its inputs itself. What was sent to another rank stays until the next message of its kind goes:
    only then does a rank look whether it has left. On one rank, giver and taker keep the same memory.

    Args:
        gifts: with the stage that gives each.
    """
    changes: list[Changes] = [[] for _ in timeline.rows]
    when = {part: (rank, t) for rank, row in enumerate(timeline.rows) for t in row for part in t.action.parts}
    sent: dict[tuple[int, Kind], set[float]] = defaultdict(set)  # when a rank sends its messages of each kind
    passed = []  # what was made, what takes it, bytes held meanwhile
    for giver, gift in gifts:
        for i in {part.microbatch for part in when if part.stage == gift.taker}:
            ways = [(F(giver, i), F(gift.taker, i), gift.size - gift.kept)]
            if B(gift.taker, i) in when:
                ways.append((B(gift.taker, i), B(giver, i), gift.size))
            if when[F(giver, i)][0] == when[F(gift.taker, i)][0]:
                changes[when[F(giver, i)][0]] += _shared(giver, gift, i, lambda part: when[part][1])
            else:
                for made, _, _ in ways:
                    sent[when[made][0], made.kind].add(when[made][1].end)
            passed += ways
    times = {key: sorted(ends) for key, ends in sent.items()}
    for made, takes, size in passed:
        (rank, first), (dest, second) = when[made], when[takes]
        until = second.start
        if rank != dest:
            ends = times[rank, made.kind]
            after = bisect_right(ends, first.end)
            until = max(until, ends[after] if after < len(ends) else timeline.makespan)
        changes[rank] += [(first.end, size), (until, -size)]
    return changes


def _shared(giver: int, gift: Gift, i: int, when: Callable[[Action], Timed]) -> Changes:
    """Return what a rank holds less where giver and taker of one micro-batch keep the same memory."""
    try:
        taken, given, weights = when(B(gift.taker, i)).end, when(B(giver, i)).end, when(W(gift.taker, i)).end
        last = min(weights, when(W(giver, i)).end)
    except KeyError:  # no backward follows, so nothing is kept
        return []
    changes = []
    for since, until, both in (
        (when(F(gift.taker, i)).start, taken, min(gift.kept, gift.taken)),
        (taken, min(given, weights), min(gift.kept, gift.taken_later)),
        (given, max(given, last), min(gift.kept_later, gift.taken_later)),
    ):
        changes += [(since, -both), (until, both)]
    return changes


def _working(
    row: Sequence[Timed],
    stages: Sequence[StageBytes],
    gifts: Sequence[tuple[int, Gift]],
    owner: Callable[[int], int],
) -> Changes:
    """Return what the actions of a rank need while they run, and what receives are posted for while others do."""
    needs = {
        Kind.F: [stage.forward for stage in stages],
        Kind.B: [stage.backward_input for stage in stages],
        Kind.W: [stage.backward_weight for stage in stages],
        Kind.BW: [stage.backward for stage in stages],
    }
    posted: dict[tuple[Kind, int], float] = defaultdict(float)
    for giver, gift in gifts:
        if owner(giver) != owner(gift.taker):
            posted[Kind.F, gift.taker] += gift.size
            posted[Kind.B, giver] += gift.size
            posted[Kind.BW, giver] += gift.size
    changes: Changes = []
    before = 0.0
    for action, start, end in row:
        buffers = sum(posted[single.kind, single.stage] for single in action.singles)
        working = sum(needs[single.kind][single.stage] for single in action.singles)
        changes += [(before, buffers), (start, -buffers), (start, working), (end, -working)]
        before = start
    return changes


def _most(changes: Changes) -> float:
    """Return the most that is held at a time, when all that changes at one time has."""
    held = most = 0.0
    for _, own in groupby(sorted(changes), key=lambda entry: entry[0]):
        held += sum(more for _, more in own)
        most = max(most, held)
    return most


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
        raise ValueError(f"{schedule.name} has {counted(num_stages, 'stage')}, got {len(stages)}")
    timeline = simulate(schedule.orders(num_ranks, num_microbatches), num_stages=num_stages)
    return Measured(lambda _: stages, num_shards).peaks(timeline, num_stages, schedule.rank_of)


def search_within(find: Callable[[float], T], excess: Callable[[T], float]) -> T:
    """Search, with less memory each time, until what ranks really hold fits.

    A search counts what micro-batches keep; what stages pass to each other depends on when they do it.

    Args:
        find: searches with so many bytes less on every rank.
        excess: by how many bytes what was found does not fit.
    Raises:
        ValueError: it still does not after a few searches.
    """
    reserve = 0.0
    for _ in range(4):
        found = find(reserve)
        over = excess(found)
        if over <= 1:
            return found
        reserve += over
    raise ValueError(f"no order was found that fits: what stages pass to each other takes {over:.0f} bytes too many")


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
