"""Schedules by name: an order, how many stages a rank owns, and which.

To add one: write its order, then a row in SCHEDULES, a drawn grid and its bubble formula in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipeline.schedules.action import Action, Placement
from pipeline.schedules.orders import (
    forward_only,
    gpipe,
    interleaved_1f1b_order,
    looped_bfs_order,
    one_f_one_b,
    zbv,
    zero_bubble_h1,
    zero_bubble_h2,
)
from pipeline.schedules.v_orders import dualpipev, dualpipev_overlap, v_half, v_min
from pipeline.schedules.words import counted

Order = Callable[[int, int, int], list[Action]]
"""`order(rank, num_ranks, num_microbatches)`: the compute actions of one rank."""


def round_robin(stage: int, num_ranks: int) -> int:
    """Place the stages on the ranks in turn, from rank 0 again after the last."""
    return stage % num_ranks


def v_shape(stage: int, num_ranks: int) -> int:
    """Place two stages a rank, down the ranks and up again, so that the last stage is with the first."""
    return min(stage, 2 * num_ranks - 1 - stage)


@dataclass(frozen=True)
class Schedule:
    """An order, the number of stages a rank owns, and which ones they are.

    Attributes:
        trains: whether the order has backwards.
        sizes: the one (num_ranks, num_microbatches) that it is written for; None where any will do.
    """

    name: str
    order: Order
    num_chunks: int = 1
    rank_of: Placement = round_robin
    trains: bool = True
    sizes: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Refuse what is no number of stages.

        Raises:
            TypeError, ValueError: num_chunks is no integer of at least 1.
        """
        if not isinstance(self.num_chunks, int):
            raise TypeError(f"num_chunks must be an integer, got {self.num_chunks!r}")
        if self.num_chunks < 1:
            raise ValueError(f"num_chunks must be at least 1, got {self.num_chunks}")

    def num_stages(self, num_ranks: int) -> int:
        """Return how many stages the model is cut into."""
        return num_ranks * self.num_chunks

    def num_ranks(self, num_stages: int) -> int:
        """Return how many ranks share a model of so many stages.

        Raises:
            ValueError: they would own unequal numbers of stages.
        """
        if num_stages % self.num_chunks:
            raise ValueError(
                f"{self.name} needs num_stages divisible by num_chunks, got {num_stages} and {self.num_chunks}"
            )
        return num_stages // self.num_chunks

    def check_sizes(self, num_ranks: int, num_microbatches: int) -> None:
        """Refuse counts that no order is written for.

        Raises:
            ValueError: a count is below 1, or not that of `sizes`.
        """
        for what, count in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
            if count < 1:
                raise ValueError(f"{what} must be at least 1, got {count}")
        if self.sizes not in (None, (num_ranks, num_microbatches)):
            raise ValueError(
                f"{self.name} is written for {counted(self.sizes[0], 'rank')} and "
                f"{counted(self.sizes[1], 'micro-batch')}, "
                f"got {num_ranks} and {num_microbatches}"
            )

    def orders(self, num_ranks: int, num_microbatches: int) -> list[list[Action]]:
        """Return the order of every rank.

        Raises:
            ValueError: a count is below 1, or the schedule does not allow these sizes.
        """
        self.check_sizes(num_ranks, num_microbatches)
        return [self.order(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]


def interleaved_1f1b(num_chunks: int) -> Schedule:
    """Return interleaved 1F1B with so many stages a rank.

    Raises:
        ValueError: num_chunks is below 2.
    """
    if num_chunks < 2:
        raise ValueError(f"interleaved 1F1B needs num_chunks of at least 2, got {num_chunks}; 1f1b has one")
    return Schedule("interleaved_1f1b", partial(interleaved_1f1b_order, num_chunks=num_chunks), num_chunks)


def looped_bfs(num_chunks: int) -> Schedule:
    """Return looped breadth-first with so many stages a rank.

    Raises:
        ValueError: num_chunks is below 2.
    """
    if num_chunks < 2:
        raise ValueError(f"looped BFS needs num_chunks of at least 2, got {num_chunks}; gpipe has one")
    return Schedule("looped_bfs", partial(looped_bfs_order, num_chunks=num_chunks), num_chunks)


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", gpipe),
        Schedule("1f1b", one_f_one_b),
        interleaved_1f1b(2),
        looped_bfs(2),
        Schedule("zero_bubble_h1", zero_bubble_h1),
        Schedule("zero_bubble_h2", zero_bubble_h2),
        Schedule("zbv", zbv, num_chunks=2, rank_of=v_shape),
        Schedule("v_min", v_min, num_chunks=2, rank_of=v_shape),
        Schedule("v_half", v_half, num_chunks=2, rank_of=v_shape),
        Schedule("dualpipev", dualpipev, num_chunks=2, rank_of=v_shape),
        Schedule("dualpipev_overlap", dualpipev_overlap, num_chunks=2, rank_of=v_shape),
    )
}
"""What a training step can run by; forward_only, below, is for evaluation."""

FORWARD_ONLY = Schedule("forward_only", forward_only, trains=False)


def check_schedule(schedule: Any) -> None:
    """Raise TypeError if that is no schedule."""
    if not isinstance(schedule, Schedule):
        raise TypeError(f"a schedule is a Schedule, such as SCHEDULES['1f1b'], got {schedule!r}")
