"""A timeline as a picture: rectangles and words on a page, and the page as SVG.

    title       1F1B · 4 ranks, 8 micro-batches
    subtitle    makespan bubble, peak
    rank 0      [0][1][2][3]             [0      ][4][1      ]      grey is idle
    rank 1         [0][1][2]       [0      ][3][1      ]

The same timeline always gives the same bytes. Another format is another function of a Picture (`png`).
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from pipeline.schedules.action import Kind
from pipeline.schedules.timeline import Timeline, stages_in

# One hue a kind; of it, the lighter the later chunk. Dark words are readable on all of them.
HUES = {Kind.F: (210, 78), Kind.B: (152, 48), Kind.W: (38, 88), Kind.BW: (152, 48)}
NAMES = {Kind.F: "forward", Kind.BW: "backward", Kind.B: "backward, input half", Kind.W: "backward, weight half"}
INK, MUTED, IDLE, PAPER = "#1f2933", "#616e7c", "#e9edf1", "#ffffff"

MARGIN, LABEL_WIDTH = 16.0, 52.0
ROW_HEIGHT, ROW_GAP, BAND_GAP = 26.0, 6.0, 18.0
HEAD_HEIGHT, LEGEND_HEIGHT = 50.0, 30.0
SHORTEST = 22.0  # width of the shortest action, unless that makes the whole wider than:
WIDEST = 20_000.0
DIGIT_WIDTH = 7.0  # with the room that it needs
"""Lengths in points."""


class Box(NamedTuple):
    """A filled rectangle: left, top, width, height."""

    x: float
    y: float
    width: float
    height: float
    fill: str


class Words(NamedTuple):
    """Text whose middle is at height y; `anchor` is start or middle, as SVG says."""

    x: float
    y: float
    text: str
    size: float
    fill: str
    anchor: str = "start"
    bold: bool = False


class Picture(NamedTuple):
    """What to draw, in this order."""

    width: float
    height: float
    boxes: list[Box]
    words: list[Words]


def picture(
    timeline: Timeline,
    title: str,
    *,
    scale: float | None = None,
    width: float | None = None,
    until: float | None = None,
) -> Picture:
    """Lay a timeline out: a row a rank, a box an action with its micro-batch, grey where a rank is idle.

    Colours are kinds, shades are the chunks of a rank; of a pair the forward is drawn above the backward. The line
    under the title says what the schedule costs.

    Args:
        scale: points per unit of time. By default the shortest action is as wide as its number; a measured one may be
            so short that the picture would never end. Numbers that find no room are left out.
        width: points that a page is wide; what is longer goes on below.
        until: the time up to which the picture goes, so that several can be compared; by default its own end.
    """
    boxes: list[Box] = []
    words: list[Words] = []
    left = MARGIN + LABEL_WIDTH
    until = max(until or 0.0, timeline.makespan)
    scale = _scale([timeline], until) if scale is None else scale
    words += [
        Words(MARGIN, MARGIN + 7, title, 15, INK, bold=True),
        Words(MARGIN, MARGIN + 27, _costs(timeline), 11, MUTED),
    ]
    page = until if width is None else max(width - left - MARGIN, SHORTEST) / scale  # in time
    num_bands = max(1, math.ceil(until / page * (1 - 1e-9)))
    height = len(timeline.rows) * (ROW_HEIGHT + ROW_GAP)
    for band in range(num_bands):
        begin, end = band * page, min(until, (band + 1) * page)
        top = MARGIN + HEAD_HEIGHT + band * (height + BAND_GAP)
        _add_band(timeline, begin, end, scale, top, boxes, words)
    right = left + scale * min(page, until)
    bottom = MARGIN + HEAD_HEIGHT + num_bands * (height + BAND_GAP) - BAND_GAP
    _add_legend(timeline, left, bottom + LEGEND_HEIGHT / 2, boxes, words)
    return Picture(max(right, end_of(words)) + MARGIN, bottom + LEGEND_HEIGHT + MARGIN / 2, boxes, words)


def end_of(words: Iterable[Words]) -> float:
    """Return where the last of the words ends that begin somewhere, in the widest of the usual fonts."""
    lengths = ((w.x, (0.6 if w.bold else 0.52) * w.size * len(w.text)) for w in words if w.anchor == "start")
    return max((x + length for x, length in lengths), default=0.0)


def _scale(timelines: Sequence[Timeline], until: float) -> float:
    """Return points per unit of time so that the shortest action of all has room for its number."""
    shortest = min(end - start for timeline in timelines for row in timeline.rows for _, start, end in row)
    return min(SHORTEST / shortest, WIDEST / until)


def _add_band(
    timeline: Timeline, begin: float, end: float, scale: float, top: float, boxes: list[Box], words: list[Words]
) -> None:
    """Draw what the ranks do from one time to another. What goes on in the next band is drawn in both."""
    left = MARGIN + LABEL_WIDTH
    for rank, row in enumerate(timeline.rows):
        y = top + rank * (ROW_HEIGHT + ROW_GAP)
        middle = y + ROW_HEIGHT / 2
        words.append(Words(MARGIN, middle, f"rank {rank}", 11, MUTED))
        boxes.append(Box(left, y, scale * (end - begin), ROW_HEIGHT, IDLE))
        chunk_of = {stage: chunk for chunk, stage in enumerate(sorted(stages_in(row)))}
        for action, first, last in row:
            shown = min(last, end) - max(first, begin)
            if shown <= 1e-9 * (last - first):
                continue
            x, width = left + scale * (max(first, begin) - begin), scale * shown
            gap = min(1.0, width / 4)
            height = ROW_HEIGHT / len(action.singles)
            for place, single in enumerate(action.singles):
                colour = colour_of(single.kind, chunk_of[single.stage])
                boxes.append(Box(x + gap / 2, y + place * height, width - gap, height, colour))
                number = str(single.microbatch)
                if width > DIGIT_WIDTH * len(number):
                    words.append(Words(x + width / 2, y + (place + 0.5) * height, number, 10.5, INK, "middle"))


def stacked(timelines: Sequence[tuple[Timeline, str]]) -> Picture:
    """Lay timelines with their titles out one below the other, all against the same time."""
    until = max((timeline.makespan for timeline, _ in timelines), default=1.0)
    scale = _scale([timeline for timeline, _ in timelines], until) if timelines else 1.0
    pictures = [picture(timeline, title, scale=scale, until=until) for timeline, title in timelines]
    boxes: list[Box] = []
    words: list[Words] = []
    top = 0.0
    for one in pictures:
        boxes += [box._replace(y=box.y + top) for box in one.boxes]
        words += [text._replace(y=text.y + top) for text in one.words]
        top += one.height
    return Picture(max((one.width for one in pictures), default=0.0), top, boxes, words)


def svg(picture: Picture) -> str:
    """Write a picture as SVG."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{picture.width:g}" height="{picture.height:g}" '
        f'viewBox="0 0 {picture.width:g} {picture.height:g}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="100%" height="100%" fill="{PAPER}"/>',
    ]
    lines += [
        f'<rect x="{x:.6g}" y="{y:.6g}" width="{width:.6g}" height="{height:.6g}" rx="2" fill="{fill}"/>'
        for x, y, width, height, fill in picture.boxes
    ]
    for x, y, text, size, fill, anchor, bold in picture.words:
        weight = ' font-weight="bold"' if bold else ""
        place = f'x="{x:.6g}" y="{y:.6g}" dy="0.35em" font-size="{size:g}" text-anchor="{anchor}"'
        lines.append(f'<text {place} fill="{fill}"{weight}>{escape(text, quote=False)}</text>')
    return "\n".join([*lines, "</svg>\n"])


