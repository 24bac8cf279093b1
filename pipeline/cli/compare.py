"""`python -m pipeline compare`: schedules in one table, on the same ranks with the same work."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from pipeline.cli import files, flags
from pipeline.cli.memory import add_measured, measured_of
from pipeline.cli.schedule_flags import BOUNDARIES, MICROBATCHES, RANKS, add_microbatches, add_ranks
from pipeline.cli.work_flags import add_work, candidates_of, values_of
from pipeline.schedules.action import check_skips
from pipeline.schedules.compare import Result, Work, at_size, peaks_of, result_of, timeline_of, to_csv
from pipeline.schedules.drawing.svg import stacked, svg
from pipeline.schedules.words import amount, counted

HELP = "compare schedules in one table"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `compare` takes."""
    add_work(parser)
    add_measured(parser)
    add_ranks(parser)
    add_microbatches(parser)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the numbers as a table")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw all against the same time, one below the other")


def run(arguments: argparse.Namespace) -> None:
    """Print one row a schedule, and write the files that are asked for.

    Raises:
        ValueError: no schedule allows these sizes, memory and stages: what the first one says.
    """
    candidates = candidates_of(arguments)
    width = max(map(len, candidates))
    given = arguments.ranks, arguments.microbatches
    sizes = num_ranks, num_microbatches = flags.sizes_of(candidates.values(), given, (RANKS, MICROBATCHES))
    flags.check_size(2 * num_ranks * num_microbatches)
    work = Work(**values_of(arguments), measured=measured_of(arguments, num_microbatches))
    rows: list[str] = []
    refused: list[str] = []
    results: list[Result] = []
    drawings = []
    first: ValueError | None = None
    for name, candidate in candidates.items():
        try:
            schedule = at_size(candidate, *sizes, work)
            flags.orders_of(schedule, *sizes)
            check_skips(work.skips, schedule.num_stages(num_ranks))
            if work.measured is not None:
                work.measured.stages_of(schedule.num_stages(num_ranks))  # for its error
        except ValueError as rule:  # one that does not allow these sizes says so in its row
            first = first or rule
            refused.append(f"{name:{width}}  {str(rule).partition(chr(10))[0]}")
            rows.append(refused[-1])
            continue
        num_stages = schedule.num_stages(num_ranks)
        of_what = f"{BOUNDARIES} under {schedule.name}"
        flags.check_length("--message-bytes", arguments.message_bytes, num_stages - 1, of_what)
        timeline = timeline_of(schedule, *sizes, work)
        result = result_of(schedule, timeline, num_microbatches, work)
        results.append(result)
        drawings.append((timeline, f"{name}: {counted(num_stages, 'stage')}"))
        reduced = f"  {result.with_reductions:15.6g}  {result.hidden:6.4f}" if work.gradient_bytes else ""
        peaks = " ".join(map(amount, peaks_of(schedule, timeline, work)))
        rows.append(
            f"{name:{width}}  {timeline.makespan:8.6g}  {timeline.bubble_fraction:12.4f}"
            f"  {timeline.span_bubble_rate:11.4f}  {timeline.efficiency:10.4f}{reduced}  {peaks}"
            f"{'' if result.fits else '  too much'}"
        )
    if first is not None and not results:
        raise first
    if arguments.csv is not None:
        files.write_file("--csv", arguments.csv, lambda path: path.write_text(to_csv(results), encoding="utf-8"))
    if arguments.svg is not None:
        drawing = svg(stacked(drawings))
        files.write_file("--svg", arguments.svg, lambda path: path.write_text(drawing, encoding="utf-8"))
    if arguments.json:
        print(flags.as_json(list(map(asdict, results))))
        for row in refused:
            print(row, file=sys.stderr)
        return
    reduced = "  with reductions  hidden" if work.gradient_bytes else ""
    held = work.activations, work.deferred, work.static, work.skip_bytes
    in_microbatches = work.measured is None and held == (1, 0, 0, 0)
    print(flags.sizes_in_words(*sizes))
    print(
        f"{'':{width}}  makespan  bubble/ideal  bubble/span  efficiency{reduced}"
        f"  peak {'micro-batches' if in_microbatches else 'memory'} a rank"
    )
    print("\n".join(rows))
