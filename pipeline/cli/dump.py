"""`python -m pipeline dump`: a schedule as a .csv file, to start one's own from."""

from __future__ import annotations

import argparse

from pipeline.cli.schedule_flags import add_schedule, checked
from pipeline.schedules.csv_file import dump

HELP = "print a schedule as a .csv file, to edit and run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `dump` takes."""
    add_schedule(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print a schedule as a .csv file."""
    print(dump(checked(arguments).orders), end="")
