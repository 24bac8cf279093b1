"""What a search is asked in one placement of stages, from what is known of a rank."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.schedules.action import Skips, check_skips
from pipeline.schedules.held import Measured, with_skips
from pipeline.schedules.per_stage import PerStage, each
from pipeline.schedules.problem import Problem
from pipeline.schedules.search import PLACEMENTS
from pipeline.schedules.words import amount


def problem_of(
    placement: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    forward: PerStage,
    backward_input: PerStage,
    backward_weight: PerStage,
    latency: float,
    activations: PerStage,
    deferred: PerStage,
    static: PerStage,
    memory: PerStage,
    message_bytes: PerStage = 0.0,
    bandwidth: float = 1.0,
    measured: Measured | None = None,
    skips: Skips = (),
    skip_bytes: PerStage = 0.0,
    reserve: float = 0.0,
) -> Problem:
    """Return the problem of a placement.

    Args:
        placement: a key of PLACEMENTS.
        forward, backward_input, backward_weight, activations, deferred: of a rank, which its stages share; or one for
            each stage.
        message_bytes: between two stages; one for all boundaries, or one for each.
        static, memory: what a rank always holds, and what it has; one for all ranks, or one for each.
        measured: bytes that stages hold, in place of activations, deferred and static.
        skips, skip_bytes: connections between stages beside those of neighbours; one size for all, or one for each.
        reserve: memory of each rank that is kept free.
    Raises:
        ValueError: a rank has no memory for micro-batches, numbers of stages are of another placement, or as
            `Problem.of` and `check_skips`.
    """
    num_chunks, rank_of = PLACEMENTS[placement]
    num_stages = num_chunks * num_ranks
    check_skips(skips, num_stages)
    kept, later = shared(activations, num_chunks), shared(deferred, num_chunks)
    if measured is not None:
        kept = measured.activations(num_stages, own=not skips)
        later = [float(stage.deferred) for stage in measured.stages_of(num_stages)]
        static = measured.always(num_stages, rank_of, num_ranks)
    has = each("memory", memory, num_ranks, "ranks", infinite=True)
    holds = each("static", static, num_ranks, "ranks")
    limit = [most - held - reserve for most, held in zip(has, holds, strict=True)]
    if min(limit) <= 0:
        got = " and ".join(" ".join(map(amount, dict.fromkeys(values))) for values in (has, holds))
        passed = f", and {amount(reserve)} for what stages pass to each other" if reserve else ""
        raise ValueError(f"memory must be more than what ranks hold beside their micro-batches, got {got}{passed}")
    sizes = each("message_bytes", message_bytes, num_stages - 1, "boundaries")
    return Problem.of(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        rank_of=rank_of,
        num_stages=num_stages,
        forward=shared(forward, num_chunks),
        backward_input=shared(backward_input, num_chunks),
        backward_weight=shared(backward_weight, num_chunks),
        latency=[latency + size / bandwidth for size in sizes],
        activations=with_skips(kept, num_stages, skips, skip_bytes),
        deferred=later,
        limit=limit,
    )


def shared(value: PerStage, num_chunks: int) -> PerStage:
    """Return numbers of stages, from these or from that of a rank."""
    return value if isinstance(value, Sequence) else value / num_chunks
