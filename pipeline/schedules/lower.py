"""From compute orders to programs: sends and receives added, receives hoisted.

A schedule says what is computed when; where the data crosses ranks follows from that. Adding it here, once,
keeps communication out of every schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeline.schedules.action import Action, Placement


def lower(
    orders: Sequence[Sequence[Action]], *, rank_of: Placement, num_stages: int, lookahead: int = 1
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
    Returns:
        The program of every rank. Without its communication it is the order that came in.
    Raises:
        ValueError: lookahead is negative, or an order already holds communication.
    Cost: at most lookahead + 1 posted receives, so as many input buffers, on a rank at a time.
    """
    if lookahead < 0:
        raise ValueError(f"lookahead must be at least 0, got {lookahead}")
    for action in (action for order in orders for action in order):
        if not action.kind.is_compute:
            raise ValueError(f"an order holds compute actions only (F, B, W, BW, F&B), got {action}")
    return [_program(order, rank, rank_of, len(orders), num_stages, lookahead) for rank, order in enumerate(orders)]


def _program(
    order: Sequence[Action], rank: int, rank_of: Placement, num_ranks: int, num_stages: int, lookahead: int
) -> list[Action]:
    def across_ranks(messages: Iterable[Action]) -> list[Action]:
        return [message for message in messages if rank_of(message.partner.stage, num_ranks) != rank]

    receives = [across_ranks(action.arrivals(num_stages)) for action in order]
    program: list[Action] = []
    posted = 0
    for index, action in enumerate(order):
        for received in receives[posted : index + lookahead + 1]:
            program += received
        posted = index + lookahead + 1
        program += [action, *across_ranks(action.departures(num_stages))]
    return program
