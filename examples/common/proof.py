"""What can be known of a schedule before a rank has started: whether it is right, and what it costs."""

from __future__ import annotations

from common.settings import PipelineSettings
from pipeline import Schedule, Timeline, check_deadlock_free, lower, simulate, validate


def proved(schedule: Schedule, settings: PipelineSettings, num_ranks: int, *, latency: float = 0.0) -> Timeline:
    """Prove that a schedule trains the model and cannot deadlock.

    Then it runs against a clock.

    Args:
        latency: of a message, in units of a forward's time. A backward takes two.
    Raises:
        ValueError: it is no schedule for so many ranks, layers and micro-batches; where a cell is at fault, a drawing
            marks it.
    """
    holds, rule = settings.fits(schedule, num_ranks)
    if not holds:
        raise ValueError(rule)
    orders = schedule.orders(num_ranks, settings.num_microbatches)
    num_stages = schedule.num_stages(num_ranks)
    validate(orders, num_stages=num_stages, num_microbatches=settings.num_microbatches, rank_of=schedule.rank_of)
    check_deadlock_free(
        lower(orders, rank_of=schedule.rank_of, num_stages=num_stages), rank_of=schedule.rank_of, num_stages=num_stages
    )
    return simulate(orders, num_stages=num_stages, latency=latency)
