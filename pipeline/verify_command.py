"""`python -m pipeline verify`: the verifier for a model of one's own, or for a small one that comes along."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

import numpy as np

from distributed.world import launched_by_mpi, launcher_rank, world
from minigrad.models import gpt, mlp
from minigrad.ops import cross_entropy
from pipeline.schedules import SCHEDULES
from pipeline.text import load
from pipeline.verify import Case, MismatchError, verify

NUM_STEPS = 3
BATCH = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `verify` takes."""
    parser.add_argument("model", help="gpt, mlp, or MODULE:FUNCTION, a function that returns a pipeline.verify.Case")
    parser.add_argument("--schedule", default="1f1b", help=f"one of {', '.join(SCHEDULES)}, or a .csv file")
    for option, default, what in (("dp", 1, "replicas"), ("pp", 2, "ranks of a pipeline"), ("microbatches", 4, "M")):
        parser.add_argument(f"--{option}", type=int, default=default, metavar="N", help=f"{what} (default {default})")


def run(arguments: argparse.Namespace) -> None:
    """Train the model in one process and spread over ranks, which are threads outside mpirun; compare and report."""
    name = arguments.schedule
    if not name.endswith(".csv") and name not in SCHEDULES:
        raise ValueError(f"--schedule must be one of {', '.join(SCHEDULES)}, or a .csv file, got {name!r}")
    if arguments.dp < 1 or arguments.pp < 1:
        raise ValueError(f"--dp and --pp must be at least 1, got {arguments.dp} and {arguments.pp}")
    try:
        report = verify(
            find_case(arguments.model),
            dp=arguments.dp,
            pp=arguments.pp,
            schedule=load(name) if name.endswith(".csv") else SCHEDULES[name],
            num_microbatches=arguments.microbatches,
            comm=world() if launched_by_mpi() else None,
        )
    except MismatchError as mismatch:
        if launcher_rank() == 0:
            print(f"not equal to one process: {mismatch}", file=sys.stderr, flush=True)
        sys.exit(1)
    if launcher_rank() == 0:
        print(report)


def find_case(name: str) -> Case:
    """Return what to verify by its name on the command line.

    Raises:
        ValueError: there is no such model or function, or it gives no Case.
    """
    if name in _CASES:
        return _CASES[name]()
    module, _, function = name.partition(":")
    if not function:
        raise ValueError(f"the model must be {' or '.join(_CASES)}, or MODULE:FUNCTION, got {name!r}")
    sys.path.insert(0, "")  # as `python -c` does: a module of the folder that the command is run in
    try:
        case: Any = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the model {name!r} cannot be found: {error}") from error
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
