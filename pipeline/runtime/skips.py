"""Which stages a model's skip connections join, and what each of them carries.

    layers    a  .  b | .  b | .  a  a          "a" is given in stage 0 and taken twice in stage 2, "b" in stage 1
    stages        0   |   1  |    2             0-1 carries b, 0-2 carries a

A rank gets an array once. Where several of its stages take it, the first one gets it and hands it on to the next, which
costs nothing on one rank; so do their gradients, added up, on the way back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minigrad.nn.init import LayerFactory
from minigrad.nn.skips import skips_of
from pipeline.runtime.boundary import MAX_ARRAYS
from pipeline.runtime.partition import StageSpec
from pipeline.schedules.action import Placement

StageSkips = Mapping[tuple[int, int], tuple[str, ...]]
"""(stage that gives, stage that takes) -> the names of what goes there."""


def stage_skips(
    layers: Sequence[tuple[str, LayerFactory]], specs: Sequence[StageSpec], rank_of: Placement, num_ranks: int
) -> StageSkips:
    """Return the skip connections between the stages of a model, by giver and taker.

    Args:
        layers: of the whole model, by name.
        specs: which of them each stage has.
        rank_of: stage -> rank.
        num_ranks: of the pipeline.
    Raises:
        ValueError: as `skips_of`, or too many names go from one stage to another.
    """
    stage_of = [spec.stage_id for spec in specs for _ in range(spec.layer_start, spec.layer_stop)]
    between: dict[tuple[int, int], list[str]] = {}
    for name, giver, takers in skips_of(layers):
        has_it = {rank_of(stage_of[giver], num_ranks): stage_of[giver]}  # the last stage of a rank so far
        for taker in sorted({stage_of[taker] for taker in takers} - {stage_of[giver]}):
            rank = rank_of(taker, num_ranks)
            between.setdefault((has_it.get(rank, stage_of[giver]), taker), []).append(name)
            has_it[rank] = taker
    for (giver, taker), names in between.items():
        if len(names) > MAX_ARRAYS:
            raise ValueError(
                f"at most {MAX_ARRAYS} skip connections go from one stage to another, got {len(names)} from {giver} to "
                f"{taker}"
            )
    return {ends: tuple(between[ends]) for ends in sorted(between)}
