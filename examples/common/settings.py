"""The command line of the examples: every choice is a field of `Settings`, checked before anything starts.

A script sets OPENBLAS_NUM_THREADS before its first import, as NumPy reads it once, when it loads.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from common.text import load_text, split
from distributed.world import launcher_rank
from minigrad.backend import DEVICES
from pipeline.schedules import SCHEDULES

T = TypeVar("T")

GRACE_SECONDS = 3.0  # more than ranks that start together differ by, on a busy machine


def flag(default: T, help: str, metavar: str | None = None) -> T:
    """Declare a field of Settings together with its command-line flag."""
    return field(default=default, metadata={"help": help, "metavar": metavar})


@dataclass(frozen=True)
class Settings:
    """What can be chosen on the command line: each field is a flag, `bucket_mb` is --bucket-mb."""

    dp: int = flag(1, "data-parallel replicas: each trains on its own sequences, gradients are averaged")
    pp: int = flag(1, "pipeline stages that the layers of each replica are cut into; dp * pp is the number of ranks")
    schedule: str = flag("1f1b", "order of a pipeline's forwards and backwards", "{" + ",".join(SCHEDULES) + "}")
    microbatches: int = flag(4, "parts that a pipeline cuts its batch into; more of them, a smaller bubble")
    steps: int = flag(600, "optimizer steps")
    batch: int = flag(48, "sequences in a step, over all replicas: the same batch trains the same model in any layout")
    layers: int = flag(4, "transformer blocks")
    heads: int = flag(4, "attention heads in each block")
    width: int = flag(128, "features of each token; a multiple of --heads")
    context: int = flag(64, "bytes that the model sees at a time")
    dropout: float = flag(0.0, "share of activations dropped in training, from 0 to below 1", "P")
    lr: float = flag(3e-3, "peak learning rate", "RATE")
    seed: int = flag(0, "start of all random numbers; the same seed gives the same run")
    text: str | None = flag(
        None, "file to learn, as bytes (default: the reference text that comes with Python)", "FILE"
    )
    device: str = flag("cpu", "cuda trains on GPUs, one a rank, and needs CuPy", "{cpu,cuda}")
    dtype: str = flag("float32", "of parameters and activations", "{float32,float64}")
    bucket_mb: float = flag(25.0, "MiB of gradients that are reduced together, while the backward goes on", "MIB")
    progress: str = flag("auto", "auto is a bar where stderr is a terminal; mpirun hides terminals", "{auto,bar,lines}")
    trace: str | None = flag(None, "file for a timeline of the last step, which ui.perfetto.dev shows", "FILE")

    @property
    def num_microbatches(self) -> int:
        """Parts of a replica's batch: without a pipeline there is nothing to gain from cutting it."""
        return self.microbatches if self.pp > 1 else 1

    def rows(self, dp_rank: int) -> slice:
        """Rows of the batch that belong to one replica: consecutive, as equal in number as can be."""
        return slice(dp_rank * self.batch // self.dp, (dp_rank + 1) * self.batch // self.dp)


COUNTS = ("dp", "pp", "microbatches", "steps", "batch", "layers", "heads", "width", "context")
CHOICES = {
    "schedule": tuple(SCHEDULES),
    "device": DEVICES,
    "dtype": ("float32", "float64"),
    "progress": ("auto", "bar", "lines"),
}


def check(settings: Settings, world_size: int) -> None:
    """Check that the settings fit each other and the number of ranks.

    Raises:
        ValueError: the first rule that is broken, with the values that break it.
    """
    s = settings
    for name in COUNTS:
        if getattr(s, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(s, name)}")
    for name, choices in CHOICES.items():
        if getattr(s, name) not in choices:
            raise ValueError(f"--{name} must be one of {', '.join(choices)}, got {getattr(s, name)}")
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    rules = [
        (s.dp * s.pp == world_size, f"dp * pp must equal the number of ranks, got dp={s.dp}, pp={s.pp} and {ranks}"),
        (s.pp <= s.layers, f"--pp must be at most --layers, got {s.pp} and {s.layers}"),
        (
            s.dp * s.num_microbatches <= s.batch,
            f"--batch must hold a sequence for each of the dp * microbatches parts, "
            f"got {s.batch} for {s.dp} * {s.num_microbatches}",
        ),
        (s.width % s.heads == 0, f"--width must be a multiple of --heads, got {s.width} and {s.heads}"),
        (0 <= s.dropout < 1, f"--dropout must be at least 0 and below 1, got {s.dropout}"),
        (0 < s.lr < math.inf, f"--lr must be above 0 and finite, got {s.lr}"),
        (0 <= s.seed < 2**64, f"--seed must be from 0 to 2**64 - 1, got {s.seed}"),
        (0 < s.bucket_mb < math.inf, f"--bucket-mb must be above 0 and finite, got {s.bucket_mb}"),
    ]
    for holds, rule in rules:
        if not holds:
            raise ValueError(rule)


def launcher_size(environ: Mapping[str, str] = os.environ) -> int:
    """Tell how many ranks the launcher started, before MPI is loaded: 1 without a launcher."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):  # Open MPI; MPICH and Intel MPI; srun
        if name in environ:
            return int(environ[name])
    return 1


def read_settings(description: str, argv: Sequence[str] | None = None) -> Settings:
    """Read and check the command line; end the run with one line and exit code 2 if something is wrong with it."""
    parser = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    for f in fields(Settings):
        parser.add_argument(
            f"--{f.name.replace('_', '-')}",
            type=str if f.default is None else type(f.default),
            default=f.default,
            metavar=f.metadata["metavar"] or "N",
            help=f.metadata["help"] + ("" if f.default is None else " (default: %(default)s)"),
        )
    settings = Settings(**vars(parser.parse_args(argv)))
    try:
        check(settings, launcher_size())
    except ValueError as error:
        fail(str(error))
    return settings


def read_text(settings: Settings) -> tuple[bytes, bytes]:
    """Load the text and split it into training and validation; end the run with one line if that cannot be done."""
    try:
        return split(load_text(settings.text), context=settings.context)
    except ValueError as error:
        fail(str(error), everywhere=False)


def fail(message: str, *, everywhere: bool = True) -> NoReturn:
    """End the run with one line on stderr and exit code 2.

    Rank 0 speaks for all. A launcher ends a job, unread output included, when its first process fails, so the others
    wait to be ended and leave by themselves only where the launcher lets them.

    Args:
        everywhere: all ranks are known to fail alike. False: a rank that is still there after its wait may be
            the only one that fails (a file that only its host lacks), and says so itself.
    """
    rank = launcher_rank()
    line = f"{Path(sys.argv[0]).name}: {message}"
    if rank == 0:
        print(line, file=sys.stderr, flush=True)
    else:
        time.sleep(GRACE_SECONDS)
        if not everywhere:
            print(f"[rank {rank}] {line}", file=sys.stderr, flush=True)
    sys.exit(2)


class _Parser(argparse.ArgumentParser):
    """Says things once, though every rank reads the same command line."""

    def print_help(self, file: Any = None) -> None:
        if launcher_rank() == 0:
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        fail(message)
