"""`python -m pipeline compare`: schedules in one table."""

from __future__ import annotations

import argparse

from pipeline.cli import flags
from pipeline.cli.schedule_flags import BOUNDARIES, MICROBATCHES, NAMES, RANKS, TIMES, add_messages, add_microbatches
from pipeline.schedules.schedule import SCHEDULES
from pipeline.schedules.simulate import simulate

HELP = "compare schedules in one table"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `compare` takes."""
    parser.add_argument("schedules", nargs="*", default=list(SCHEDULES), help="names or .csv files (default: all)")
    parser.add_argument("--ranks", type=flags.count, default=RANKS, metavar="P", help=f"ranks (default {RANKS})")
    add_microbatches(parser)
    for option, what in TIMES.items():
        help_text = f"time of {what} of one micro-batch on all stages of a rank (default 1)"
        parser.add_argument(f"--{option}", type=flags.duration, default=1.0, metavar="T", help=help_text)
    add_messages(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print one row a schedule, on the same ranks with the same work."""
    schedules = [flags.find_schedule(name, NAMES) for name in arguments.schedules]
    for schedule in schedules:
        num_boundaries = schedule.num_stages(arguments.ranks) - 1
        of_what = f"{BOUNDARIES} under {schedule.name}"
        flags.check_length("--message-bytes", arguments.message_bytes, num_boundaries, of_what)
    num_microbatches = MICROBATCHES if arguments.microbatches is None else arguments.microbatches
    flags.check_size(2 * arguments.ranks * num_microbatches)
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
