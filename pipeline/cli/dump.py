"""`python -m pipeline dump`: a schedule as a .csv file, to start one's own from."""

from __future__ import annotations

import argparse

from pipeline.cli import flags
from pipeline.cli.schedule_flags import add_schedule, checked, sized
from pipeline.schedules.csv_file import dump
from pipeline.schedules.torch_csv import dump_torch

HELP = "print a schedule as a .csv file, to edit and run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `dump` takes."""
    add_schedule(parser)
    parser.add_argument("--for", dest="target", choices=["torch"], help="write it as torch.distributed.pipelining does")
    parser.add_argument("--from", dest="source", choices=["torch"], help="read a .csv file that is written so")


def run(arguments: argparse.Namespace) -> None:
    """Print a schedule as a .csv file."""
    orders = flags.load_torch(arguments.schedule) if arguments.source else checked(sized(arguments)).orders
    text = dump_torch(orders) if arguments.target else dump(orders)
    if arguments.json:
        print(flags.as_json({"ranks": [line.split(",") for line in text.splitlines()]}))
        return
    print(text, end="")
