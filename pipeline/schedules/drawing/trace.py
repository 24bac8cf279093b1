"""What ranks did, as events, for a picture: of any kind of parallelism, where `svg.picture` draws a schedule's actions.

title
rank 0      [forward    ][backward            ][wait ][optimizer]      what the rank did
  bucket                       [256 KiB ][1.2 MiB  ]                   what was under way meanwhile, with its size
  bucket 2                          [256 KiB ]
rank 1      ...
            |           |           |           |           |
            0           20          40          60          80 ms

A pipeline has what was predicted above what was measured, on one axis of time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.schedules.action import Action, Kind
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
    end_of,
)
from pipeline.schedules.measured import Row

STATES = ("compute", "wait", "message", "step")  # categories in which a rank is, one at a time
LANE_HEIGHT = 12.0  # of what is under way
HEADING_HEIGHT = 22.0
AXIS_HEIGHT = 24.0
LETTER_WIDTH, SMALL_LETTER_WIDTH = 6.6, 4.7  # of words 10.5 and 8 points high
NARROWEST = 1.5  # of a box: what happened is seen
NUM_TICKS = 10  # at most
COLOURS = {"forward": "#70a5d6", "backward": "#6fc29b", "weights": "#f2cd7a", "optimizer": "#e0a35c"}
OTHER = {"compute": "#6fc29b", "wait": "#e08c86", "message": "#c9a3d4", "step": "#b8c2cc"}
UNDER_WAY = {"bucket": "#a99bdc", "send": "#d7b9e0", "receive": "#e2cfe8"}
RULE = "#d3d9df"
PARTS = {Kind.F: "forward", Kind.BW: "backward", Kind.B: "backward", Kind.W: "weights"}


def trace_picture(
    events: Sequence[Row], title: str, *, predicted: Sequence[Row] = (), width: float = 1100.0
) -> Picture:
    """Lay events out: a row a rank for what it did, and below it a lane for each thing that was under way at once.

    Args:
        events: as `Recorder.gather` gives them. What is under way ends its name with its size.
        predicted: the actions that were to be expected, from the time on when the first one ran.
        width: of the time from the first event to the end of the last, in points.
    Raises:
        ValueError: there are no events.
    """
    if not events:
        raise ValueError("a picture of events needs some, got none")
    first = min(event[2] for event in events)
    begin = min((event[2] for event in events if event[4] == "compute"), default=first)
    expected = [(rank, name, start + begin, end + begin, kind) for rank, name, start, end, kind in predicted]
    last = max(event[3] for event in [*events, *expected])
    page = _Page(first, last - first, width)
    page.words.append(Words(MARGIN, MARGIN + 7, title, 15, INK, bold=True))
    page.words.append(Words(MARGIN, MARGIN + 27, _costs(events, expected), 11, MUTED))
    if expected:
        page.add_heading("predicted, from the median time of each stage's actions")
        page.add_ranks(expected)
        page.add_heading("measured")
    page.add_ranks(events)
    page.add_axis()
    page.add_legend([*expected, *events])
    return Picture(max(page.right, end_of(page.words)) + MARGIN, page.top, [*page.grounds, *page.boxes], page.words)


class _Page:
    """A picture that grows downwards.

    Attributes:
        right: the end of the time axis.
        top: down to where it is drawn.
        grounds: what lies below everything else: idle time, lines of the axis.
    """

    def __init__(self, first: float, seconds: float, width: float) -> None:
        self.first, self.seconds = first, max(seconds, 1e-9)
        self.scale = width / self.seconds
        self.left, self.right = MARGIN + LABEL_WIDTH, MARGIN + LABEL_WIDTH + width
        self.top = self.first_row = MARGIN + HEAD_HEIGHT
        self.grounds: list[Box] = []
        self.boxes: list[Box] = []
        self.words: list[Words] = []

    def add_heading(self, text: str) -> None:
        self.words.append(Words(MARGIN, self.top + HEADING_HEIGHT / 2 - 2, text, 11, INK, bold=True))
        self.top += HEADING_HEIGHT

    def add_ranks(self, events: Sequence[Row]) -> None:
        for rank in sorted({event[0] for event in events}):
            mine = [event for event in events if event[0] == rank]
            self.words.append(Words(MARGIN, self.top + ROW_HEIGHT / 2, f"rank {rank}", 11, MUTED))
            self.grounds.append(Box(self.left, self.top, self.right - self.left, ROW_HEIGHT, IDLE))
            for event in mine:
                if event[4] in STATES:
                    self._add_state(event)
            self.top += ROW_HEIGHT + 2
            for lane in sorted({event[4] for event in mine if event[4] not in STATES}, key=_lane_order):
                self._add_lane(lane, [event for event in mine if event[4] == lane])
            self.top += ROW_GAP

    def _add_state(self, event: Row) -> None:
        _, name, start, end, category = event
        x, length = self._place(start, end)
        gap = min(1.0, length / 4)
        together = name.split("&")  # a pair: one above the other
        height = ROW_HEIGHT / len(together)
        for place, one in enumerate(together):
            self.boxes.append(Box(x, self.top + place * height, length - gap, height, _colour(category, one)))
        if length > LETTER_WIDTH * len(name) + 4:
            self.words.append(Words(x + length / 2, self.top + ROW_HEIGHT / 2, name, 10.5, INK, "middle"))

    def _add_lane(self, lane: str, events: Sequence[Row]) -> None:
        """Draw what was under way, one after the other, with its name in it or behind it, where there is room."""
        middle = self.top + LANE_HEIGHT / 2
        if lane == lane.split()[0]:
            self.words.append(Words(MARGIN + 8, middle, lane, 8, MUTED))
        ordered = sorted(events, key=lambda event: event[2])
        nexts = [self._place(start, end)[0] for _, _, start, end, _ in ordered[1:]] + [self.right]
        for (_, name, start, end, category), until in zip(ordered, nexts, strict=True):
            name = name.replace("SEND_", "").replace("RECV_", "")  # which of them the lane says
            x, length = self._place(start, end)
            self.boxes.append(Box(x, self.top + 1, length, LANE_HEIGHT - 2, _colour(category, name)))
            needed = SMALL_LETTER_WIDTH * len(name) + 4
            if needed < length:
                self.words.append(Words(x + length / 2, middle, name, 8, INK, "middle"))
            elif x + length + needed < until:
                self.words.append(Words(x + length + 3, middle, name, 8, MUTED))
        self.top += LANE_HEIGHT

    def _place(self, start: float, end: float) -> tuple[float, float]:
        """Return where a box begins, and its width."""
        length = max(NARROWEST, self.scale * (end - start))
        return min(self.left + self.scale * (start - self.first), self.right - length), length

    def add_axis(self) -> None:
        """Draw a line at round numbers of milliseconds."""
        step = _round_step(1e3 * self.seconds / NUM_TICKS)
        for i in range(int(1e3 * self.seconds / step) + 1):
            x = self.left + self.scale * i * step / 1e3
            self.grounds.append(Box(x, self.first_row, 0.75, self.top - self.first_row + 4, RULE))
            self.words.append(Words(x, self.top + 11, f"{i * step:g}" + " ms" * (i == 0), 9, MUTED, "middle"))
        self.top += AXIS_HEIGHT

    def add_legend(self, events: Sequence[Row]) -> None:
        """Explain the colours that occur."""
        entries = {
            _label(category, one): _colour(category, one)
            for _, name, _, _, category in events
            for one in name.split("&")
        }
        x, y = self.left, self.top + LEGEND_HEIGHT / 2
        for label, colour in sorted(entries.items(), key=lambda entry: _LEGEND.index(entry[0])):
            self.boxes.append(Box(x, y - 6, 12, 12, colour))
            self.words.append(Words(x + 17, y, label, 11, MUTED))
            x += 35 + LETTER_WIDTH * len(label)
        self.top += LEGEND_HEIGHT + MARGIN / 2


_LABELS = {
    "weights": "backward, weight half",
    "message": "posts messages",
    "step": "opens or closes the step",
    "wait": "waits",
    **{kind: f"{kind} under way" for kind in UNDER_WAY},
}
_LEGEND = [_LABELS.get(kind, kind) for kind in (*COLOURS, *OTHER, *UNDER_WAY)]


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, ... that is not below `least`, also among fractions."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _costs(events: Sequence[Row], expected: Sequence[Row]) -> str:
    """Say how long it took, and how long the ranks waited."""
    seconds = max(event[3] for event in events) - min(event[2] for event in events)
    ranks = sorted({event[0] for event in events})
    waited = [sum(end - start for rank, _, start, end, kind in events if (rank, kind) == (r, "wait")) for r in ranks]
    words = f"{1e3 * seconds:.1f} ms, of these in waits, by rank: {', '.join(f'{1e3 * w:.1f}' for w in waited)}"
    if len(ranks) > 8:
        words = f"{1e3 * seconds:.1f} ms, of these in waits from {1e3 * min(waited):.1f} to {1e3 * max(waited):.1f}"
    if expected:
        actions = [event for event in events if event[4] == "compute" and _parts(event[1])]
        ran, was_to = (max(e[3] for e in some) - min(e[2] for e in some) for some in (actions, expected))
        words += f" · all actions in {1e3 * ran:.1f} ms, predicted {1e3 * was_to:.1f} ms"
    return words


def _lane_order(category: str) -> tuple[int, int]:
    kind, *number = category.split()
    return list(UNDER_WAY).index(kind) if kind in UNDER_WAY else len(UNDER_WAY), int(number[0]) if number else 1


def _parts(name: str) -> str | None:
    """Return which part of a step the actions of this name are, None if it is of none."""
    try:
        return PARTS.get(Action.parse(name.split()[0]).kind)
    except ValueError:
        return None


def _kind(category: str, name: str) -> str:
    """Return what an event is, as the tables of colours call it."""
    if category not in STATES:
        return category.split()[0]
    part = name if name in COLOURS else _parts(name) if category == "compute" else None
    return part or category


def _colour(category: str, name: str) -> str:
    return (COLOURS | OTHER | UNDER_WAY).get(_kind(category, name), UNDER_WAY["bucket"])


def _label(category: str, name: str) -> str:
    kind = _kind(category, name)
    return _LABELS.get(kind, kind)
