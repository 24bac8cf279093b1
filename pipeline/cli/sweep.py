"""`python -m pipeline sweep`: what schedules cost at many sizes, as CSV and as a heat map."""

from __future__ import annotations

import argparse
import math
from dataclasses import fields
from pathlib import Path

from pipeline.cli import flags
from pipeline.schedules.compare import Work, sweep, to_csv
from pipeline.schedules.drawing.heat_map import heat_map
from pipeline.schedules.drawing.svg import svg
from pipeline.schedules.schedule import SCHEDULES

HELP = "measure schedules at many sizes, as CSV and as a heat map"
VALUES = {
    "bubble": "makespan bubble, as a ratio to the work",
    "span-bubble": "span bubble, as a share of the span",
    "peak-memory": "most memory that a rank holds",
    "with-reductions": "time of a step with its reductions",
}
_WORK = {
    "forward": "time of a forward of a micro-batch on a rank",
    "backward-input": "time of the input half of its backward",
    "backward-weight": "time of the weight half of its backward",
    "latency": "time of a message to another rank",
    "reduction": "time to reduce the gradients of a rank over replicas",
    "reduction-latency": "time that each reduction takes besides",
    "activations": "memory of a micro-batch on a rank from its forward to its backward",
    "deferred": "memory of it from the input half of its backward to the weight half",
    "static": "memory of weights, their gradients and optimizer state",
    "memory": "memory that a rank has",
}
_MEMORIES = ("activations", "deferred", "static", "memory")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `sweep` takes."""
    parser.add_argument("schedules", nargs="*", default=list(SCHEDULES), help="names or .csv files (default: all)")
    what = "numbers of ranks, as 2..16 or 2,4,8 (default 4)"
    parser.add_argument("--ranks", type=flags.counts, default=[4], metavar="P", help=what)
    what = "numbers of micro-batches, as 4..64 (default 8)"
    parser.add_argument("--microbatches", type=flags.counts, default=[8], metavar="M", help=what)
    defaults = {field.name: field.default for field in fields(Work)}
    for option, what in _WORK.items():
        default = defaults[option.replace("-", "_")]
        read = flags.memory if option in _MEMORIES else flags.duration if default == 1.0 else flags.latency
        shown = "any amount" if default == math.inf else f"{default:g}"
        parser.add_argument(f"--{option}", type=read, default=default, metavar="X", help=f"{what} (default {shown})")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there, and do not print it")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw a heat map, of one schedule")
    what = f"what the heat map shows: {', '.join(VALUES)} (default bubble)"
    parser.add_argument("--value", choices=list(VALUES), default="bubble", metavar="WHAT", help=what)


def run(arguments: argparse.Namespace) -> None:
    """Print or write a table, and draw it."""
    schedules = [flags.find_schedule(name, SCHEDULES) for name in arguments.schedules]
    if arguments.svg is not None and len(schedules) != 1:
        raise ValueError(f"--svg draws one schedule, got {len(schedules)}")
    for p in arguments.ranks:
        flags.check_size(2 * p * max(arguments.microbatches))
    work = Work(**{option.replace("-", "_"): getattr(arguments, option.replace("-", "_")) for option in _WORK})
    results = sweep(schedules, arguments.ranks, arguments.microbatches, work)
    if not results:
        raise ValueError("no schedule allows any of these sizes")
    if arguments.csv is not None:
        flags.write_file("--csv", arguments.csv, lambda path: path.write_text(to_csv(results), encoding="utf-8"))
    else:
        print(to_csv(results), end="")
    if arguments.svg is not None:
        name = arguments.value.replace("-", "_")
        values = {(result.num_ranks, result.num_microbatches): getattr(result, name) for result in results}
        title = f"{schedules[0].name}: {VALUES[arguments.value]}"
        drawing = svg(heat_map(values, title, down="ranks", across="micro-batches"))
        flags.write_file("--svg", arguments.svg, lambda path: path.write_text(drawing, encoding="utf-8"))
