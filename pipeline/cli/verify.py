"""`python -m pipeline verify`: the verifier for a model of one's own, or for a small one that comes along."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

import numpy as np

from distributed.comm.world import launched_by_mpi, launcher_rank, world
from distributed.run.command_line import speak_for_all
from minigrad.models import gpt, mlp
from minigrad.ops import cross_entropy
from pipeline.cli import flags
from pipeline.cli.own_code import one_line
from pipeline.cli.schedule_flags import AS_WRITTEN
from pipeline.runtime.partition import count_blocks
from pipeline.schedules.schedule import SCHEDULES, Schedule
from pipeline.schedules.words import counted
from pipeline.verify import Case, MismatchError, verify

HELP = "train a model in this layout and in one process, and name the first difference"
PP, MICROBATCHES = 2, 4
NUM_STEPS = 3
BATCH = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `verify` takes."""
    parser.add_argument("model", help="gpt, mlp, or MODULE:FUNCTION, a function that returns a pipeline.verify.Case")
    parser.add_argument(
        "--schedule", default="1f1b", help=f"one of {', '.join(SCHEDULES)}, a .csv file, or MODULE:NAME (default 1f1b)"
    )
    parser.add_argument("--dp", type=flags.count, default=1, metavar="N", help="replicas (default 1)")
    for option, default, what in (
        ("pp", PP, "ranks of a pipeline"),
        ("microbatches", MICROBATCHES, "micro-batches a step"),
    ):
        what = f"{what} (default {default}, or {AS_WRITTEN})"
        parser.add_argument(f"--{option}", type=flags.count, metavar="N", help=what)
    what = "replicas share out 1: the optimizer's state, 2: gradients too (default 0)"
    parser.add_argument("--zero", type=int, choices=(0, 1, 2), default=0, help=what)


def run(arguments: argparse.Namespace) -> None:
    """Train the model in one process and spread over ranks, which are threads outside mpirun; compare and report."""
    schedule = flags.find_schedule(arguments.schedule, SCHEDULES)
    pp, num_microbatches = flags.sizes_of([schedule], (arguments.pp, arguments.microbatches), (PP, MICROBATCHES))
    flags.orders_of(schedule, pp, num_microbatches)  # so that a size it does not allow is said first
    case = find_case(arguments.model)
    check_sizes(case, schedule, dp=arguments.dp, pp=pp, num_microbatches=num_microbatches)
    try:
        report = verify(
            case,
            dp=arguments.dp,
            pp=pp,
            schedule=schedule,
            num_microbatches=num_microbatches,
            zero=arguments.zero,
            comm=world() if launched_by_mpi() else None,
        )
    except MismatchError as mismatch:
        speak_for_all(f"not equal to one process: {mismatch}", everywhere=True)
        sys.exit(1)
    if launcher_rank() == 0:
        print(flags.as_json(asdict(report)) if arguments.json else report)


def check_sizes(case: Case, schedule: Schedule, *, dp: int, pp: int, num_microbatches: int) -> None:
    """Check that every stage gets a layer, and every micro-batch a sample.

    Raises:
        ValueError: the model has too few layers, or a batch too few samples.
    """
    num_stages, num_blocks = schedule.num_stages(pp), count_blocks([name for name, _ in case.layers])
    if num_stages > num_blocks:
        raise ValueError(
            f"--pp {pp} makes {counted(num_stages, 'stage')} under {schedule.name}, which must be at most the layers "
            f"of the model, embedding and head not counted, got {num_blocks}"
        )
    fewest = min((len(x) for x, _ in case.batches), default=dp * num_microbatches)
    if dp * num_microbatches > fewest:
        flag, got = ("--dp times --microbatches", f"{dp} x ") if dp > 1 else ("--microbatches", "")
        raise ValueError(f"{flag} must be at most {fewest}, the samples of a batch, got {got}{num_microbatches}")


def find_case(name: str) -> Case:
    """Return what to verify by its name on the command line.

    Raises:
        ValueError: there is no such model or function, or it gives no Case.
    """
    if name in _CASES:
        return _CASES[name]()
    function = flags.imported(name, "the model", f"{' or '.join(_CASES)}, or MODULE:FUNCTION")
    if not callable(function):
        raise ValueError(f"{name} must be a function, got {type(function).__name__}")
    try:
        case = function()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name}() must return a pipeline.verify.Case, but ended in {one_line(error)}") from error
    if not isinstance(case, Case):
        raise ValueError(f"{name} must return a pipeline.verify.Case, got {type(case).__name__}")
    return case


def _small_gpt() -> Case:
    generator = np.random.default_rng(0)
    tokens = [generator.integers(0, 17, (BATCH, 9)) for _ in range(NUM_STEPS)]
    config = gpt.GPTConfig(vocab_size=17, context=8, num_layers=8, num_heads=2, width=16, dropout=0.1)
    return Case(gpt.layers(config), [(t[:, :-1], t[:, 1:]) for t in tokens], cross_entropy, max_norm=1.0)


def _small_mlp() -> Case:
    generator = np.random.default_rng(0)
    batches = [(generator.standard_normal((BATCH, 8)), generator.integers(0, 4, BATCH)) for _ in range(NUM_STEPS)]
    return Case(mlp.layers([8, *[12] * 7, 4], dropout=0.1), batches, cross_entropy, max_norm=1.0)


_CASES = {"gpt": _small_gpt, "mlp": _small_mlp}
