"""`python -m pipeline repair`: a .csv file whose orders hang or break a rule, mended with the fewest moved actions."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.cli import files, flags
from pipeline.schedules.action import ScheduleError
from pipeline.schedules.csv_file import dump, from_text, parse
from pipeline.schedules.deadlock import check_deadlock_free
from pipeline.schedules.drawing.moves import moves_picture
from pipeline.schedules.drawing.png import write_png
from pipeline.schedules.drawing.svg import svg
from pipeline.schedules.drawing.text import draw_order
from pipeline.schedules.lower import lower
from pipeline.schedules.repair import repair
from pipeline.schedules.words import counted

HELP = "mend a .csv file that cannot be run, with the fewest moved actions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `repair` takes."""
    parser.add_argument("file", type=Path, help="a .csv file that holds every action once, in an order that may hang")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the mended orders there")
    what = "draw the orders before and after, what was moved in frames, as SVG"
    parser.add_argument("--svg", type=Path, metavar="FILE", help=what)
    parser.add_argument("--png", type=Path, metavar="FILE", help="the same as PNG, which needs matplotlib")


def run(arguments: argparse.Namespace) -> None:
    """Mend a file, prove the result, and draw what was moved."""
    name = arguments.file.name
    text = files.read_text(arguments.file)
    try:
        orders = parse(text)
        flags.check_size(sum(map(len, orders)))
    except ScheduleError:
        from_text(text, name)  # whose error names the file
        raise
    num_stages = 1 + max((single.stage for order in orders for action in order for single in action.singles), default=0)
    try:
        mended, moved = repair(orders, num_stages=num_stages)
    except ValueError as rule:
        try:
            from_text(text, name)  # where actions are missing, twice or elsewhere, its error says more
        except ScheduleError as fault:
            gave_up = f"\n{rule}" if isinstance(rule, ScheduleError) else ""
            raise ScheduleError(f"{fault}{gave_up}", fault.cells) from rule
        raise
    schedule = from_text(dump(mended), name)  # which validates it
    check_deadlock_free(
        lower(mended, rank_of=schedule.rank_of, num_stages=num_stages), rank_of=schedule.rank_of, num_stages=num_stages
    )
    if arguments.csv is not None:
        files.write_file("--csv", arguments.csv, lambda path: path.write_text(dump(mended), encoding="utf-8"))
    said = f"mended with {counted(len(moved), 'moved action')}, the fewest that do"
    drawing = moves_picture(orders, mended, moved, f"{name}: {said if moved else 'nothing to mend'}")
    if arguments.svg is not None:
        files.write_file("--svg", arguments.svg, lambda path: path.write_text(svg(drawing), encoding="utf-8"))
    if arguments.png is not None:
        files.write_file("--png", arguments.png, lambda path: write_png(drawing, path))
    if arguments.json:
        moves = [
            {"rank": rank, "action": str(orders[rank][before]), "from": before, "to": after}
            for (rank, before), (_, after) in moved
        ]
        print(flags.as_json({"file": name, "moved": moves, "ranks": flags.cells(mended)}))
        return
    if not moved:
        print(f"{name}: nothing to mend: complete, in order, and no timing of messages can deadlock it")
        return
    print(f"{name}: {said}")
    for (rank, before), (_, after) in moved:
        print(f"rank {rank}: {orders[rank][before]} moved from place {before} to {after}")
    print("before")
    print(draw_order(orders, [cell for cell, _ in moved]))
    print("after")
    print(draw_order(mended, [cell for _, cell in moved]))
