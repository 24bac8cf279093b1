"""Orders before and after some of their actions were moved, as a picture.

    before   rank 0  [0F0][0F1][0BW0][0BW1]
             rank 1  |[1BW0]{1F0}[1F1][1BW1]      a frame is what was moved, a bar where it goes
    after    rank 0  [0F0][0F1][0BW0][0BW1]
             rank 1  {1F0}[1BW0]|[1F1][1BW1]      a frame is what was moved, a bar where it was

Cells are places in an order, not times: what hangs has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.schedules.action import Action
from pipeline.schedules.drawing.svg import (
    INK,
    LABEL_WIDTH,
    MARGIN,
    MUTED,
    ROW_GAP,
    ROW_HEIGHT,
    Box,
    Picture,
    Words,
    colour_of,
    end_of,
)

Orders = Sequence[Sequence[Action]]
Move = tuple[tuple[int, int], tuple[int, int]]
"""Rank and index of an action in its order before, and after."""

MOVED = "#c2255c"
HEAD_HEIGHT, PART_HEIGHT, PART_GAP = 50.0, 20.0, 16.0
FRAME, BAR = 2.5, 4.0
LETTER_WIDTH, CELL_ROOM = 6.2, 10.0
"""A colour, and lengths in points."""


def moves_picture(before: Orders, after: Orders, moves: Sequence[Move], title: str) -> Picture:
    """Lay out orders and what became of them, one below the other; frames and bars mark what was moved.

    Args:
        moves: where each moved action was and is; its rank is the same.
    """
    longest = max((len(str(single)) for order in before for action in order for single in action.singles), default=1)
    cell = LETTER_WIDTH * longest + CELL_ROOM
    said = ", ".join(f"{before[r][i]} from place {i} to {j} of rank {r}" for (r, i), (_, j) in moves)
    words = [
        Words(MARGIN, MARGIN + 7, title, 15, INK, bold=True),
        Words(MARGIN, MARGIN + 27, said or "nothing moved", 11, MUTED),
    ]
    boxes: list[Box] = []
    top = MARGIN + HEAD_HEIGHT
    goes, was = dict(moves), {here: there for there, here in moves}
    for name, what, orders, others, other_of in (
        ("before", "a bar is where it goes", before, after, goes),
        ("after", "a bar is where it was", after, before, was),
    ):
        words.append(Words(MARGIN, top + 6, name, 12, INK, bold=True))
        words.append(Words(MARGIN + LABEL_WIDTH, top + 6, f"a frame is what was moved, {what}", 11, MUTED))
        top += PART_HEIGHT
        bars = {(rank, _place_in(orders[rank], others[rank], at, rank, other_of)) for rank, at in other_of.values()}
        for rank, order in enumerate(orders):
            _add_row(order, rank, top, cell, other_of, bars, boxes, words)
            top += ROW_HEIGHT + ROW_GAP
        top += PART_GAP - ROW_GAP
    right = MARGIN + LABEL_WIDTH + cell * max(map(len, before), default=0)
    return Picture(max(right, end_of(words)) + MARGIN, top + MARGIN - PART_GAP, boxes, words)


def _place_in(
    order: Sequence[Action], other: Sequence[Action], at: int, rank: int, moved: Mapping[tuple[int, int], object]
) -> int:
    """Return the index in one order that stands for a place in the other: where what follows, and stayed, is."""
    stayed = {action: i for i, action in enumerate(order) if (rank, i) not in moved}
    return next((stayed[action] for action in other[at:] if action in stayed), len(order))


def _add_row(
    order: Sequence[Action],
    rank: int,
    top: float,
    cell: float,
    moved: Mapping[tuple[int, int], object],
    bars: set[tuple[int, int]],
    boxes: list[Box],
    words: list[Words],
) -> None:
    """Draw the order of one rank, a cell an action."""
    left = MARGIN + LABEL_WIDTH
    words.append(Words(MARGIN, top + ROW_HEIGHT / 2, f"rank {rank}", 11, MUTED))
    stages = sorted({single.stage for action in order for single in action.singles})
    for i, action in enumerate(order):
        x = left + i * cell
        is_moved = (rank, i) in moved
        if is_moved:
            boxes.append(Box(x, top - FRAME, cell, ROW_HEIGHT + 2 * FRAME, MOVED))
        gap = FRAME if is_moved else 0.5
        height = ROW_HEIGHT / len(action.singles)
        for place, single in enumerate(action.singles):
            y = top + place * height
            boxes.append(Box(x + gap, y, cell - 2 * gap, height, colour_of(single.kind, stages.index(single.stage))))
            words.append(Words(x + cell / 2, y + height / 2, str(single), 10.5, INK, "middle", bold=is_moved))
    for _, i in sorted(bar for bar in bars if bar[0] == rank):
        boxes.append(Box(left + i * cell - BAR / 2, top - FRAME, BAR, ROW_HEIGHT + 2 * FRAME, MOVED))
