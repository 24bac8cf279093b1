"""`python -m pipeline simulate`: what a schedule costs."""

from __future__ import annotations

import argparse

from pipeline.cli.schedule_flags import add_simulation, print_costs, timeline_of

HELP = "say what a schedule costs in time and memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `simulate` takes."""
    add_simulation(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print what a schedule costs."""
    title, timeline = timeline_of(arguments)
    print(title)
    print_costs(timeline)
