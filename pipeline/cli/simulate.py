"""`python -m pipeline simulate`: what a schedule costs."""

from __future__ import annotations

import argparse

from pipeline.cli import flags
from pipeline.cli.memory import add_measured, measured_of
from pipeline.cli.schedule_flags import add_simulation, costs, print_costs, timeline_of
from pipeline.schedules.words import amount

HELP = "say what a schedule costs in time and memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `simulate` takes."""
    add_simulation(parser)
    add_measured(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print what a schedule costs."""
    checked, timeline = timeline_of(arguments)
    measured = measured_of(arguments, checked.num_microbatches)
    peaks = None
    if measured is not None:
        place = checked.num_stages, checked.schedule.rank_of
        peaks = measured.peaks(timeline, *place, skips=arguments.skips, skip_bytes=arguments.skip_bytes)
    waiting = timeline.peak_memory(0.0, 0.0, skips=arguments.skips) if arguments.skips else None
    if arguments.json:
        print(flags.as_json({**checked.values, **costs(timeline), "skips_that_wait": waiting, "peak_bytes": peaks}))
        return
    print(checked.title)
    print_costs(timeline)
    if waiting is not None:
        print(f"skips that wait, at most a rank         {' '.join(f'{count:g}' for count in waiting)}")
    if peaks is not None:
        print(f"peak memory a rank                      {' '.join(map(amount, peaks))}")
