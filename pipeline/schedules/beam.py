"""All orders at once, one start after another, of which only the most promising are kept.

    nothing started
    0F0                                      the first start
    0F0 0F1    0F0 1F0                       two that can follow it
    0F0 0F1 1F0    0F0 1F0 0F1    0F0 1F0 1B0    ...

What is promising is what can still become short (`partial`). Orders that can go on in the same ways are kept once, and
those that cannot become shorter than a given time not at all. Where no more than that was dropped, all orders have been
looked at: what was found is the shortest there is, and if nothing was found, nothing is shorter.

To wait is a choice like any other, so this finds what no rule does: to idle for what is not even on its way. How many
must be kept grows fast with the problem, so it is for small ones.
"""

from __future__ import annotations

import time
from heapq import nsmallest
from typing import NamedTuple

from pipeline.schedules.action import Action, Kind
from pipeline.schedules.partial import Partial, Partials
from pipeline.schedules.problem import Problem

MOST_ACTIONS = 400
"""How many actions a problem may have in all, for a beam that takes seconds to be wide enough."""

_KINDS = (Kind.F, Kind.B, Kind.W)
_LOOKS = 256  # at so many orders, between two looks at the clock


class Looked(NamedTuple):
    """What a look at many orders came to.

    Attributes:
        orders: the shortest that were found, if any.
        all: whether none was dropped that may be shorter.
        num_starts: actions that were started, over all orders.
    """

    orders: list[list[Action]] | None
    all: bool
    num_starts: int


def beam(problem: Problem, *, span: bool, width: int, below: float = float("inf"), end: float = float("inf")) -> Looked:
    """Look for an order that takes less than a given time.

    Args:
        span: whether the longest span of a rank is to be short, or the end of everything.
        width: how many orders with equally many starts are kept.
        below: look for what takes less.
        end: stop where `time.monotonic()` is beyond it.
    Cost: about 60 microseconds a start for 8 stages.
    """
    partials = Partials(problem, span=span)
    most = problem.shorter_than(below)
    kept = [partials.begin()]
    num_starts = 0
    # A span is known from counts and times only where each rank begins as soon as it can.
    dropped = span and [own[0] for own in problem.stages_of_rank] != list(range(problem.num_ranks))
    # Where W takes more memory than B frees, `Room` keeps more of it than some orders need.
    dropped = dropped or any(d > a for a, d in zip(problem.activations, problem.deferred, strict=True))
    for _ in range(partials.size):
        found: dict[tuple[object, ...], tuple[tuple[float, float], Partial]] = {}
        for partial in kept:
            for following in partials.next(partial):
                num_starts += 1
                if num_starts % _LOOKS == 0 and time.monotonic() > end:
                    return Looked(None, False, num_starts)
                value = partials.outlook(following)
                if value[0] <= most:
                    found.setdefault(partials.key(following), (value, following))
        dropped = dropped or len(found) > width
        kept = [partial for _, partial in nsmallest(width, found.values(), key=lambda item: item[0])]
        if not kept:
            return Looked(None, not dropped, num_starts)
    return Looked(_orders(partials, kept[0], problem), not dropped, num_starts)


def _orders(partials: Partials, partial: Partial, problem: Problem) -> list[list[Action]]:
    """Return what was started, a rank."""
    orders: list[list[Action]] = [[] for _ in range(problem.num_ranks)]
    while partial.before is not None:
        kind, stage = partials.kind_and_stage(partial.number)
        orders[partial.rank].append(Action(_KINDS[kind], stage, partial.started[partial.number] - 1))
        partial = partial.before
    return [order[::-1] for order in orders]
