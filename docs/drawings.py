"""Draws the pictures of docs/schedules.md, and one of docs/performance.md, into docs/img; `make drawings` runs it.

They are committed, so that the page shows them where no Python runs; a test compares them with what this gives.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline import SCHEDULES, picture, simulate, svg
from pipeline.schedules.compare import Work, timeline_of
from pipeline.schedules.csv_file import parse
from pipeline.schedules.drawing.moves import moves_picture
from pipeline.schedules.drawing.svg import stacked
from pipeline.schedules.repair import repair

NUM_RANKS, NUM_MICROBATCHES = 4, 8
COMPARED = "1f1b", "zero_bubble_h1", "zbv", "v_half", "v_min"
FOLDER = Path(__file__).parent / "img"
MUON = Path(__file__).parents[1] / "benchmarks" / "results" / "muon.json"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 52, 120, 44, 40  # of a plot and its margins
COLOURS = {"adamw": "#616e7c", "muon": "#2563ab"}
NAMES = {"adamw": "AdamW", "muon": "Muon"}


def drawings() -> dict[str, str]:
    """Return an SVG for every schedule, by file name: the same work on the same ranks, cut finer for chunks."""
    files = {}
    for name, schedule in SCHEDULES.items():
        num_stages = schedule.num_stages(NUM_RANKS)
        timeline = simulate(schedule.orders(NUM_RANKS, NUM_MICROBATCHES), num_stages=num_stages)
        title = f"{name}: {num_stages} stages on {NUM_RANKS} ranks, {NUM_MICROBATCHES} micro-batches"
        files[f"{name}.svg"] = svg(picture(timeline, title))
    return {**files, "compare.svg": compared(), "repair.svg": repaired(), "muon.svg": learned()}


def compared() -> str:
    """Draw some schedules against the same time, as the command on the page does."""
    work = Work(latency=0.333)
    titles = {name: f"{name}: {SCHEDULES[name].num_stages(NUM_RANKS)} stages" for name in COMPARED}
    timelines = {name: timeline_of(SCHEDULES[name], NUM_RANKS, NUM_MICROBATCHES, work) for name in COMPARED}
    return svg(stacked([(timelines[name], titles[name]) for name in COMPARED]))


def repaired() -> str:
    """Draw what `repair --svg` does with a schedule whose last rank would hang."""
    orders = parse("0F0,0F1,0BW0,0F2,0BW1,0BW2\n1BW0,1F0,1F1,1BW1,1F2,1BW2\n")
    mended, moved = repair(orders, num_stages=2)
    return svg(moves_picture(orders, mended, moved, "mine.csv: mended with 1 moved action, the fewest that do"))


def learned() -> str:
    """Draw the training losses that `make bench-muon` found, of each rule at its best learning rate."""
    found = json.loads(MUON.read_text())
    best: dict[str, dict[str, Any]] = {}
    for run in sorted(found["runs"], key=lambda run: float(run["validation_loss"])):
        best.setdefault(run["rule"], run)
    num_points, apart = len(best["muon"]["curve"]), found["steps_a_point"]
    losses = [loss for run in best.values() for loss in run["curve"]]
    low, high = int(min(losses)), int(max(losses)) + 1

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / (num_points * apart)

    def y(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)

    def words(at_x: float, at_y: float, text: str, colour: str = "#616e7c", anchor: str = "start") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" fill="{colour}" text-anchor="{anchor}">{text}</text>'

    lines = [
        words(
            LEFT, 24, "training loss by step, nats a byte: a GPT of 2 layers of width 64 on the same batches", "#1f2933"
        )
    ]
    for loss in range(low, high + 1):
        lines.append(f'<path d="M{LEFT} {y(loss):.1f}H{WIDTH - RIGHT}" stroke="#e4e7eb"/>')
        lines.append(words(LEFT - 8, y(loss) + 4, str(loss), anchor="end"))
    for step in range(0, num_points * apart + 1, 10 * apart):
        lines.append(words(x(step), HEIGHT - 16, str(step), anchor="middle"))
    for rule, run in best.items():
        points = [f"{x((i + 0.5) * apart):.1f} {y(loss):.1f}" for i, loss in enumerate(run["curve"])]
        lines.append(f'<path d="M{"L".join(points)}" stroke="{COLOURS[rule]}" fill="none" stroke-width="2"/>')
        where = y(run["curve"][-1]) + 4
        lines.append(words(WIDTH - RIGHT + 8, where, f"{NAMES[rule]}, lr {run['lr']:g}", COLOURS[rule]))
    style = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {style}>'
    return "\n".join([head, f'<path d="M0 0H{WIDTH}V{HEIGHT}H0Z" fill="#ffffff"/>', *lines, "</svg>", ""])


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name, text in drawings().items():
        (FOLDER / file_name).write_text(text, encoding="utf-8")
