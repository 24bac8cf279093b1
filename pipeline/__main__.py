"""The command line: `python -m pipeline draw 1f1b --stages 4 --microbatches 8`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from pipeline.check import validate
from pipeline.draw import draw
from pipeline.schedules import SCHEDULES
from pipeline.simulate import simulate

PROGRAM = "python -m pipeline"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


class Command(NamedTuple):
    """A sub-command: its line of help, its arguments, and what it does."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def times(text: str) -> list[float] | float:
    """Read one time, or one for each stage with commas between."""
    numbers = [float(number) for number in text.split(",")]
    return numbers if len(numbers) > 1 else numbers[0]


def add_draw_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `draw` takes."""
    parser.add_argument("schedule", help=f"one of {', '.join(SCHEDULES)}")
    parser.add_argument("--stages", type=int, default=4, metavar="P", help="stages of the model (default 4)")
    parser.add_argument("--microbatches", type=int, default=8, metavar="M", help="micro-batches a step (default 8)")
    for option, what in (
        ("--forward", "a forward"),
        ("--backward-input", "the input half of a backward"),
        ("--backward-weight", "the weight half of a backward"),
    ):
        help_text = f"time of {what} of one micro-batch; with commas, one for each stage (default 1)"
        parser.add_argument(option, type=times, default=1.0, metavar="T", help=help_text)
    help_text = "time until another rank has what an action made (default 0)"
    parser.add_argument("--latency", type=float, default=0.0, metavar="T", help=help_text)


def run_draw(arguments: argparse.Namespace) -> None:
    """Print a schedule against time, and what it costs."""
    if arguments.schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {arguments.schedule!r}")
    schedule = SCHEDULES[arguments.schedule]
    num_ranks = schedule.num_ranks(arguments.stages)
    orders = schedule.orders(num_ranks, arguments.microbatches)
    validate(orders, num_stages=arguments.stages, num_microbatches=arguments.microbatches, rank_of=schedule.rank_of)
    timeline = simulate(
        orders,
        num_stages=arguments.stages,
        forward=arguments.forward,
        backward_input=arguments.backward_input,
        backward_weight=arguments.backward_weight,
        latency=arguments.latency,
    )
    peaks = " ".join(map(str, timeline.peak_microbatches_per_stage))
    print(f"{schedule.name}: {arguments.stages} stages on {num_ranks} ranks, {arguments.microbatches} micro-batches")
    print(draw(timeline))
    print(f"makespan                                {timeline.makespan:g}")
    print(f"bubble_fraction (ratio to ideal time)   {timeline.bubble_fraction:.4f}")
    print(f"span_bubble_rate (idle share of a span) {timeline.span_bubble_rate:.4f}")
    print(f"efficiency (ideal time / makespan)      {timeline.efficiency:.4f}")
    print(f"peak micro-batches per stage            {peaks}")


COMMANDS = {
    "draw": Command("draw a schedule against time, with its bubble and its memory", add_draw_arguments, run_draw),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command and return the exit status: 2 for a wrong name or value."""
    parser = Parser(
        prog=PROGRAM,
        description="Look at pipeline schedules without running a model.",
        epilog=f"for example: {PROGRAM} draw 1f1b --stages 4 --microbatches 8",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add_arguments(subparsers.add_parser(name, help=command.help, description=command.help))
    parsed = parser.parse_args(arguments)
    try:
        COMMANDS[parsed.command].run(parsed)
    except ValueError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
