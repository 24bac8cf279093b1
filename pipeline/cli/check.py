"""`python -m pipeline check`: is a schedule complete, and can its messages block each other?

With `--dp`, replicas of it are proved together with the reductions of their gradients: each stage is a bucket, which
all replicas reduce together once its gradients are final there, in the middle of the step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pipeline.cli import flags
from pipeline.cli.schedule_flags import add_schedule, checked
from pipeline.schedules.action import Action, Kind
from pipeline.schedules.deadlock import Collective, Step, check_deadlock_free
from pipeline.schedules.lower import lower

HELP = "check a schedule: its order, and that it cannot deadlock"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `check` takes."""
    add_schedule(parser)
    what = "replicas, whose buckets of gradients are proved together with the messages (default 1)"
    parser.add_argument("--dp", type=flags.count, default=1, metavar="N", help=what)


def run(arguments: argparse.Namespace) -> None:
    """Check a schedule's order, and prove that what ranks send and reduce cannot block them."""
    schedule, orders, num_stages, title = checked(arguments)
    programs = lower(orders, rank_of=schedule.rank_of, num_stages=num_stages)
    dp = arguments.dp
    flags.check_size(dp * sum(map(len, programs)))
    proved = "messages"
    steps: list[list[Step]] = [list(program) for program in programs]
    if dp > 1:
        proved, title = "messages and reductions", f"{title}, {dp} replicas"
        steps = [with_reductions(program, rank, len(programs), dp) for rank, program in enumerate(programs)] * dp
    check_deadlock_free(steps, rank_of=schedule.rank_of, num_stages=num_stages, num_replicas=dp)
    print(f"{title}: complete, in order, and no timing of {proved} can deadlock it")


def with_reductions(program: Sequence[Action], rank: int, num_ranks: int, dp: int) -> list[Step]:
    """Add the reduction of each stage's gradients to a rank's program, where its last backward has made them final."""
    last = {action.stage: index for index, action in enumerate(program) if action.kind in (Kind.W, Kind.BW)}
    copies = tuple(rank + k * num_ranks for k in range(dp))
    steps: list[Step] = []
    for index, action in enumerate(program):
        steps.append(action)
        if last.get(action.stage) == index:
            steps.append(Collective(f"reduce stage {action.stage}", copies))
    return steps
