"""What can be chosen on the command line: each field of a settings class is a flag, `save_every` is --save-every.

Scripts share these classes, so that a flag means the same everywhere. Rules are checked before anything starts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import TypeVar

import numpy as np

from distributed.data_parallel.compression import LARGEST
from minigrad.backend import DEVICES
from pipeline.schedules.schedule import SCHEDULES, Schedule

T = TypeVar("T")
Rule = tuple[bool, str]  # whether it holds, and what to say if it does not

MOST = 2**31 - 1  # of anything that is counted
MOST_MICROBATCHES = 2**14  # the order of a schedule is a list


def flag(default: T, help: str, metavar: str | None = None, *, fixed: bool = False, once: bool = False) -> T:
    """Declare a field together with its flag.

    Args:
        fixed: a run that is resumed must have the value that it was started with: its checkpoints fit no other.
        once: it says something of one start alone, and a run that is resumed does not take it over.
    """
    return field(default=default, metadata={"help": help, "metavar": metavar, "fixed": fixed, "once": once})


def other_default(kind: type, name: str, default: T) -> T:
    """Declare a field of `kind` again, with another default."""
    (declared,) = (f for f in fields(kind) if f.name == name)
    return field(default=default, metadata=declared.metadata)


@dataclass(frozen=True)
class RunSettings:
    """Settings of every run."""

    steps: int = flag(600, "optimizer steps")
    batch: int = flag(48, "samples in a step, over all ranks: the same batch trains the same model in any layout")
    lr: float = flag(3e-3, "peak learning rate", "RATE")
    seed: int = flag(0, "start of all random numbers; the same seed gives the same run", fixed=True)
    run: str | None = flag(
        None, "folder for all that the run leaves (default: a new one in runs/)", "FOLDER", once=True
    )
    resume: str | None = flag(
        None,
        "auto goes on with the run in --run, or with the newest one; the folder of a checkpoint starts a new run from "
        "there. Flags that are not given are as they were",
        "{auto,FOLDER}",
        once=True,
    )
    save_every: int = flag(100, "steps between two checkpoints; the last step is always saved")
    keep: int = flag(3, "checkpoints that stay")
    progress: str = flag(
        "auto", "auto is a bar where stderr is a terminal; mpirun hides terminals", "{auto,bar,lines}", once=True
    )
    quiet: bool = flag(False, "say nothing but warnings and errors", once=True)

    def rules(self, world_size: int) -> Iterator[Rule]:
        """Yield what must hold on so many ranks; a rule may rely on those before it."""
        yield from (self._at_least_1(name) for name in ("steps", "batch", "save_every", "keep"))
        yield self._one_of("progress", ("auto", "bar", "lines"))
        yield 0 < self.lr < math.inf, f"--lr must be above 0 and finite, got {self.lr}"
        yield 0 <= self.seed < 2**64, f"--seed must be from 0 to 2**64 - 1, got {self.seed}"

    def _at_least_1(self, name: str, most: int = MOST) -> Rule:
        flag, value = f"--{name.replace('_', '-')}", getattr(self, name)
        rule = f"{flag} must be at least 1, got {value}" if value < 1 else f"{flag} must be at most {most}, got {value}"
        return 1 <= value <= most, rule

    def _one_of(self, name: str, choices: tuple[str, ...]) -> Rule:
        value = getattr(self, name)
        return value in choices, f"--{name} must be one of {', '.join(choices)}, got {value}"


@dataclass(frozen=True)
class ReplicaSettings(RunSettings):
    """Settings of a script whose ranks are all replicas."""

    def rules(self, world_size: int) -> Iterator[Rule]:
        yield from super().rules(world_size)
        enough = f"--batch must hold a sample for each of {world_size} ranks, got {self.batch}"
        yield self.batch >= world_size, enough


@dataclass(frozen=True)
class DigitsSettings(ReplicaSettings):
    """Settings of a small network that reads handwritten digits."""

    hidden: int = flag(256, "features between the two layers", fixed=True)

    def rules(self, world_size: int) -> Iterator[Rule]:
        yield from super().rules(world_size)
        yield self._at_least_1("hidden")


@dataclass(frozen=True)
class GPTSettings(RunSettings):
    """Settings of a GPT that learns text."""

    lr: float = other_default(RunSettings, "lr", 1e-3)  # no warmup: at 3e-3 rounding grows until layouts differ
    layers: int = flag(4, "transformer blocks", fixed=True)
    heads: int = flag(4, "attention heads in each block", fixed=True)
    width: int = flag(64, "features of each token; a multiple of --heads", fixed=True)
    context: int = flag(64, "tokens that the model sees at a time", fixed=True)
    text: str | None = flag(
        None,
        "what to learn: a file or a folder of files, as bytes, or tokens of your own as .npy "
        "(default: the reference text that comes with Python)",
        "PATH",
    )
    vocab: int = flag(256, "number of different tokens; bytes are 256", fixed=True)
    dtype: str = flag("float32", "of parameters and activations", "{float32,float64}", fixed=True)

    def rules(self, world_size: int) -> Iterator[Rule]:
        yield from super().rules(world_size)
        yield from (self._at_least_1(name) for name in ("layers", "heads", "width", "context", "vocab"))
        yield self._one_of("dtype", ("float32", "float64"))
        multiple = f"--width must be a multiple of --heads, got {self.width} and {self.heads}"
        yield self.width % self.heads == 0, multiple
        yield self._fits_in_memory(world_size)

    def _fits_in_memory(self, num_parts: int) -> Rule:
        """Return whether a host can hold one rank's share of the weights; what it holds besides is not counted."""
        num_weights = self.width * (12 * self.layers * self.width + self.vocab + self.context)
        each = 4 * np.dtype(self.dtype).itemsize  # a weight, its gradient, and the two averages of AdamW
        num_bytes = num_weights * each / num_parts
        size = f"{num_weights:,} weights, {num_bytes / 2**30:,.1f} GiB a rank with their gradients"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        names = "--layers, --width, --vocab and --context"
        return num_bytes < memory, f"{names} make {size}, more than the {memory / 2**30:,.1f} GiB of this machine"


