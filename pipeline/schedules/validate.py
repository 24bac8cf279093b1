"""What makes orders a schedule, checked before anything runs.

A message names the rule, the values and the place, and draws the orders with the faulty cell marked.
This is about the order of compute alone; whether messages can block each other is asked of the lowered program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from pipeline.schedules.action import Action, Kind, Placement, ScheduleError
from pipeline.schedules.drawing.text import draw_order
from pipeline.schedules.simulate import walk

_NAMES = {Kind.F: "F", Kind.B: "B or BW", Kind.W: "W or BW"}


def validate(
    orders: Sequence[Sequence[Action]],
    *,
    num_stages: int,
    num_microbatches: int,
    rank_of: Placement,
    trains: bool = True,
) -> None:
    """Refuse orders that are not a training step, or an evaluation where `trains` is false.

    - Every stage runs F, then B, then W of every micro-batch, each once; BW counts as B and W. An evaluation: F only.
    - An action is in the order of the rank that owns its stage.
    - All ranks reach the end, when each action waits for what it needs.

    Raises:
        ScheduleError: the first rule that is broken; `cells` says where.
    """
    try:
        _check_placement(rank_of, num_stages, len(orders))
        done = _check_cells(orders, num_stages, num_microbatches, rank_of)
        if not trains:
            _check_forward_only(orders)
        _check_complete(orders, done, num_stages, num_microbatches, rank_of, _NAMES if trains else [Kind.F])
        deque(walk(orders, num_stages), maxlen=0)  # to its end, for its error
    except ScheduleError as fault:
        raise ScheduleError(f"{fault}\n{draw_order(orders, fault.cells)}", fault.cells) from None


def _check_placement(rank_of: Placement, num_stages: int, num_ranks: int) -> None:
    for stage in range(num_stages):
        rank = rank_of(stage, num_ranks)
        if not _is_number(rank, num_ranks):
            raise ScheduleError(f"rank_of must give a rank from 0 to {num_ranks - 1}, got {rank!r} for stage {stage}")


def _check_cells(
    orders: Sequence[Sequence[Action]], num_stages: int, num_microbatches: int, rank_of: Placement
) -> dict[Action, tuple[int, int]]:
    """Check each cell against the cells before it; return where each part is done."""
    owners = [rank_of(stage, len(orders)) for stage in range(num_stages)]
    done: dict[Action, tuple[int, int]] = {}
    for rank, order in enumerate(orders):
        for index, action in enumerate(order):
            cell = (rank, index)
            if not action.kind.is_compute:
                raise ScheduleError(
                    f"an order holds compute actions only (F, B, W, BW, F&B), {_got(action, rank)}", [cell]
                )
            for single in action.singles:
                if not _is_number(single.stage, num_stages):
                    raise ScheduleError(f"stages are numbered 0 to {num_stages - 1}, {_got(action, rank)}", [cell])
                if not _is_number(single.microbatch, num_microbatches):
                    most = num_microbatches - 1
                    raise ScheduleError(f"micro-batches are numbered 0 to {most}, {_got(action, rank)}", [cell])
                if owners[single.stage] != rank:
                    owner = owners[single.stage]
                    raise ScheduleError(f"stage {single.stage} belongs to rank {owner}, {_got(action, rank)}", [cell])
            for part in action.parts:
                if part in done:
                    raise ScheduleError(
                        f"a stage runs {part.kind.value} of a micro-batch once, {_got(action, rank)} after {part} was "
                        "done",
                        [done[part], cell],
                    )
            for need in action.before:
                if need not in done:
                    raise ScheduleError(
                        f"F comes before B before W of a micro-batch, {_got(action, rank)} with no {need} before it",
                        [cell],
                    )
            for part in action.parts:
                done[part] = cell
    return done


def _is_number(value: Any, count: int) -> bool:
    """Whether this is one of the numbers below `count`: NumPy's integers are, a float that equals one is not."""
    return hasattr(value, "__index__") and 0 <= value < count


def _got(action: Action, rank: int) -> str:
    return f"got {action} on rank {rank}"


def _check_forward_only(orders: Sequence[Sequence[Action]]) -> None:
    for rank, order in enumerate(orders):
        for index, action in enumerate(order):
            if action.kind is not Kind.F:
                raise ScheduleError(f"an evaluation holds F only, got {action} on rank {rank}", [(rank, index)])


def _check_complete(
    orders: Sequence[Sequence[Action]],
    done: Collection[Action],
    num_stages: int,
    num_microbatches: int,
    rank_of: Placement,
    kinds: Collection[Kind],
) -> None:
    if len(done) == num_stages * num_microbatches * len(kinds):  # each of them once: `_check_cells`
        return
    # One after the other: a slip of the finger in a number must not make a list of all that is missing.
    for stage, microbatch, kind in (
        (s, i, k) for s in range(num_stages) for i in range(num_microbatches) for k in kinds
    ):
        if Action(kind, stage, microbatch) not in done:
            rank = rank_of(stage, len(orders))
            raise ScheduleError(
                f"every stage runs every micro-batch: rank {rank} has no {_NAMES[kind]} of micro-batch {microbatch} "
                f"on stage {stage}",
                [(rank, len(orders[rank]))],
            )
