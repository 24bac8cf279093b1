"""`python -m pipeline memory`: what a model keeps in bytes, on its stages and on the ranks of a schedule."""

from __future__ import annotations

import argparse

from pipeline.cli import flags
from pipeline.cli.schedule_flags import MICROBATCHES, RANKS
from pipeline.cli.verify import check_sizes, find_case
from pipeline.runtime.memory import rank_bytes, stage_bytes
from pipeline.schedules.schedule import SCHEDULES

HELP = "measure what a micro-batch keeps on each stage, and say what each rank needs, in bytes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `memory` takes."""
    parser.add_argument("model", help="gpt, mlp, or MODULE:FUNCTION, a function that returns a pipeline.verify.Case")
    what = "names, .csv files or MODULE:NAME (default 1f1b)"
    parser.add_argument("schedules", nargs="*", default=["1f1b"], metavar="SCHEDULE", help=what)
    for option, default, what in (
        ("pp", RANKS, "ranks of a pipeline"),
        ("microbatches", MICROBATCHES, "micro-batches a step"),
        ("shards", 1, "replicas that share the optimizer's state"),
    ):
        what = f"{what} (default {default})"
        parser.add_argument(f"--{option}", type=flags.count, default=default, metavar="N", help=what)


def run(arguments: argparse.Namespace) -> None:
    """Measure the first micro-batch of a model's first batch, and print a table a schedule."""
    case = find_case(arguments.model)
    if not case.batches:
        raise ValueError(f"{arguments.model} must have a batch to measure, got none")
    x, y = (part[: -(-len(part) // arguments.microbatches)] for part in case.batches[0])
    for name in arguments.schedules:
        schedule = flags.find_schedule(name, SCHEDULES)
        flags.orders_of(schedule, arguments.pp, arguments.microbatches)
        check_sizes(case, schedule, dp=1, pp=arguments.pp, num_microbatches=arguments.microbatches)
        stages = stage_bytes(
            case.layers,
            x,
            num_stages=schedule.num_stages(arguments.pp),
            loss_fn=lambda output: case.loss_fn(output, y),
            rule=case.rule,
            dtype=case.dtype,
        )
        print(f"{name}: {len(stages)} stages on {arguments.pp} ranks, {arguments.microbatches} micro-batches")
        print("stage     weights   gradients   optimizer  activations    deferred     working")
        for number, stage in enumerate(stages):
            always = (flags.amount(part) for part in (stage.weights, stage.gradients, stage.optimizer))
            kept = (flags.amount(part) for part in (stage.activations, stage.deferred, stage.working))
            print(f"{number:5} " + " ".join(f"{part:>11}" for part in (*always, *kept)))
        ranks = rank_bytes(
            stages,
            schedule,
            num_ranks=arguments.pp,
            num_microbatches=arguments.microbatches,
            num_shards=arguments.shards,
        )
        print(f"a rank needs  {' '.join(map(flags.amount, ranks))}")