@dataclass(frozen=True)
class GPTSingleSettings(GPTSettings):
    """Settings of a GPT in one process."""

    def rules(self, world_size: int) -> Iterator[Rule]:
        yield from super().rules(world_size)
        yield world_size == 1, f"this script is for one process, got {world_size} ranks"


@dataclass(frozen=True)
class GPTReplicaSettings(GPTSettings, ReplicaSettings):
    """Settings of a GPT whose ranks are all replicas."""


@dataclass(frozen=True)
class PipelineSettings(GPTSettings):
    """Settings of a pipeline."""

    microbatches: int = flag(4, "parts that a pipeline cuts its batch into; more of them, a smaller bubble")

    @property
    def num_microbatches(self) -> int:
        """Parts of a replica's batch."""
        return self.microbatches

    def rules(self, world_size: int) -> Iterator[Rule]:
        yield from super().rules(world_size)
        yield self._at_least_1("microbatches", MOST_MICROBATCHES)
        enough = f"--batch must hold a sample for each of {self.num_microbatches} micro-batches, got {self.batch}"
        yield self.num_microbatches <= self.batch, enough

    def fits(self, schedule: Schedule, num_ranks: int) -> Rule:
        """Return whether the model and its micro-batches fit a schedule on so many ranks."""
        num_stages = schedule.num_stages(num_ranks)
        if num_stages > self.layers:
            blocks = f"got {self.layers} for the {num_stages} stages of {schedule.name} on {num_ranks} ranks"
            return False, f"--layers must give each stage a block, {blocks}"
        try:
            schedule.orders(num_ranks, self.num_microbatches)
        except ValueError as rule:
            return False, str(rule)
        return True, ""


@dataclass(frozen=True)
class ScheduleSettings(PipelineSettings):
    """Settings of a pipeline's order of work."""

    schedule: str = flag("1f1b", "order of a pipeline's forwards and backwards", "{" + ",".join(SCHEDULES) + "}")

    def rules(self, world_size: int) -> Iterator[Rule]:
        yield from super().rules(world_size)
        yield self._one_of("schedule", tuple(SCHEDULES))
        yield self.fits(SCHEDULES[self.schedule], world_size)


