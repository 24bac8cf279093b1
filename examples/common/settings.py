"""The flags of the example scripts, which share them, so that a flag means the same everywhere.

`train_gpt.py` alone has those of `train_gpt_settings.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from distributed.data_parallel.compression.number_formats import NUMBER_FORMATS
from distributed.recovery import Heal
from distributed.run.flags import COUNT, COUNT_OR_NONE, POSITIVE, Bounds, Rule, flag, other_default
from distributed.run.settings import ReplicaSettings, RunSettings
from minigrad.words import counted
from pipeline.schedules.schedule import SCHEDULES, Schedule

MOST_MICROBATCHES = 2**14  # the order of a schedule is a list


@dataclass(frozen=True)
class DigitsSettings(ReplicaSettings):
    """Settings of a small network that reads handwritten digits."""

    hidden: int = flag(256, "features between the two layers", bounds=COUNT, fixed=True)


@dataclass(frozen=True)
class GPTSettings(RunSettings):
    """Settings of a GPT that learns text."""

    lr: float = other_default(RunSettings, "lr", 1e-3)  # no warmup: at 3e-3 rounding grows until layouts differ
    layers: int = flag(4, "transformer blocks", bounds=COUNT, fixed=True)
    heads: int = flag(4, "attention heads in each block", bounds=COUNT, fixed=True)
    width: int = flag(64, "features of each token; a multiple of --heads", bounds=COUNT, fixed=True)
    context: int = flag(64, "tokens that the model sees at a time", bounds=COUNT, fixed=True)
    text: str | None = flag(
        None,
        "what to learn: a file or a folder of files, as bytes, or tokens of your own as .npy or as .bin of uint16 "
        "(default: the reference text that comes with Python)",
        "PATH",
    )
    vocab: int = flag(256, "number of different tokens; bytes are 256", bounds=COUNT, fixed=True)
    dtype: str = flag("float32", "of parameters and activations", choices=("float32", "float64"), fixed=True)

    def rules(self, world_size: int) -> Iterator[Rule]:
        yield from super().rules(world_size)
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
class RecoverySettings:
    """Settings of a GPT on replicas that may die."""

    heal: str = flag(
        "replace",
        "replace starts a new process for one that died, shrink goes on with those that live, spares with one of those "
        "that wait",
        choices=tuple(how.value for how in Heal),
    )
    spares: int = flag(0, "ranks that wait until one dies", bounds=COUNT_OR_NONE)
    steps: int = flag(600, "optimizer steps", bounds=COUNT)
    batch: int = flag(48, "samples in a step, over all ranks", bounds=COUNT)
    layers: int = flag(4, "transformer blocks", bounds=COUNT)
    heads: int = flag(4, "attention heads in each block", bounds=COUNT)
    width: int = flag(64, "features of each token; a multiple of --heads", bounds=COUNT)
    context: int = flag(64, "tokens that the model sees at a time", bounds=COUNT)

    def rules(self, world_size: int) -> Iterator[Rule]:
        multiple = f"--width must be a multiple of --heads, got {self.width} and {self.heads}"
        yield self.width % self.heads == 0, multiple
        waits = f"--spares are for --heal shrink and spares, got {self.spares} and --heal {self.heal}"
        yield self.spares == 0 or self.heal != Heal.REPLACE.value, waits
        few = f"--spares must leave a rank that trains, got {self.spares} of {world_size}"
        yield self.spares < world_size, few
        num_replicas = world_size - self.spares
        yield (
            self.batch >= num_replicas,
            f"--batch must hold a sample for each of {counted(num_replicas, 'rank')}, got {self.batch}",
        )


@dataclass(frozen=True)
class LocalStepsSettings(GPTReplicaSettings):
    """Settings of replicas that agree from time to time."""

    every: int = flag(5, "steps from one agreement on a weight to the next", bounds=COUNT, fixed=True)
    fragments: int = flag(
        1, "parts of the model that are agreed on one after the other; --every is a multiple", bounds=COUNT, fixed=True
    )
    delay: int = flag(
        2, "steps that an agreement may be under way, while the next ones compute", bounds=COUNT_OR_NONE, fixed=True
    )
    alpha: float | None = flag(
        None,
        "how much of its own weights a rank keeps where it agrees (default: what it has learned during --delay)",
        "SHARE",
        bounds=Bounds(at_least=0, at_most=1),
        fixed=True,
    )
    compress: str = flag(
        "int8",
        "send what ranks have learned in so few bits, and what these lose the next time",
        choices=("none", *NUMBER_FORMATS),
        fixed=True,
    )
    outer_lr: float = flag(
        1.0, "of the outer step, which takes what ranks have learned for a gradient", "RATE", bounds=POSITIVE
    )
    outer_momentum: float = flag(
        0.0, "likewise, Nesterov's; DiLoCo's is 0.9", "SHARE", bounds=Bounds(at_least=0, below=1)
    )

    def rules(self, world_size: int) -> Iterator[Rule]:
        yield from super().rules(world_size)
        blocks = f"--fragments must be at most the blocks of the model, got {self.fragments} for --layers {self.layers}"
        yield self.fragments <= self.layers, blocks
        multiple = f"--every must be a multiple of --fragments, got {self.every} and {self.fragments}"
        yield self.every % self.fragments == 0, multiple
        apart = self.every // self.fragments
        below = f"--delay must be below the {counted(apart, 'step')} from one fragment to the next, got {self.delay}"
        yield self.delay < apart, below


@dataclass(frozen=True)
class PipelineSettings(GPTSettings):
    """Settings of a pipeline."""

    microbatches: int = flag(
        4,
        "parts that a pipeline cuts its batch into; more of them, a smaller bubble",
        bounds=Bounds(at_least=1, at_most=MOST_MICROBATCHES),
    )

    @property
    def num_microbatches(self) -> int:
        """Parts of a replica's batch."""
        return self.microbatches

    @property
    def layers_a_block(self) -> int:
        """Parts of a block that may be on different stages."""
        return 1

    def rules(self, world_size: int) -> Iterator[Rule]:
        yield from super().rules(world_size)
        parts = counted(self.num_microbatches, "micro-batch")
        enough = f"--batch must hold a sample for each of {parts}, got {self.batch}"
        yield self.num_microbatches <= self.batch, enough

    def fits(self, schedule: Schedule, num_ranks: int) -> Rule:
        """Return whether the model and its micro-batches fit a schedule on so many ranks."""
        num_stages = schedule.num_stages(num_ranks)
        if num_stages > self.layers * self.layers_a_block:
            least = "a block" if self.layers_a_block == 1 else "half a block"
            stages = f"{counted(num_stages, 'stage')} of {schedule.name} on {counted(num_ranks, 'rank')}"
            return False, f"--layers must give each stage {least}, got {self.layers} for the {stages}"
        try:
            schedule.orders(num_ranks, self.num_microbatches)
        except ValueError as rule:  # in the words of a function's parameters
            words = str(rule).replace("num_microbatches", "--microbatches").replace("num_ranks", "the pipeline's ranks")
            return False, words
        return True, ""


