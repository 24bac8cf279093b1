"""`python -m pipeline memory`: what a model keeps in bytes, on its stages and on the ranks of a schedule."""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path

from pipeline.cli import files, flags
from pipeline.cli.schedule_flags import AS_WRITTEN, MICROBATCHES, RANKS, add_microbatches
from pipeline.cli.verify import check_sizes, find_case
from pipeline.runtime.memory import stage_bytes
from pipeline.runtime.partition import count_blocks
from pipeline.schedules.held import Measured, StageBytes, from_json, rank_bytes, to_json
from pipeline.schedules.schedule import SCHEDULES
from pipeline.schedules.words import amount, counted
from pipeline.verify import Case

HELP = "measure what a micro-batch keeps on each stage, and say what each rank needs, in bytes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `memory` takes."""
    parser.add_argument("model", help="gpt, mlp, or MODULE:FUNCTION, a function that returns a pipeline.verify.Case")
    what = "names, .csv files or MODULE:NAME (default 1f1b)"
    parser.add_argument("schedules", nargs="*", default=[], metavar="SCHEDULE", help=what)
    what = f"ranks of a pipeline (default {RANKS}, or {AS_WRITTEN})"
    parser.add_argument("--pp", type=flags.count, metavar="N", help=what)
    add_microbatches(parser)
    what = "replicas that share the optimizer's state (default 1)"
    parser.add_argument("--shards", type=flags.count, default=1, metavar="N", help=what)


def run(arguments: argparse.Namespace) -> None:
    """Measure the first micro-batch of a model's first batch, and print a table a schedule."""
    case = find_case(arguments.model)
    schedules = {name: flags.find_schedule(name, SCHEDULES) for name in arguments.schedules or ["1f1b"]}
    given = arguments.pp, arguments.microbatches
    pp, num_microbatches = flags.sizes_of(schedules.values(), given, (RANKS, MICROBATCHES))
    for schedule in schedules.values():
        flags.orders_of(schedule, pp, num_microbatches)
        check_sizes(case, schedule, dp=1, pp=pp, num_microbatches=num_microbatches)
    stages_of = measure(case, num_microbatches).stages_of
    cuts = {count: stages_of(count) for count in (schedule.num_stages(pp) for schedule in schedules.values())}
    if arguments.json:
        print(to_json(cuts, num_microbatches=num_microbatches, num_shards=arguments.shards))
        return
    for name, schedule in schedules.items():
        stages = cuts[schedule.num_stages(pp)]
        print(f"{name}: {flags.sizes_in_words(pp, num_microbatches, num_stages=len(stages))}")
        print("stage     weights   gradients   optimizer  activations    deferred     working")
        for number, stage in enumerate(stages):
            always = (amount(part) for part in (stage.weights, stage.gradients, stage.optimizer))
            kept = (amount(part) for part in (stage.activations, stage.deferred, stage.working))
            print(f"{number:5} " + " ".join(f"{part:>11}" for part in (*always, *kept)))
        ranks = rank_bytes(
            stages,
            schedule,
            num_ranks=pp,
            num_microbatches=num_microbatches,
            num_shards=arguments.shards,
        )
        print(f"a rank needs  {' '.join(map(amount, ranks))}")


def measure(case: Case, num_microbatches: int) -> Measured:
    """Return what the stages of a model hold, measured when it is first asked for.

    Args:
        num_microbatches: parts of the model's first batch, the first of which is measured.
    Raises:
        ValueError: there is no batch, or one of fewer samples.
    """
    if not case.batches:
        raise ValueError("a model must have a batch to measure, got none")
    if len(case.batches[0][0]) < num_microbatches:
        raise ValueError(f"--microbatches must be at most {len(case.batches[0][0])}, the samples of a batch")
    x, y = (part[: -(-len(part) // num_microbatches)] for part in case.batches[0])

    num_blocks = count_blocks([name for name, _ in case.layers])

    @cache
    def stages_of(num_stages: int) -> list[StageBytes]:
        if num_stages > num_blocks:
            layers = f"{counted(num_blocks, 'layer')}, embedding and head not counted,"
            raise ValueError(f"a model of {layers} cannot be cut into {counted(num_stages, 'stage')}")
        return stage_bytes(
            case.layers,
            x,
            num_stages=num_stages,
            loss_fn=lambda output: case.loss(output, y),
            rule=case.rule,
            dtype=case.dtype,
        )

    return Measured(stages_of)


def add_measured(parser: argparse.ArgumentParser) -> None:
    """Declare memory that was measured, or is to be."""
    what = "bytes that stages hold: a file from `memory --json`, or a model to measure: gpt, mlp or MODULE:FUNCTION"
    parser.add_argument("--measured", metavar="WHAT", help=what)


def measured_of(arguments: argparse.Namespace, num_microbatches: int) -> Measured | None:
    """Return what `--measured` asks for.

    Raises:
        ValueError: the file cannot be read, there is no such model, or memory is given by hand too.
    """
    if arguments.measured is None:
        return None
    for option, default in (("activations", 1), ("deferred", 0), ("static", 0)):
        if getattr(arguments, option, default) != default:
            raise ValueError(f"--measured is in place of --{option}: give one of them")
    path = Path(arguments.measured)
    if path.suffix != ".json":
        return measure(find_case(arguments.measured), num_microbatches)
    return from_json(files.read_text(path, "--measured "), str(path))
