"""What ranks did, as events, for a picture: of any kind of parallelism, where `svg.picture` draws a schedule's actions.

title
rank 0      [forward    ][backward            ][wait ][optimizer]      what the rank did
                               [=====]   [==========]                  what was under way meanwhile
                                    [========]
rank 1      ...
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.schedules.drawing.svg import (
    HEAD_HEIGHT,
    IDLE,
    INK,
    LABEL_WIDTH,
    LEGEND_HEIGHT,
    MARGIN,
    MUTED,
    ROW_GAP,
    ROW_HEIGHT,
    Box,
    Picture,
    Words,
)
from pipeline.schedules.measured import Row

STATES = ("compute", "wait", "message", "step")  # categories in which a rank is, one at a time
LANE_HEIGHT = 7.0  # of what is under way
LETTER_WIDTH = 6.0
COLOURS = {"forward": "#70a5d6", "backward": "#6fc29b", "optimizer": "#e3b95e"}
OTHER = {"compute": "#6fc29b", "wait": "#e08c86", "message": "#c9a3d4", "step": "#b8c2cc"}
UNDER_WAY = "#9a86c9"


def trace_picture(events: Sequence[Row], title: str, *, width: float = 900.0) -> Picture:
    """Lay events out: a row a rank for what it did, and below it a lane for each thing that was under way at once.

    Args:
        events: as `Recorder.gather` gives them.
        width: of the time from the first event to the end of the last, in points.
    Raises:
        ValueError: there are no events.
    """
    if not events:
        raise ValueError("a picture of events needs some, got none")
    first, last = min(event[2] for event in events), max(event[3] for event in events)
    scale = width / max(last - first, 1e-9)
    left, top = MARGIN + LABEL_WIDTH, MARGIN + HEAD_HEIGHT
    boxes: list[Box] = []
    words = [
        Words(MARGIN, MARGIN + 7, title, 15, INK, bold=True),
        Words(MARGIN, MARGIN + 27, _waits(events, last - first), 11, MUTED),
    ]
    for rank in sorted({event[0] for event in events}):
        mine = [event for event in events if event[0] == rank]
        lanes = list(dict.fromkeys(event[4] for event in mine if event[4] not in STATES))
        words.append(Words(MARGIN, top + ROW_HEIGHT / 2, f"rank {rank}", 11, MUTED))
        boxes.append(Box(left, top, width, ROW_HEIGHT, IDLE))
        for _, name, start, end, category in mine:
            x, length = left + scale * (start - first), scale * (end - start)
            if category in STATES:
                boxes.append(Box(x, top, length, ROW_HEIGHT, _colour(category, name)))
                if length > LETTER_WIDTH * len(name):
                    words.append(Words(x + length / 2, top + ROW_HEIGHT / 2, name, 10.5, INK, "middle"))
            else:
                y = top + ROW_HEIGHT + 2 + LANE_HEIGHT * lanes.index(category)
                boxes.append(Box(x, y, length, LANE_HEIGHT - 2, UNDER_WAY))
        top += ROW_HEIGHT + LANE_HEIGHT * len(lanes) + ROW_GAP
    _add_legend(events, left, top + LEGEND_HEIGHT / 2, boxes, words)
    return Picture(left + width + MARGIN, top + LEGEND_HEIGHT + MARGIN / 2, boxes, words)


def _waits(events: Sequence[Row], seconds: float) -> str:
    """Say how long the ranks waited."""
    ranks = sorted({event[0] for event in events})
    waited = [sum(end - start for rank, _, start, end, kind in events if (rank, kind) == (r, "wait")) for r in ranks]
    return f"{1e3 * seconds:.1f} ms, of these in waits, by rank: {', '.join(f'{1e3 * w:.1f}' for w in waited)}"


def _colour(category: str, name: str) -> str:
    return COLOURS.get(name, OTHER[category])


def _add_legend(events: Sequence[Row], x: float, y: float, boxes: list[Box], words: list[Words]) -> None:
    """Explain the colours that occur."""
    entries: dict[str, str] = {}
    for _, name, _, _, category in events:
        label = name if name in COLOURS else category if category in STATES else f"{category.split()[0]} under way"
        entries[label] = _colour(category, name) if category in STATES else UNDER_WAY
    for label, colour in entries.items():
        boxes.append(Box(x, y - 6, 12, 12, colour))
        words.append(Words(x + 17, y, label, 11, MUTED))
        x += 35 + LETTER_WIDTH * len(label)
