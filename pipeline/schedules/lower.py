"""From compute orders to programs: sends and receives added, receives hoisted.

A schedule says what is computed when; where the data crosses ranks follows from that. Adding it here, once,
keeps communication out of every schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeline.schedules.action import Action, Kind, Placement

_RECEIVE = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B}
_SEND = {Kind.F: (Kind.SEND_F, 1), Kind.B: (Kind.SEND_B, -1)}  # and the step to the stage that it goes to


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
    num_ranks = len(orders)

    def owner(stage: int) -> int:
        return rank_of(stage, num_ranks)

    return [_program(order, rank, owner, num_stages, lookahead) for rank, order in enumerate(orders)]


def _program(
    order: Sequence[Action], rank: int, owner: Callable[[int], int], num_stages: int, lookahead: int
) -> list[Action]:
    receives = [
        [
            Action(_RECEIVE[need.kind], action.stage, action.microbatch)
            for need in action.needs(num_stages)
            if owner(need.stage) != rank
        ]
        for action in order
    ]
    program: list[Action] = []
    posted = 0
    for index, action in enumerate(order):
        for received in receives[posted : index + lookahead + 1]:
            program += received
        posted = index + lookahead + 1
        program.append(action)
        for part in action.parts:
            if part.kind in _SEND:
                send, step = _SEND[part.kind]
                neighbour = action.stage + step
                if 0 <= neighbour < num_stages and owner(neighbour) != rank:
                    program.append(Action(send, action.stage, action.microbatch))
    return program