@dataclass(frozen=True)
class ScheduleSettings(PipelineSettings):
    """Settings of a pipeline's order of work."""

    schedule: str = flag("1f1b", "order of a pipeline's forwards and backwards", choices=tuple(SCHEDULES))

    def rules(self, world_size: int) -> Iterator[Rule]:
        yield from super().rules(world_size)
        yield self.fits(SCHEDULES[self.schedule], world_size)


@dataclass(frozen=True)
class HybridSettings(ScheduleSettings):
    """Settings of replicas that are pipelines."""

    dp: int = flag(1, "data-parallel replicas: each trains on its own samples, gradients are averaged", bounds=COUNT)
    pp: int = flag(
        1, "pipeline stages that the layers of each replica are cut into; dp * pp is the number of ranks", bounds=COUNT
    )

    microbatches: int = flag(
        0,
        "parts that a replica's batch is cut into, and whose gradients add up: less memory, and a smaller bubble of a "
        "pipeline; 0 is 4 in a pipeline and 1 without",
        bounds=Bounds(at_least=0, at_most=MOST_MICROBATCHES),
    )

    @property
    def num_microbatches(self) -> int:
        """Parts of a replica's batch."""
        return self.microbatches or (4 if self.pp > 1 else 1)

    def rules(self, world_size: int) -> Iterator[Rule]:
        ranks = counted(world_size, "rank")
        product = f"dp * pp must equal the number of ranks, got dp={self.dp}, pp={self.pp} and {ranks}"
        if self.dp * self.pp == 1:
            product += f"; --dp {world_size} makes replicas, --pp {world_size} a pipeline"
        elif world_size == 1:
            product += f"; mpirun -n {self.dp * self.pp} python -m mpi4py SCRIPT starts so many"
        yield self.dp * self.pp == world_size, product
        yield from super().rules(self.pp)
        num_parts = self.dp * self.num_microbatches
        parts = f"got {self.batch} for {self.dp} * {self.num_microbatches}"
        yield num_parts <= self.batch, f"--batch must hold a sample for each of the dp * microbatches parts, {parts}"