def _costs(timeline: Timeline) -> str:
    peaks = timeline.peak_microbatches
    held = f"{' '.join(map(str, peaks))} stage activation{'s' * (sum(peaks) != 1)}"
    return (
        f"bubble {timeline.bubble_fraction:.1%} of ideal time (makespan), "
        f"{timeline.span_bubble_rate:.1%} of a rank's span · peak {held} held"
    )


def colour_of(kind: Kind, chunk: int) -> str:
    """Return hue and lightness as a hexadecimal colour."""
    hue, saturation = HUES[kind]
    lightness = (64 if kind is not Kind.BW else 60) + 11 * min(chunk, 3)
    red, green, blue = colorsys.hls_to_rgb(hue / 360, lightness / 100, saturation / 100)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _add_legend(timeline: Timeline, x: float, y: float, boxes: list[Box], words: list[Words]) -> None:
    """Explain the colours that occur, with a shade for each chunk."""
    occurring = {single.kind for row in timeline.rows for timed in row for single in timed.action.singles}
    num_chunks = max(len(stages_in(row)) for row in timeline.rows)
    entries = [(NAMES[kind], [colour_of(kind, c) for c in range(num_chunks)]) for kind in NAMES if kind in occurring]
    for name, colours in [*entries, ("idle", [IDLE])]:
        for colour in colours:
            boxes.append(Box(x, y - 6, 12, 12, colour))
            x += 13
        words.append(Words(x + 4, y, name, 11, MUTED))
        x += 22 + 5.6 * len(name)
    if num_chunks > 1:
        words.append(Words(x, y, "the lighter, the later the chunk of the rank", 11, MUTED))
