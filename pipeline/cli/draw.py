"""`python -m pipeline draw`: a schedule against time, on the screen and in files."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from distributed.trace.perfetto import perfetto
from pipeline.cli import files, flags
from pipeline.cli.schedule_flags import add_simulation, costs, print_costs, timeline_of
from pipeline.schedules.drawing.png import write_png
from pipeline.schedules.drawing.svg import DIGIT_WIDTH, picture, svg
from pipeline.schedules.drawing.text import draw
from pipeline.schedules.measured import events

HELP = "draw a schedule against time, with its bubble and its memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `draw` takes."""
    add_simulation(parser)
    what = "letters that a line has; what is longer goes on below, in files too"
    parser.add_argument("--width", type=flags.count, metavar="N", help=what)
    for option, what in (
        ("svg", "write the drawing as SVG"),
        ("png", "write the drawing as PNG, which needs matplotlib"),
        ("perfetto", "write the timeline as JSON, to open in ui.perfetto.dev"),
    ):
        parser.add_argument(f"--{option}", type=Path, metavar="FILE", help=what)


def run(arguments: argparse.Namespace) -> None:
    """Print a schedule against time, and what it costs; write the files that are asked for."""
    checked, timeline = timeline_of(arguments)
    title = checked.title
    try:
        text = draw(timeline, width=arguments.width)  # first: it may be too wide to draw
    except ValueError as rule:
        raise flags.in_flags(rule) from rule
    drawing = picture(timeline, title, width=arguments.width and DIGIT_WIDTH * arguments.width)
    writers: dict[str, Callable[[Path], object]] = {
        "svg": lambda path: path.write_text(svg(drawing), encoding="utf-8"),
        "png": lambda path: write_png(drawing, path),
        "perfetto": lambda path: path.write_text(perfetto(events(timeline)), encoding="utf-8"),
    }
    for option, write in writers.items():
        path = getattr(arguments, option)
        if path is not None:
            files.write_file(f"--{option}", path, write)
    if arguments.json:
        rows = [[(str(action), start, end) for action, start, end in row] for row in timeline.rows]
        print(flags.as_json({**checked.values, **costs(timeline), "ranks": rows}))
        return
    print(title)
    print(text)
    print_costs(timeline)
