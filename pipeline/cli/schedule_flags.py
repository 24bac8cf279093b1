"""What the commands that look at a schedule take, and the schedule or timeline that it asks for."""

from __future__ import annotations

import argparse
import math
from typing import Any, NamedTuple

from pipeline.cli import flags
from pipeline.schedules.action import Action
from pipeline.schedules.schedule import FORWARD_ONLY, SCHEDULES, Schedule
from pipeline.schedules.simulate import simulate
from pipeline.schedules.timeline import Timeline

NAMES = {**SCHEDULES, FORWARD_ONLY.name: FORWARD_ONLY}
RANKS, MICROBATCHES = 4, 8
AS_WRITTEN = "what a schedule's file is written for"
BOUNDARIES = "boundaries between stages"
TIMES = {
    "forward": "a forward",
    "backward-input": "the input half of a backward",
    "backward-weight": "the weight half of a backward",
}


def add_schedule(parser: argparse.ArgumentParser) -> None:
    """Declare a schedule and its sizes."""
    parser.add_argument("schedule", help=f"one of {', '.join(NAMES)}, a .csv file, or MODULE:NAME")
    size = parser.add_mutually_exclusive_group()
    add_ranks(size)
    what = "stages of the model, in place of --ranks"
    size.add_argument("--stages", type=flags.count, metavar="N", help=what)
    add_microbatches(parser)


def add_ranks(parser: argparse._ActionsContainer) -> None:
    """Declare the number of ranks."""
    what = f"ranks (default {RANKS}, or {AS_WRITTEN})"
    parser.add_argument("--ranks", type=flags.count, metavar="P", help=what)


def add_microbatches(parser: argparse.ArgumentParser) -> None:
    """Declare the number of micro-batches."""
    what = f"micro-batches a step (default {MICROBATCHES}, or {AS_WRITTEN})"
    parser.add_argument("--microbatches", type=flags.count, metavar="M", help=what)


def add_messages(parser: argparse.ArgumentParser) -> None:
    """Declare what communication costs."""
    what = "time until another rank has the first byte of what an action made (default 0)"
    parser.add_argument("--latency", type=flags.latency, default=0.0, metavar="X", help=what)
    what = "bytes that go to another rank in a unit of time (default: any number)"
    parser.add_argument("--bandwidth", type=flags.rate, default=math.inf, metavar="X", help=what)
    what = "share of the shorter one of a pair (0F4&3BW1) that runs beside the longer one, from 0 to 1 (default 0)"
    parser.add_argument("--overlap", type=flags.share, default=0.0, metavar="X", help=what)
    what = "bytes between two stages; with commas, one for each boundary (default 0)"
    parser.add_argument("--message-bytes", type=flags.sizes, default=0.0, metavar="B", help=what)


def add_simulation(parser: argparse.ArgumentParser) -> None:
    """Declare what a simulation takes."""
    add_schedule(parser)
    for option, what in TIMES.items():
        help_text = f"time of {what} of one micro-batch; with commas, one for each stage (default 1)"
        parser.add_argument(f"--{option}", type=flags.durations, default=1.0, metavar="T", help=help_text)
    add_messages(parser)
    add_skips(parser)
    add_skip_bytes(parser)


def add_skip_bytes(parser: argparse.ArgumentParser) -> None:
    """Declare what skip connections carry."""
    what = "bytes that a skip connection takes; with commas, one for each (default 0)"
    parser.add_argument("--skip-bytes", type=flags.memories, default=0.0, metavar="B", help=what)


def check_skip_bytes(arguments: argparse.Namespace) -> None:
    """Check that there are as many sizes as skip connections, or one.

    Raises:
        ValueError: there are not.
    """
    if arguments.skip_bytes and not arguments.skips:
        raise ValueError("--skip-bytes needs --skips")
    flags.check_length("--skip-bytes", arguments.skip_bytes, len(arguments.skips), "skips")


def add_skips(parser: argparse.ArgumentParser) -> None:
    """Declare the skip connections of a model."""
    what = "outputs of stages that later ones take too, as a U-Net has: 0-3,1-2 (default: none)"
    parser.add_argument("--skips", type=flags.skips, default=[], metavar="FROM-TO", help=what)


