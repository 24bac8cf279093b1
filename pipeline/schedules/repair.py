"""Orders that hang or break an order rule, mended with the fewest moved actions.

To move an action is to take it out of its rank's order and put it in elsewhere; what is not moved keeps its order.
With a set of actions taken out, one run tells whether the rest can be completed: each rank goes on as far as it can and
puts in what was taken out where its inputs are there. Nothing is lost by going on: what has run never stops another.

Where such a run is stuck, the next action of any solution is one of few: either it is taken out now and could run, or
it stands behind the action at which its rank is stuck, which then is taken out itself. So these are tried, first with
one move, then with two, and so on; the first that is found is one with the fewest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.schedules.action import Action, ScheduleError

MOST_LOOKS = 2_000_000
"""How many actions are looked at, in all ways that are tried: some seconds."""

Cell = tuple[int, int]
"""Rank, and index in its order."""


class Repaired(NamedTuple):
    """Orders that run to their end, and where each moved action was and is."""

    orders: list[list[Action]]
    moved: list[tuple[Cell, Cell]]


def repair(orders: Sequence[Sequence[Action]], *, num_stages: int, most_moves: int = 6) -> Repaired:
    """Mend orders that hold the right actions in an order that cannot be run.

    Args:
        orders: of every rank; each action once, on the rank that owns its stage.
        most_moves: that are tried.
    Raises:
        ScheduleError: no so few moves mend them, or there are too many ways to try.
    """
    seen: set[frozenset[Cell]] = set()
    num_actions = sum(map(len, orders))

    def mend(taken: frozenset[Cell], moves_left: int) -> tuple[frozenset[Cell], list[list[Action]]] | None:
        if taken in seen:
            return None
        seen.add(taken)
        tries.append(taken)
        if len(tries) * num_actions > MOST_LOOKS:
            raise ScheduleError(f"no few moves mend the orders: {len(tries):,} ways were tried")
        mended, choices = _run(orders, taken, num_stages)
        if not choices and all(len(a) == len(b) for a, b in zip(mended, orders, strict=True)):
            return taken, mended
        for cell in choices if moves_left else ():
            found = mend(taken | {cell}, moves_left - 1)
            if found is not None:
                return found
        return None

    tries: list[frozenset[Cell]] = []
    for moves in range(most_moves + 1):
        seen.clear()
        found = mend(frozenset(), moves)
        if found is not None:
            taken, mended = found
            return Repaired(mended, [((r, i), (r, mended[r].index(orders[r][i]))) for r, i in sorted(taken)])
    raise ScheduleError(f"no {most_moves} moves mend the orders")


def _run(
    orders: Sequence[Sequence[Action]], taken: frozenset[Cell], num_stages: int
) -> tuple[list[list[Action]], list[Cell]]:
    """Run what is not taken out in its order, and the rest where it can; return what ran, and what to take out next."""
    done: set[Action] = set()
    at = [0] * len(orders)
    loose: list[list[Action]] = [[] for _ in orders]
    for rank, index in sorted(taken):
        loose[rank].append(orders[rank][index])
    ran: list[list[Action]] = [[] for _ in orders]

    def can_run(action: Action) -> bool:
        return done.issuperset(action.needs(num_stages))

    def step(rank: int) -> Action | None:
        """Take what a rank can run next out of what it has still to run: in its order, before what is loose."""
        while (rank, at[rank]) in taken:
            at[rank] += 1
        if at[rank] < len(orders[rank]) and can_run(orders[rank][at[rank]]):
            at[rank] += 1
            return orders[rank][at[rank] - 1]
        action = next(filter(can_run, loose[rank]), None)
        if action is not None:
            loose[rank].remove(action)
        return action

    moved = True
    while moved:
        moved = False
        for rank in range(len(orders)):
            while (action := step(rank)) is not None:
                ran[rank].append(action)
                done.update(action.parts)
                moved = True
    waiting = [
        [(rank, i) for i in range(at[rank], len(order)) if (rank, i) not in taken] for rank, order in enumerate(orders)
    ]
    runnable = [cell for cells in waiting for cell in cells if can_run(orders[cell[0]][cell[1]])]
    heads = [cells[0] for cells in waiting if cells]
    return ran, [*runnable, *(cell for cell in heads if cell not in runnable)]