@dataclass(frozen=True)
class HybridSettings(ScheduleSettings):
    """Settings of replicas that are pipelines."""

    dp: int = flag(1, "data-parallel replicas: each trains on its own samples, gradients are averaged")
    pp: int = flag(1, "pipeline stages that the layers of each replica are cut into; dp * pp is the number of ranks")

    @property
    def num_microbatches(self) -> int:
        """Parts of a replica's batch: without a pipeline there is nothing to gain from cutting it."""
        return self.microbatches if self.pp > 1 else 1

    def rules(self, world_size: int) -> Iterator[Rule]:
        yield from (self._at_least_1(name) for name in ("dp", "pp"))
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        product = f"dp * pp must equal the number of ranks, got dp={self.dp}, pp={self.pp} and {ranks}"
        if self.dp * self.pp == 1:
            product += f"; --dp {world_size} makes replicas, --pp {world_size} a pipeline"
        yield self.dp * self.pp == world_size, product
        yield from super().rules(self.pp)
        num_parts = self.dp * self.num_microbatches
        parts = f"got {self.batch} for {self.dp} * {self.num_microbatches}"
        yield num_parts <= self.batch, f"--batch must hold a sample for each of the dp * microbatches parts, {parts}"


@dataclass(frozen=True)
class LayoutSettings(HybridSettings):
    """Settings of the script that can do everything."""

    lr: float = other_default(RunSettings, "lr", 3e-3)
    width: int = other_default(GPTSettings, "width", 128)
    dropout: float = flag(0.0, "share of activations dropped in training, from 0 to below 1", "P")
    bucket_mb: float = flag(25.0, "MiB of gradients that are reduced together, while the backward goes on", "MIB")
    optimizer: str = flag("adamw", "adamw, or muon for the hidden matrices and adamw for the rest")
    zero: int = flag(0, "replicas share out 1: the optimizer's state, 2: gradients too; 0: each has all")
    compress: str = flag(
        "none",
        "send gradients as bfloat16, float16, int8 or float8_e4m3fn, and what these lose in the next step",
        fixed=True,
    )
    exact: bool = flag(
        False,
        "add gradients up so that every layout with as many micro-batches (dp * microbatches) gives the same bits, and "
        "print a hash of the weights",
    )
    check_every: int = flag(0, "steps between two comparisons of the replicas' weights, bit by bit; 0 never compares")
    device: str = flag("cpu", "cuda trains on GPUs, one a rank, and needs CuPy", "{cpu,cuda}")
    precision: str = flag(
        "float32", "of what layers compute; weights, gradients and checkpoints stay float32", "{float32,bfloat16}"
    )

    @property
    def num_microbatches(self) -> int:
        return self.microbatches if self.exact else super().num_microbatches

    def rules(self, world_size: int) -> Iterator[Rule]:
        yield from super().rules(world_size)
        yield 0 <= self.dropout < 1, f"--dropout must be at least 0 and below 1, got {self.dropout}"
        finite = 0 < self.bucket_mb * 2**20 < math.inf
        yield finite, f"--bucket-mb must be above 0 and finite, got {self.bucket_mb}"
        yield self._one_of("optimizer", ("adamw", "muon"))
        yield self.zero in (0, 1, 2), f"--zero must be 0, 1 or 2, got {self.zero}"
        yield self._one_of("compress", ("none", *LARGEST))
        plain = self.compress == "none" or not (self.zero or self.exact)
        yield plain, f"--compress {self.compress} goes with neither --zero nor --exact"
        yield not (self.exact and self.zero), f"--exact has no shards yet, got --zero {self.zero}"
        num_parts = self.dp * self.num_microbatches
        parts = f"got {self.batch} for dp * microbatches = {num_parts}"
        yield not self.exact or self.batch % num_parts == 0, f"--exact needs micro-batches of one size: {parts}"
        wider = f"--exact adds float32 up in float64, and nothing is wider than --dtype {self.dtype}"
        yield not self.exact or self.dtype == "float32", wider
        yield self.check_every >= 0, f"--check-every must not be negative, got {self.check_every}"
        yield self._one_of("device", DEVICES)
        yield self._one_of("precision", ("float32", "bfloat16"))
        wide = f"--precision bfloat16 trains float32 weights, got --dtype {self.dtype}"
        yield self.precision == "float32" or self.dtype == "float32", wide


def check(settings: RunSettings, world_size: int) -> None:
    """Check that the settings fit each other and the number of ranks.

    Raises:
        ValueError: the first rule that is broken, with the values that break it.
    """
    for holds, rule in settings.rules(world_size):
        if not holds:
            raise ValueError(rule)
