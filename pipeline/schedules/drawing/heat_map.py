"""A number over two others as a picture: the darker a cell, the larger the number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from pipeline.schedules.drawing.svg import IDLE, INK, MARGIN, MUTED, Box, Picture, Words, end_of

CELL_WIDTH, CELL_HEIGHT = 40.0, 22.0
HEAD_HEIGHT, LABEL_WIDTH = 62.0, 64.0
LIGHTEST, DARKEST = (239, 246, 252), (33, 102, 172)
"""Lengths in points; colours as red, green and blue."""


class Quantity(NamedTuple):
    """What numbers are, in words.

    Attributes:
        in_bytes: whether a large one is said with its unit.
    """

    name: str
    in_bytes: bool = False


def heat_map(
    values: Mapping[tuple[float, float], float], what: Quantity, title: str, *, down: Quantity, across: Quantity
) -> Picture:
    """Lay out one cell for each value, grey where there is none.

    Args:
        values: by (number down, number across).
        what, down, across: what these numbers are.
    """
    rows, columns = sorted({row for row, _ in values}), sorted({column for _, column in values})
    left, top = MARGIN + LABEL_WIDTH, MARGIN + HEAD_HEIGHT
    words = [
        Words(MARGIN, MARGIN + 7, title, 15, INK, bold=True),
        Words(MARGIN, MARGIN + 27, f"down: {down.name}, across: {across.name}", 11, MUTED),
    ]
    words += [
        Words(left + (x + 0.5) * CELL_WIDTH, top - 10, _number(column, across.in_bytes), 11, MUTED, "middle")
        for x, column in enumerate(columns)
    ]
    low, high = min(values.values()), max(values.values())
    boxes = []
    for y, row in enumerate(rows):
        middle = top + (y + 0.5) * CELL_HEIGHT
        words.append(Words(MARGIN, middle, _number(row, down.in_bytes), 11, MUTED))
        for x, column in enumerate(columns):
            value = values.get((row, column))
            level = 0.0 if value is None or high == low else (value - low) / (high - low)
            fill = IDLE if value is None else _colour(level)
            boxes.append(Box(left + x * CELL_WIDTH, top + y * CELL_HEIGHT, CELL_WIDTH - 1, CELL_HEIGHT - 1, fill))
            if value is not None:
                ink = "#ffffff" if level > 0.6 else INK
                number = _number(value, what.in_bytes, ".2f" if value < 1e4 else ".3g")
                words.append(Words(left + (x + 0.5) * CELL_WIDTH, middle, number, 10, ink, "middle"))
    right = max(left + len(columns) * CELL_WIDTH, end_of(words))
    return Picture(right + MARGIN, top + len(rows) * CELL_HEIGHT + MARGIN, boxes, words)


def _number(value: float, in_bytes: bool, form: str = "g") -> str:
    """Say a number in the room of a cell."""
    for unit, size in (("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20)) if in_bytes else ():
        if size <= value < math.inf:
            return f"{value / size:.3g}{unit}"
    return format(value, form)


def _colour(level: float) -> str:
    return "#" + "".join(f"{round(a + (b - a) * level):02x}" for a, b in zip(LIGHTEST, DARKEST, strict=True))
