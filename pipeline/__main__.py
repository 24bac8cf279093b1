"""The command line: `python -m pipeline draw 1f1b --stages 4 --microbatches 8`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from pipeline import verify_command
from pipeline.action import Action
from pipeline.check import validate
from pipeline.deadlock import prove
from pipeline.draw import draw
from pipeline.lower import lower
from pipeline.picture import picture, svg
from pipeline.png import write_png
from pipeline.schedules import FORWARD_ONLY, SCHEDULES, Schedule
from pipeline.simulate import Timeline, simulate
from pipeline.text import dump, load
from pipeline.trace import events, perfetto

PROGRAM = "python -m pipeline"
NAMES = {**SCHEDULES, FORWARD_ONLY.name: FORWARD_ONLY}
RANKS, MICROBATCHES = 4, 8
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


def numbers(text: str) -> list[float] | float:
    """Read one number, or several with commas between."""
    values = [float(number) for number in text.split(",")]
    return values if len(values) > 1 else values[0]


def named(name: str) -> Schedule:
    """Find a schedule by its name, or read it from a file."""
    if name.endswith(".csv"):
        return load(name)
    if name not in NAMES:
        raise ValueError(f"schedule must be one of {', '.join(NAMES)}, or a file that ends in .csv, got {name!r}")
    return NAMES[name]


# -- what several commands take ---------------------------------------------------------------


def add_schedule(parser: argparse.ArgumentParser) -> None:
    """Declare a schedule and its sizes."""
    parser.add_argument("schedule", help=f"one of {', '.join(NAMES)}, or a .csv file")
    parser.add_argument("--stages", type=int, metavar="N", help="stages of the model (default: as 4 ranks have)")
    add_microbatches(parser)


def add_microbatches(parser: argparse.ArgumentParser) -> None:
    """Declare the number of micro-batches."""
    parser.add_argument("--microbatches", type=int, metavar="M", help=f"micro-batches a step (default {MICROBATCHES})")


def add_messages(parser: argparse.ArgumentParser) -> None:
    """Declare what communication costs."""
    for option, default, what in (
        ("latency", 0.0, "time until another rank has the first byte of what an action made (default 0)"),
        ("bandwidth", float("inf"), "bytes that go to another rank in a unit of time (default: any number)"),
    ):
        parser.add_argument(f"--{option}", type=float, default=default, metavar="X", help=what)
    what = "bytes between two stages; with commas, one for each boundary (default 0)"
    parser.add_argument("--message-bytes", type=numbers, default=0.0, metavar="B", help=what)


def add_simulation(parser: argparse.ArgumentParser) -> None:
    """Declare what a simulation takes."""
    add_schedule(parser)
    for option, what in TIMES.items():
        help_text = f"time of {what} of one micro-batch; with commas, one for each stage (default 1)"
        parser.add_argument(f"--{option}", type=numbers, default=1.0, metavar="T", help=help_text)
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
    schedule = named(arguments.schedule)
    num_ranks, num_microbatches = schedule.sizes or (RANKS, MICROBATCHES)
    if arguments.stages is not None:
        num_ranks = schedule.num_ranks(arguments.stages)
    if arguments.microbatches is not None:
        num_microbatches = arguments.microbatches
    num_stages = schedule.num_stages(num_ranks)
    orders = schedule.orders(num_ranks, num_microbatches)
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
    for option in ("svg", "png", "perfetto"):
        parser.add_argument(f"--{option}", type=Path, metavar="FILE", help=f"write a file for {option} too")


def run_draw(arguments: argparse.Namespace) -> None:
    """Print a schedule against time, and what it costs; write the files that are asked for."""
    title, timeline = timeline_of(arguments)
    if arguments.svg:
        arguments.svg.write_text(svg(picture(timeline, title)), encoding="utf-8")
    if arguments.png:
        write_png(picture(timeline, title), arguments.png)
    if arguments.perfetto:
        arguments.perfetto.write_text(perfetto(events(timeline)), encoding="utf-8")
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
    parser.add_argument("--ranks", type=int, default=RANKS, metavar="P", help=f"ranks (default {RANKS})")
    add_microbatches(parser)
    for option, what in TIMES.items():
        help_text = f"time of {what} of one micro-batch on all stages of a rank (default 1)"
        parser.add_argument(f"--{option}", type=float, default=1.0, metavar="T", help=help_text)
    add_messages(parser)


def run_compare(arguments: argparse.Namespace) -> None:
    """Print one row a schedule, on the same ranks with the same work."""
    schedules = [named(name) for name in arguments.schedules]
    num_microbatches = MICROBATCHES if arguments.microbatches is None else arguments.microbatches
    print(f"{arguments.ranks} ranks, {num_microbatches} micro-batches")
    print(f"{'':18}makespan  bubble/ideal  bubble/span  efficiency  peak micro-batches a rank")
    for schedule in schedules:
        share = 1 / schedule.num_chunks  # of a rank's work, that one stage has
        try:
            orders = schedule.orders(arguments.ranks, num_microbatches)
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
    prove(programs, rank_of=schedule.rank_of, num_stages=num_stages)
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
