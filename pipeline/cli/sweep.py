"""`python -m pipeline sweep`: what schedules cost at many sizes, links and memories, as CSV and as a heat map."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from itertools import product
from pathlib import Path

from pipeline.cli import files, flags
from pipeline.cli.work_flags import add_work, candidates_of, values_of
from pipeline.schedules.compare import Work, sweep, to_csv
from pipeline.schedules.drawing.heat_map import Quantity, heat_map
from pipeline.schedules.drawing.svg import svg

HELP = "measure schedules at many sizes, links and memories, as CSV and as a heat map"
VALUES = {
    "bubble": Quantity("makespan bubble, as a ratio to the work"),
    "span-bubble": Quantity("span bubble, as a share of the span"),
    "peak-memory": Quantity("most memory that a rank holds", in_bytes=True),
    "with-reductions": Quantity("time of a step with its reductions"),
}
AXES = {
    "num_ranks": Quantity("ranks"),
    "num_microbatches": Quantity("micro-batches"),
    "latency": Quantity("latency"),
    "bandwidth": Quantity("bandwidth"),  # typed without a unit: 1e9 was said to be 954Mi
    "memory": Quantity("memory", in_bytes=True),
}
"""What a sweep goes over."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `sweep` takes."""
    add_work(parser, swept=True)
    what = "numbers of ranks, as 2..16 or 2,4,8 (default 4)"
    parser.add_argument("--ranks", type=flags.counts, default=[4], metavar="P", help=what)
    what = "numbers of micro-batches, as 4..64 (default 8)"
    parser.add_argument("--microbatches", type=flags.counts, default=[8], metavar="M", help=what)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there, and do not print it")
    what = "draw a heat map of one schedule, over the two things that have several values"
    parser.add_argument("--svg", type=Path, metavar="FILE", help=what)
    what = f"what the heat map shows: {', '.join(VALUES)} (default bubble)"
    parser.add_argument("--value", choices=list(VALUES), default="bubble", metavar="WHAT", help=what)


def run(arguments: argparse.Namespace) -> None:
    """Print or write a table, and draw it."""
    candidates = candidates_of(arguments)
    values = values_of(arguments)
    several = {"num_ranks": arguments.ranks, "num_microbatches": arguments.microbatches}
    several |= {name: v if isinstance(v := values[name], list) else [v] for name in ("latency", "bandwidth", "memory")}
    axes = [name for name, found in several.items() if len(found) > 1]
    if arguments.svg is not None:
        if len(candidates) != 1:
            raise ValueError(f"--svg draws one schedule, got {len(candidates)}")
        if len(axes) > 2:
            got = ", ".join(AXES[axis].name for axis in axes)
            raise ValueError(f"--svg draws over at most two things, got several of {got}")
    for p in arguments.ranks:
        flags.check_size(2 * p * max(arguments.microbatches))
    links_and_memory = product(*(several[name] for name in ("latency", "bandwidth", "memory")))
    works = [Work(**{**values, "latency": x, "bandwidth": y, "memory": z}) for x, y, z in links_and_memory]
    try:
        results = sweep(candidates.values(), arguments.ranks, arguments.microbatches, works)
    except ValueError as rule:  # no schedule allows any of these sizes
        raise flags.in_flags(rule) from rule
    if arguments.csv is not None:
        files.write_file("--csv", arguments.csv, lambda path: path.write_text(to_csv(results), encoding="utf-8"))
    if arguments.svg is not None:
        down, across = (axes + [name for name in several if name not in axes])[:2]
        name = arguments.value.replace("-", "_")
        cells = {(getattr(result, down), getattr(result, across)): getattr(result, name) for result in results}
        value = VALUES[arguments.value]
        title = f"{next(iter(candidates))}: {value.name}"
        drawing = svg(heat_map(cells, value, title, down=AXES[down], across=AXES[across]))
        files.write_file("--svg", arguments.svg, lambda path: path.write_text(drawing, encoding="utf-8"))
    if arguments.json:
        print(flags.as_json(list(map(asdict, results))))
    elif arguments.csv is None:
        print(to_csv(results).rstrip())
