"""The command line: `python -m pipeline draw 1f1b --stages 4 --microbatches 8`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from distributed.trace.perfetto import perfetto
from pipeline.cli import flags
from pipeline.cli import search as search_command
from pipeline.cli import verify as verify_command
from pipeline.schedules.action import Action
from pipeline.schedules.csv_file import dump
from pipeline.schedules.deadlock import check_deadlock_free
from pipeline.schedules.drawing.png import write_png
from pipeline.schedules.drawing.svg import picture, svg
from pipeline.schedules.drawing.text import draw
from pipeline.schedules.lower import lower
from pipeline.schedules.measured import events
from pipeline.schedules.schedule import FORWARD_ONLY, SCHEDULES, Schedule
from pipeline.schedules.simulate import Timeline, simulate
from pipeline.schedules.validate import validate

PROGRAM = "python -m pipeline"
NAMES = {**SCHEDULES, FORWARD_ONLY.name: FORWARD_ONLY}
RANKS, MICROBATCHES = 4, 8
BOUNDARIES = "boundaries between stages"
TIMES = {
    "forward": "a forward",
    "backward-input": "the input half of a backward",
    "backward-weight": "the weight half of a backward",
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


class Command(NamedTuple):
    """A sub-command: its line of help, its arguments, and what it does."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


# -- what several commands take ---------------------------------------------------------------


def add_schedule(parser: argparse.ArgumentParser) -> None:
    """Declare a schedule and its sizes."""
    parser.add_argument("schedule", help=f"one of {', '.join(NAMES)}, or a .csv file")
    what = f"stages of the model (default: as {RANKS} ranks have)"
    parser.add_argument("--stages", type=flags.count, metavar="N", help=what)
    add_microbatches(parser)


def add_microbatches(parser: argparse.ArgumentParser) -> None:
    """Declare the number of micro-batches."""
    what = f"micro-batches a step (default {MICROBATCHES})"
    parser.add_argument("--microbatches", type=flags.count, metavar="M", help=what)


def add_messages(parser: argparse.ArgumentParser) -> None:
    """Declare what communication costs."""
    what = "time until another rank has the first byte of what an action made (default 0)"
    parser.add_argument("--latency", type=flags.latency, default=0.0, metavar="X", help=what)
    what = "bytes that go to another rank in a unit of time (default: any number)"
    parser.add_argument("--bandwidth", type=flags.rate, default=math.inf, metavar="X", help=what)
    what = "bytes between two stages; with commas, one for each boundary (default 0)"
    parser.add_argument("--message-bytes", type=flags.sizes, default=0.0, metavar="B", help=what)


def add_simulation(parser: argparse.ArgumentParser) -> None:
    """Declare what a simulation takes."""
    add_schedule(parser)
    for option, what in TIMES.items():
        help_text = f"time of {what} of one micro-batch; with commas, one for each stage (default 1)"
        parser.add_argument(f"--{option}", type=flags.durations, default=1.0, metavar="T", help=help_text)
    add_messages(parser)


class Checked(NamedTuple):
    """A schedule at its sizes, with orders that `validate` accepts."""

    schedule: Schedule
    orders: list[list[Action]]
    num_stages: int
    title: str


def checked(arguments: argparse.Namespace) -> Checked:
    """Return the schedule that was asked for.

    Where no sizes are given, they are those that the schedule is written for, or else the usual ones.
    """
    schedule = flags.find_schedule(arguments.schedule, NAMES)
    num_ranks, num_microbatches = schedule.sizes or (RANKS, MICROBATCHES)
    if arguments.stages is not None:
        if arguments.stages % schedule.num_chunks:
            raise ValueError(
                f"--stages must be a multiple of {schedule.num_chunks}, the stages that a rank has under "
                f"{schedule.name}, got {arguments.stages}"
            )
        num_ranks = schedule.num_ranks(arguments.stages)
    if arguments.microbatches is not None:
        num_microbatches = arguments.microbatches
    num_stages = schedule.num_stages(num_ranks)
    orders = flags.orders_of(schedule, num_ranks, num_microbatches)
    validate(
        orders,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        rank_of=schedule.rank_of,
        trains=schedule.trains,
    )
    title = f"{schedule.name}: {num_stages} stages on {num_ranks} ranks, {num_microbatches} micro-batches"
    return Checked(schedule, orders, num_stages, title)


def timeline_of(arguments: argparse.Namespace) -> tuple[str, Timeline]:
    """Simulate the schedule that was asked for; return a line that says what it is, and the result."""
    _, orders, num_stages, title = checked(arguments)
    for option in TIMES:
        flags.check_length(f"--{option}", getattr(arguments, option.replace("-", "_")), num_stages, "stages")
    flags.check_length("--message-bytes", arguments.message_bytes, num_stages - 1, BOUNDARIES)
    timeline = simulate(
        orders,
        num_stages=num_stages,
        forward=arguments.forward,
        backward_input=arguments.backward_input,
        backward_weight=arguments.backward_weight,
        latency=arguments.latency,
        message_bytes=arguments.message_bytes,
        bandwidth=arguments.bandwidth,
    )
    return title, timeline


# -- the commands -----------------------------------------------------------------------------


def add_draw(parser: argparse.ArgumentParser) -> None:
    """Declare what `draw` takes."""
    add_simulation(parser)
    for option, what in (
        ("svg", "write the drawing as SVG"),
        ("png", "write the drawing as PNG, which needs matplotlib"),
        ("perfetto", "write the timeline as JSON, to open in ui.perfetto.dev"),
    ):
        parser.add_argument(f"--{option}", type=Path, metavar="FILE", help=what)


