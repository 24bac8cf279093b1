"""From compute orders to programs: sends and receives added, receives hoisted.

A schedule says what is computed when; where the data crosses ranks follows from that. Adding it here, once,
keeps communication out of every schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeline.schedules.action import Action, Placement, Skips, check_skips


def lower(
    orders: Sequence[Sequence[Action]], *, rank_of: Placement, num_stages: int, lookahead: int = 1, skips: Skips = ()
) -> list[list[Action]]:
    """Add communication to the compute order of every rank.

    RECV posts a receive and SEND starts a send: neither blocks. The compute action waits for its own input.
    A send follows the action that made the data. A receive is posted `lookahead` compute actions ahead of the one
    that waits for it, so that the transfer runs beside them. 1F1B on two ranks, two micro-batches:

        rank 0   0F0 0SEND_F0  0RECV_B0  0F1 0SEND_F1  0RECV_B1  0BW0  0BW1
        rank 1   1RECV_F0  1F0  1RECV_F1  1BW0 1SEND_B0  1F1  1BW1 1SEND_B1

    Where two neighbouring stages live on one rank, the data is handed over there and nothing is added.

    Args:
        orders: per rank, compute actions that `validate` accepts.
        lookahead: how many compute actions ahead a receive is posted; 0 is just before its own.
        skips: connections between stages beside those of neighbours.
    Returns:
        The program of every rank. Without its communication it is the order that came in.
    Raises:
        ValueError: lookahead is negative, an order already holds communication, or as `check_skips`.
    Cost: the receives of at most lookahead + 1 actions are posted, with their buffers, on a rank at a time.
    """
    if lookahead < 0:
        raise ValueError(f"lookahead must be at least 0, got {lookahead}")
    for action in (action for order in orders for action in order):
        if not action.kind.is_compute:
            raise ValueError(f"an order holds compute actions only (F, B, W, BW, F&B), got {action}")
    check_skips(skips, num_stages)

    def across_ranks(rank: int, messages: Iterable[Action]) -> list[Action]:
        return [message for message in messages if rank_of(message.partner.stage, len(orders)) != rank]

    programs = []
    for rank, order in enumerate(orders):
        receives = [across_ranks(rank, action.arrivals(num_stages, skips)) for action in order]
        sends = [across_ranks(rank, action.departures(num_stages, skips)) for action in order]
        programs.append(_program(order, receives, sends, lookahead))
    return programs


def _program(
    order: Sequence[Action], receives: Sequence[list[Action]], sends: Sequence[list[Action]], lookahead: int
) -> list[Action]:
    program: list[Action] = []
    posted = 0
    for index, action in enumerate(order):
        for received in receives[posted : index + lookahead + 1]:
            program += received
        posted = index + lookahead + 1
        program += [action, *sends[index]]
    return program
