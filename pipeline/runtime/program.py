"""What one rank does in a step, ready to run: communication added, proved to come to its end, grouped into tasks.

A task knows where its data comes from and where its result goes, so the executor asks nobody while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipeline.runtime.step_hooks import side_by_side
from pipeline.schedules.action import Action, Placement
from pipeline.schedules.deadlock import check_deadlock_free
from pipeline.schedules.lower import lower


class Task(NamedTuple):
    """Actions that run as one.

    Messages in a row, weight halves in a row, or one other action.

    Attributes:
        receives: the message from another rank that it waits for.
        confirms: this rank's send that is complete once that message is there.
        takes: what it gets from a stage on this rank instead, by the send that would have carried it.
        makes: what its result is kept as until it is sent or taken.
    """

    actions: tuple[Action, ...]
    receives: Action | None = None
    confirms: Action | None = None
    takes: Action | None = None
    makes: Action | None = None


def program_of(
    orders: Sequence[Sequence[Action]], rank: int, *, rank_of: Placement, num_stages: int
) -> tuple[Task, ...]:
    """Return the tasks of one rank, so that all ranks together compute these orders.

    Raises:
        ScheduleError: the ranks would wait for each other.
    """
    programs = lower(orders, rank_of=rank_of, num_stages=num_stages)
    check_deadlock_free(programs, rank_of=rank_of, num_stages=num_stages)

    def is_here(stage: int) -> bool:
        return rank_of(stage, len(orders)) == rank

    return tuple(_task(group, num_stages, is_here) for group in side_by_side(programs[rank]))


def _task(group: Sequence[Action], num_stages: int, is_here: Callable[[int], bool]) -> Task:
    action = group[0]
    if not action.kind.is_compute:
        return Task(tuple(group))
    arrival, makes = action.arrival(num_stages), action.departure(num_stages)
    if arrival is None:
        return Task(tuple(group), makes=makes)
    if is_here(arrival.partner.stage):
        return Task(tuple(group), takes=arrival.partner, makes=makes)
    return Task(tuple(group), receives=arrival, confirms=arrival.confirms, makes=makes)
