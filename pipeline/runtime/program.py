"""What one rank does in a step, ready to run: communication added, proved to come to its end, grouped into tasks.

A task knows where its data comes from and where its result goes, so the executor asks nobody while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from distributed.comm.communicator import Communicator
from pipeline.runtime.handshake import training_orders
from pipeline.runtime.step_hooks import side_by_side
from pipeline.schedules.action import Action, Kind, Placement, Skips
from pipeline.schedules.deadlock import check_deadlock_free
from pipeline.schedules.lower import lower
from pipeline.schedules.orders import backwards_of, forwards_of
from pipeline.schedules.schedule import Schedule


class Task(NamedTuple):
    """Actions that run as one.

    Messages in a row, weight halves in a row, or one other action; a pair is its forward's task with its backward's.

    Attributes:
        takes: what it waits for, in the order of its arrivals: a receive; or, of a stage on this rank, the send that
            would have carried it.
        makes: what its results are kept as until they are sent or taken, in the order of its departures.
        beside: of a pair, of which all else is its forward's: the task of its backward.
        sends: of what it makes, what it sends as soon as it is there, as the two of a pair do; what others make is
            sent by a task of its own.
    """

    actions: tuple[Action, ...]
    takes: tuple[Action, ...] = ()
    makes: tuple[Action, ...] = ()
    beside: Task | None = None
    sends: tuple[Action, ...] = ()


Program = tuple[Task, ...]


def program_of(
    orders: Sequence[Sequence[Action]], rank: int, *, rank_of: Placement, num_stages: int, skips: Skips = ()
) -> Program:
    """Return the tasks of one rank, so that all ranks together compute these orders.

    Args:
        orders: of compute, by rank.
        rank_of: stage -> rank.
        num_stages: of the model.
        skips: (from stage, to stage) of its skip connections.
    Raises:
        ScheduleError: the ranks would wait for each other.
    """
    programs = lower(orders, rank_of=rank_of, num_stages=num_stages, skips=skips)
    check_deadlock_free(programs, rank_of=rank_of, num_stages=num_stages, skips=skips)

    def is_here(stage: int) -> bool:
        return rank_of(stage, len(orders)) == rank

    sent_early = {
        send for action in programs[rank] if action.kind is Kind.PAIR for send in action.departures(num_stages, skips)
    }
    program = [action for action in programs[rank] if action not in sent_early]
    return tuple(_task(group, num_stages, skips, is_here) for group in side_by_side(program))


class Programs:
    """The programs of one rank.

    Args:
        num_microbatches: of a training step.
        skips: connections between stages beside those of neighbours.
        orders: of every rank in a training step; None where the schedule does not allow these sizes.
    """

    def __init__(
        self,
        schedule: Schedule,
        comm: Communicator,
        num_microbatches: int,
        orders: Sequence[Sequence[Action]] | None,
        skips: Skips = (),
    ) -> None:
        self._schedule = schedule
        self._comm = comm
        self._num_microbatches = num_microbatches
        self._skips = skips
        self._training = None if orders is None else self._of(orders)
        self._apart: dict[int, tuple[Program, Program]] = {}

    def training(self) -> Program:
        """Return the program of a training step.

        Raises:
            ValueError: the schedule does not allow these sizes.
        """
        if self._training is None:
            self._training = self._of(training_orders(self._schedule, self._comm.size, self._num_microbatches))
        return self._training

    def apart(self, num_microbatches: int) -> tuple[Program, Program]:
        """Return the programs of forwards and of backwards alone.

        No rule of the schedule binds their number.
        """
        if num_microbatches not in self._apart:
            schedule, num_ranks = self._schedule, self._comm.size
            orders = forwards_of(schedule.rank_of, num_ranks, schedule.num_stages(num_ranks), num_microbatches)
            self._apart[num_microbatches] = self._of(orders), self._of(backwards_of(orders))
        return self._apart[num_microbatches]

    def _of(self, orders: Sequence[Sequence[Action]]) -> Program:
        num_stages = self._schedule.num_stages(self._comm.size)
        return program_of(
            orders, self._comm.rank, rank_of=self._schedule.rank_of, num_stages=num_stages, skips=self._skips
        )


def _task(group: Sequence[Action], num_stages: int, skips: Skips, is_here: Callable[[int], bool]) -> Task:
    action = group[0]
    if not action.kind.is_compute:
        return Task(tuple(group))
    if action.beside is not None:
        forward, backward = (
            _with_sends(_task([single], num_stages, skips, is_here), is_here) for single in action.singles
        )
        return forward._replace(beside=backward)
    takes = (a.partner if is_here(a.partner.stage) else a for a in action.arrivals(num_stages, skips))
    return Task(tuple(group), tuple(takes), action.departures(num_stages, skips))


def _with_sends(task: Task, is_here: Callable[[int], bool]) -> Task:
    return task._replace(sends=tuple(send for send in task.makes if not is_here(send.partner.stage)))