def run_draw(arguments: argparse.Namespace) -> None:
    """Print a schedule against time, and what it costs; write the files that are asked for."""
    title, timeline = timeline_of(arguments)
    drawing = picture(timeline, title)
    writers: dict[str, Callable[[Path], object]] = {
        "svg": lambda path: path.write_text(svg(drawing), encoding="utf-8"),
        "png": lambda path: write_png(drawing, path),
        "perfetto": lambda path: path.write_text(perfetto(events(timeline)), encoding="utf-8"),
    }
    for option, write in writers.items():
        path = getattr(arguments, option)
        if path is not None:
            flags.write_file(f"--{option}", path, write)
    print(title)
    print(draw(timeline))
    print_costs(timeline)


def run_simulate(arguments: argparse.Namespace) -> None:
    """Print what a schedule costs."""
    title, timeline = timeline_of(arguments)
    print(title)
    print_costs(timeline)


def print_costs(timeline: Timeline) -> None:
    """Print the numbers of a timeline."""
    peaks = " ".join(map(str, timeline.peak_microbatches_per_stage))
    print(f"makespan                                {timeline.makespan:g}")
    print(f"bubble_fraction (ratio to ideal time)   {timeline.bubble_fraction:.4f}")
    print(f"span_bubble_rate (idle share of a span) {timeline.span_bubble_rate:.4f}")
    print(f"efficiency (ideal time / makespan)      {timeline.efficiency:.4f}")
    print(f"peak micro-batches per stage            {peaks}")


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Declare what `compare` takes."""
    parser.add_argument("schedules", nargs="*", default=list(SCHEDULES), help="names or .csv files (default: all)")
    parser.add_argument("--ranks", type=flags.count, default=RANKS, metavar="P", help=f"ranks (default {RANKS})")
    add_microbatches(parser)
    for option, what in TIMES.items():
        help_text = f"time of {what} of one micro-batch on all stages of a rank (default 1)"
        parser.add_argument(f"--{option}", type=flags.duration, default=1.0, metavar="T", help=help_text)
    add_messages(parser)


def run_compare(arguments: argparse.Namespace) -> None:
    """Print one row a schedule, on the same ranks with the same work."""
    schedules = [flags.find_schedule(name, NAMES) for name in arguments.schedules]
    for schedule in schedules:
        num_boundaries = schedule.num_stages(arguments.ranks) - 1
        of_what = f"{BOUNDARIES} under {schedule.name}"
        flags.check_length("--message-bytes", arguments.message_bytes, num_boundaries, of_what)
    num_microbatches = MICROBATCHES if arguments.microbatches is None else arguments.microbatches
    print(f"{arguments.ranks} ranks, {num_microbatches} micro-batches")
    print(f"{'':18}makespan  bubble/ideal  bubble/span  efficiency  peak micro-batches a rank")
    for schedule in schedules:
        share = 1 / schedule.num_chunks  # of a rank's work, that one stage has
        try:
            orders = flags.orders_of(schedule, arguments.ranks, num_microbatches)
        except ValueError as rule:  # one that does not allow these sizes says so in its row
            print(f"{schedule.name:16}  {rule}")
            continue
        timeline = simulate(
            orders,
            num_stages=schedule.num_stages(arguments.ranks),
            forward=arguments.forward * share,
            backward_input=arguments.backward_input * share,
            backward_weight=arguments.backward_weight * share,
            latency=arguments.latency,
            message_bytes=arguments.message_bytes,
            bandwidth=arguments.bandwidth,
        )
        peaks = " ".join(f"{peak * share:g}" for peak in timeline.peak_microbatches)
        print(
            f"{schedule.name:16}  {timeline.makespan:8.6g}  {timeline.bubble_fraction:12.4f}"
            f"  {timeline.span_bubble_rate:11.4f}  {timeline.efficiency:10.4f}  {peaks}"
        )


def run_check(arguments: argparse.Namespace) -> None:
    """Check a schedule's order, and prove that the messages that it needs cannot block each other."""
    schedule, orders, num_stages, title = checked(arguments)
    programs = lower(orders, rank_of=schedule.rank_of, num_stages=num_stages)
    check_deadlock_free(programs, rank_of=schedule.rank_of, num_stages=num_stages)
    print(f"{title}: complete, in order, and no timing of messages can deadlock it")


def run_dump(arguments: argparse.Namespace) -> None:
    """Print a schedule as a .csv file, to start one's own from."""
    print(dump(checked(arguments).orders), end="")


COMMANDS = {
    "draw": Command("draw a schedule against time, with its bubble and its memory", add_draw, run_draw),
    "simulate": Command("say what a schedule costs in time and memory", add_simulation, run_simulate),
    "compare": Command("compare schedules in one table", add_compare, run_compare),
    "check": Command("check a schedule: its order, and that it cannot deadlock", add_schedule, run_check),
    "verify": Command(
        "train a model in this layout and in one process, and name the first difference",
        verify_command.add_arguments,
        verify_command.run,
    ),
    "search": Command(
        "find the shortest order for given times, links and memory, and how short it could be",
        search_command.add_arguments,
        search_command.run,
    ),
    "dump": Command("print a schedule as a .csv file, to edit and run", add_schedule, run_dump),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command and return the exit status: 2 for a wrong name or value."""
    parser = Parser(
        prog=PROGRAM,
        description="Look at pipeline schedules, and verify that a model trains in one as in one process.",
        epilog=f"for example: {PROGRAM} draw 1f1b --stages 4 --microbatches 8",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add_arguments(subparsers.add_parser(name, help=command.help, description=command.help))
    parsed = parser.parse_args(arguments)
    try:
        COMMANDS[parsed.command].run(parsed)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
