"""`python -m pipeline check`: is a schedule complete, and can its messages block each other?

With `--dp`, replicas of it are proved together with the reductions of their gradients, in the middle of the step: each
stage is a bucket, which all replicas reduce together, that of a rank's last stage first.
"""

from __future__ import annotations

import argparse

from pipeline.cli import flags
from pipeline.cli.schedule_flags import add_schedule, add_skips, checked
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
    asked = checked(arguments)
    schedule, orders, num_stages, title = asked.schedule, asked.orders, asked.num_stages, asked.title
    dp, skips = arguments.dp, arguments.skips
    programs = lower(orders, rank_of=schedule.rank_of, num_stages=num_stages, skips=skips)
    flags.check_size(dp * sum(map(len, programs)))
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
