"""Draws the pictures of docs/schedules.md into docs/img; `make drawings` runs it.

They are committed, so that the page shows them where no Python runs; a test compares them with what this gives.
"""

from __future__ import annotations

from pathlib import Path

from pipeline import SCHEDULES, picture, simulate, svg
from pipeline.schedules.compare import Work, timeline_of
from pipeline.schedules.csv_file import parse
from pipeline.schedules.drawing.moves import moves_picture
from pipeline.schedules.drawing.svg import stacked
from pipeline.schedules.repair import repair

NUM_RANKS, NUM_MICROBATCHES = 4, 8
COMPARED = "1f1b", "zero_bubble_h1", "zbv", "v_half", "v_min"
FOLDER = Path(__file__).parent / "img"


def drawings() -> dict[str, str]:
    """Return an SVG for every schedule, by file name: the same work on the same ranks, cut finer for chunks."""
    files = {}
    for name, schedule in SCHEDULES.items():
        num_stages = schedule.num_stages(NUM_RANKS)
        timeline = simulate(schedule.orders(NUM_RANKS, NUM_MICROBATCHES), num_stages=num_stages)
        title = f"{name}: {num_stages} stages on {NUM_RANKS} ranks, {NUM_MICROBATCHES} micro-batches"
        files[f"{name}.svg"] = svg(picture(timeline, title))
    return {**files, "compare.svg": compared(), "repair.svg": repaired()}


def compared() -> str:
    """Draw some schedules against the same time, as `compare --svg` does: messages take a third of a forward."""
    work = Work(latency=1 / 3)
    return svg(stacked([(timeline_of(SCHEDULES[n], NUM_RANKS, NUM_MICROBATCHES, work), n) for n in COMPARED]))


def repaired() -> str:
    """Draw what `repair --svg` does with a schedule whose last rank would hang."""
    orders = parse("0F0,0F1,0BW0,0F2,0BW1,0BW2\n1BW0,1F0,1F1,1BW1,1F2,1BW2\n")
    mended, moved = repair(orders, num_stages=2)
    return svg(moves_picture(orders, mended, moved, "mine.csv: mended with 1 moved action, the fewest that do"))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name, text in drawings().items():
        (FOLDER / file_name).write_text(text, encoding="utf-8")
