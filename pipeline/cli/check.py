"""`python -m pipeline check`: is a schedule complete, and can its messages block each other?

With `--dp`, replicas of it are proved together with the reductions of their gradients, in the middle of the step: each
stage is a bucket, which all replicas reduce together, that of a rank's last stage first.
"""

from __future__ import annotations

import argparse

from pipeline.cli import flags
from pipeline.cli.schedule_flags import Sized, add_schedule, add_skips, checked, sized
from pipeline.schedules.action import Skips, check_skips
from pipeline.schedules.deadlock import check_deadlock_free
from pipeline.schedules.lower import lower
from pipeline.schedules.whole_step import Replica, check_whole_step

HELP = "check a schedule: its order, and that it cannot deadlock"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `check` takes."""
    add_schedule(parser)
    add_skips(parser)
    what = "replicas, whose buckets of gradients are proved together with the messages (default 1)"
    parser.add_argument("--dp", type=flags.count, default=1, metavar="N", help=what)


def run(arguments: argparse.Namespace) -> None:
    """Check a schedule's order, and prove that what ranks send and reduce cannot block them."""
    of_size = sized(arguments)
    _check_size(of_size, arguments.skips, arguments.dp)
    asked = checked(of_size)
    schedule, orders, num_stages, title = asked.schedule, asked.orders, asked.num_stages, asked.title
    dp, skips = arguments.dp, arguments.skips
    programs = lower(orders, rank_of=schedule.rank_of, num_stages=num_stages, skips=skips)
    proved = "messages"
    if dp == 1:
        check_deadlock_free(programs, rank_of=schedule.rank_of, num_stages=num_stages, skips=skips)
    else:
        proved, title = "messages and reductions", f"{title}, {dp} replicas"
        replicas = [Replica.by_stage(orders)] * dp
        check_whole_step(replicas, rank_of=schedule.rank_of, num_stages=num_stages, skips=skips)
    if arguments.json:
        print(flags.as_json({**asked.values, "replicas": dp, "skips": skips, "proved": proved}))
        return
    print(f"{title}: complete, in order, and no timing of {proved} can deadlock it")


def _check_size(asked: Sized, skips: Skips, dp: int) -> None:
    """Check that programs will not be too large to prove, before there are any: a message has an action at each end."""
    schedule, num_ranks, num_microbatches = asked
    num_stages = schedule.num_stages(num_ranks)
    flags.check_size(2 * num_stages * num_microbatches)
    schedule.check_sizes(num_ranks, num_microbatches)
    check_skips(skips, num_stages)
    ways = [(stage, stage + 1) for stage in range(num_stages - 1)] + list(skips)
    crossings = sum(schedule.rank_of(a, num_ranks) != schedule.rank_of(b, num_ranks) for a, b in ways)
    directions = 2 if schedule.trains else 1
    flags.check_size(dp * directions * num_microbatches * (num_stages + 2 * crossings))