class Checked(NamedTuple):
    """A schedule at its sizes, with orders that `validate` accepts."""

    schedule: Schedule
    orders: list[list[Action]]
    num_stages: int
    num_microbatches: int

    @property
    def title(self) -> str:
        """Its name and sizes, in words."""
        sizes = flags.sizes_in_words(len(self.orders), self.num_microbatches, num_stages=self.num_stages)
        return f"{self.schedule.name}: {sizes}"

    @property
    def values(self) -> dict[str, Any]:
        """Its name and sizes, for JSON."""
        return {
            "schedule": self.schedule.name,
            "num_stages": self.num_stages,
            "num_ranks": len(self.orders),
            "num_microbatches": self.num_microbatches,
        }


class Sized(NamedTuple):
    """A schedule and its sizes, of which nothing is made yet."""

    schedule: Schedule
    num_ranks: int
    num_microbatches: int


def sized(arguments: argparse.Namespace) -> Sized:
    """Return the schedule that was asked for, with its sizes.

    Where no sizes are given, they are those that the schedule is written for, or else the usual ones.
    """
    schedule = flags.find_schedule(arguments.schedule, NAMES)
    given = arguments.ranks, arguments.microbatches
    num_ranks, num_microbatches = flags.sizes_of([schedule], given, (RANKS, MICROBATCHES))
    if arguments.stages is not None:
        if arguments.stages % schedule.num_chunks:
            raise ValueError(
                f"--stages must be a multiple of {schedule.num_chunks}, the stages that a rank has under "
                f"{schedule.name}, got {arguments.stages}"
            )
        num_ranks = schedule.num_ranks(arguments.stages)
    return Sized(schedule, num_ranks, num_microbatches)


def checked(asked: Sized) -> Checked:
    """Return a schedule with its orders."""
    schedule, num_ranks, num_microbatches = asked
    orders = flags.orders_of(schedule, num_ranks, num_microbatches)
    return Checked(schedule, orders, schedule.num_stages(num_ranks), num_microbatches)


def timeline_of(arguments: argparse.Namespace) -> tuple[Checked, Timeline]:
    """Simulate the schedule that was asked for; return it, and the result."""
    asked = checked(sized(arguments))
    orders, num_stages = asked.orders, asked.num_stages
    for option in TIMES:
        flags.check_length(f"--{option}", getattr(arguments, option.replace("-", "_")), num_stages, "stages")
    flags.check_length("--message-bytes", arguments.message_bytes, num_stages - 1, BOUNDARIES)
    check_skip_bytes(arguments)
    timeline = simulate(
        orders,
        num_stages=num_stages,
        forward=arguments.forward,
        backward_input=arguments.backward_input,
        backward_weight=arguments.backward_weight,
        latency=arguments.latency,
        message_bytes=arguments.message_bytes,
        bandwidth=arguments.bandwidth,
        overlap=arguments.overlap,
        skips=arguments.skips,
        skip_bytes=arguments.skip_bytes,
    )
    return asked, timeline


def costs(timeline: Timeline) -> dict[str, Any]:
    """Return the numbers of a timeline, for JSON."""
    return {
        "makespan": timeline.makespan,
        "bubble_fraction": timeline.bubble_fraction,
        "span_bubble_rate": timeline.span_bubble_rate,
        "efficiency": timeline.efficiency,
        "peak_microbatches_per_stage": timeline.peak_microbatches_per_stage,
    }


def print_costs(timeline: Timeline) -> None:
    """Print the numbers of a timeline."""
    peaks = " ".join(map(str, timeline.peak_microbatches_per_stage))
    print(f"makespan                                {timeline.makespan:g}")
    print(f"bubble_fraction (ratio to ideal time)   {timeline.bubble_fraction:.4f}")
    print(f"span_bubble_rate (idle share of a span) {timeline.span_bubble_rate:.4f}")
    print(f"efficiency (ideal time / makespan)      {timeline.efficiency:.4f}")
    print(f"peak micro-batches per stage            {peaks}")
