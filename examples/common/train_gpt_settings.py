"""The flags of train_gpt.py, a group for each thing that can be chosen; `TrainSettings` is all of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from common.init_from import sizes_of
from common.settings import GPTSettings, HybridSettings
from distributed.data_parallel.compression.number_formats import NUMBER_FORMATS
from distributed.recovery import Heal
from distributed.run.flags import COUNT_OR_NONE, MOST, NOT_NEGATIVE, SHARE, Bounds, Rule, flag, flag_of, other_default
from distributed.run.settings import RunSettings
from minigrad.backend import DEVICES
from minigrad.precision import PRECISIONS
from pipeline.schedules.schedule import Schedule

GRAPHS = ("auto", "on", "off")


@dataclass(frozen=True)
class RegularizationSettings(GPTSettings):
    """Settings of what keeps a GPT from learning its text by heart."""

    dropout: float = flag(0.0, "share of activations dropped in training, from 0 to below 1", "P", bounds=SHARE)
    weight_decay: float = flag(
        0.1, "share of matrices, times the learning rate, that goes in each step", "RATE", bounds=NOT_NEGATIVE
    )


@dataclass(frozen=True)
class FineTuningSettings(RunSettings):
    """Settings of fine-tuning."""

    init_from: str | None = flag(
        None,
        "weights to begin with, and with them --layers, --heads, --width, --context and --vocab: of a run, a "
        "checkpoint, or GPT-2's files",
        "FOLDER",
        once=True,
    )

    @classmethod
    def inherited(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        folder = given.get("init_from")
        sizes = sizes_of(folder) if folder is not None else {}
        for name, size in sizes.items():
            if given.get(name, size) != size:
                raise ValueError(f"{flag_of(name)} is {size} in --init-from {folder}, got {given[name]}")
        return super().inherited(given) | sizes

    def rules(self, world_size: int) -> Iterator[Rule]:
        yield from super().rules(world_size)
        both = f"--init-from begins a run and --resume goes on with one, got {self.init_from} and {self.resume}"
        yield self.init_from is None or self.resume is None, both


@dataclass(frozen=True)
class EvaluationSettings(RunSettings):
    """Settings of evaluation."""

    eval_every: int = flag(
        0, "steps between two validation losses, points in loss.png; 0 has one, at the end", bounds=COUNT_OR_NONE
    )


@dataclass(frozen=True)
class OptimizerSettings(GPTSettings):
    """Settings of how weights change."""

    optimizer: str = flag(
        "adamw", "muon takes the hidden matrices and leaves the rest to adamw", choices=("adamw", "muon")
    )
    warmup: int = flag(
        -1,
        "steps in which the learning rate rises to --lr; -1 is a tenth of --steps, at most 100",
        bounds=Bounds(at_least=-1, at_most=MOST),
    )
    lr_end: float = flag(
        0.1,
        "share of --lr that half a cosine comes down to; 1 keeps it as it is",
        "P",
        bounds=Bounds(at_least=0, at_most=1),
    )
    lr_scale: str | None = flag(
        None,
        "layers whose learning rate is --lr times a factor of their own, such as embed=0.1,block0=0.5,head=10; 0 keeps "
        "one as it is",
        "LAYER=FACTOR,...",
    )
    clip: float = flag(1.0, "norm that gradients are clipped to; 0 never clips", "NORM", bounds=NOT_NEGATIVE)
    beta1: float = flag(0.9, "share of adamw's mean of gradients that stays in a step", "P", bounds=SHARE)
    beta2: float = flag(0.99, "share of adamw's mean of their squares that stays in a step", "P", bounds=SHARE)

    @property
    def num_warmup_steps(self) -> int:
        return min(100, self.steps // 10) if self.warmup == -1 else self.warmup

    @property
    def lr_scales(self) -> dict[str, float]:
        """What --lr is multiplied by, of layers that are named.

        Raises:
            ValueError: a part is no name of a layer and a number of at least 0.
        """
        names = ["embed", *(f"block{i}" for i in range(self.layers)), "head"]
        scales = {}
        for part in self.lr_scale.split(",") if self.lr_scale is not None else []:
            name, _, factor = part.strip().partition("=")
            if name not in names or not _is_scale(factor):
                layers = f"of embed, block0 to block{self.layers - 1} and head"
                raise ValueError(f"--lr-scale must be LAYER=FACTOR,... {layers}, factors from 0, got {part!r}")
            if name in scales:
                raise ValueError(f"--lr-scale must name each layer once, got {self.lr_scale!r}")
            scales[name] = float(factor)
        return scales

    def rules(self, world_size: int) -> Iterator[Rule]:
        yield from super().rules(world_size)
        try:
            _ = self.lr_scales
        except ValueError as fault:
            yield False, str(fault)
        yield self.warmup <= self.steps, f"--warmup must be at most --steps, got {self.warmup} and {self.steps}"


def _is_scale(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False


@dataclass(frozen=True)
class StageSettings(HybridSettings):
    """Settings of how the model is cut into stages."""

    half_blocks: bool = flag(
        False, "cut between the halves of blocks too, attention and feed-forward: more stages, or evener ones"
    )

    @property
    def layers_a_block(self) -> int:
        return 2 if self.half_blocks else 1

    def fits(self, schedule: Schedule, num_ranks: int) -> Rule:
        does, words = super().fits(schedule, num_ranks)
        if not self.half_blocks and self.layers < schedule.num_stages(num_ranks) <= 2 * self.layers:
            words += "; --half-blocks gives each half a one"
        return does, words


@dataclass(frozen=True)
class ReplicationSettings(HybridSettings):
    """Settings of how replicas work together."""

    bucket_mb: float | None = flag(
        None,
        "MiB of gradients that are reduced together, while the backward goes on; auto, or 0, measures link and model "
        "at each start and chooses (default: a sixteenth of all, from 0.5 to 25)",
        "{auto,MIB}",
        bounds=Bounds(at_least=0, at_most=MOST),
        words={"auto": 0.0},
    )
    zero: int = flag(
        0, "replicas share out 1: the optimizer's state, 2: gradients too; 0: each has all", choices=(0, 1, 2)
    )
    compress: str = flag(
        "none",
        "send gradients in so few bits, 4 columns of each matrix (powersgd) or the largest hundredth (topk), and what "
        "these lose in the next step",
        choices=("none", *NUMBER_FORMATS, "powersgd", "topk"),
    )
    exact: bool = flag(
        False,
        "add gradients up so that every layout with as many micro-batches (dp * microbatches) gives the same bits, and "
        "print a hash of the weights",
    )
    check_every: int = flag(
        0,
        "steps between two comparisons of the replicas' weights, bit by bit; 0 never compares",
        bounds=COUNT_OR_NONE,
    )

    @property
    def num_microbatches(self) -> int:
        return self.microbatches or 4 if self.exact else super().num_microbatches

    def rules(self, world_size: int) -> Iterator[Rule]:
        yield from super().rules(world_size)
        plain = self.compress == "none" or not (self.zero or self.exact)
        yield plain, f"--compress {self.compress} goes with neither --zero nor --exact"
        num_parts = self.dp * self.num_microbatches
        parts = f"got {self.batch} for dp * microbatches = {num_parts}"
        yield not self.exact or self.batch % num_parts == 0, f"--exact needs micro-batches of one size: {parts}"
        wider = f"--exact adds float32 up in float64, and nothing is wider than --dtype {self.dtype}"
        yield not self.exact or self.dtype == "float32", wider


@dataclass(frozen=True)
class HealSettings(ReplicationSettings):
    """Settings of what follows when a rank dies."""

    heal: str = flag(
        "none",
        "none ends the job; under `python -m distributed.recovery` replace starts a new process, shrink goes on with "
        "those that live, spares with one of those that wait",
        choices=("none", *(how.value for how in Heal)),
    )
    spares: int = flag(0, "ranks besides dp * pp that wait until one dies", bounds=COUNT_OR_NONE)
    buddy_every: int = flag(
        0,
        "steps between two copies in another rank's memory of what one rank alone has: a stage without replica, a "
        "shard (--zero), what --compress keeps; 0 goes back to the last checkpoint for these",
        bounds=COUNT_OR_NONE,
    )

    def layout(self, num_ranks: int) -> tuple[int, int, int]:
        """Return dp, pp and micro-batches of a replica on so many ranks or fewer.

        It is the same step, cut differently.
        """
        pp = min(self.pp, num_ranks)
        dp = min(self.dp, num_ranks // pp)
        if not self.exact:
            return dp, pp, self.num_microbatches
        num_parts = self.dp * self.num_microbatches  # which is what the bits hang on
        dp = max(d for d in range(1, dp + 1) if num_parts % d == 0)
        return dp, pp, num_parts // dp

    def rules(self, world_size: int) -> Iterator[Rule]:
        waits = f"--spares are for --heal shrink and spares, got {self.spares} and --heal {self.heal}"
        yield self.spares == 0 or self.heal in ("shrink", "spares"), waits
        few = f"--spares must leave a rank that trains, got {self.spares} of {world_size}"
        yield self.spares == 0 or self.spares < world_size, few
        copies = (
            f"--buddy-every is for --heal replace, shrink and spares, got {self.buddy_every} and --heal {self.heal}"
        )
        yield self.buddy_every == 0 or self.heal != "none", copies
        yield from super().rules(world_size - self.spares)


@dataclass(frozen=True)
class DeviceSettings(GPTSettings):
    """Settings of what computes."""

    device: str = flag("cpu", "cuda trains on GPUs, one a rank, and needs CuPy", choices=tuple(DEVICES))
    precision: str = flag(
        "auto",
        "of what layers compute; weights, gradients and checkpoints stay float32; auto: bfloat16 on a GPU",
        choices=("auto", *PRECISIONS),
    )
    graph: str = flag("auto", "capture a step on a GPU in one CUDA graph; auto: where it can be", choices=GRAPHS)

    @property
    def computed_in(self) -> str:
        """The precision that layers compute in."""
        if self.precision != "auto":
            return self.precision
        return "bfloat16" if self.device == "cuda" and self.dtype == "float32" else "float32"

    recompute: bool = flag(
        False, "blocks keep nothing for the backward but their input, and run again there: less memory, more time"
    )

    def rules(self, world_size: int) -> Iterator[Rule]:
        yield from super().rules(world_size)
        wide = f"--precision {self.precision} trains float32 weights, got --dtype {self.dtype}"
        yield self.precision in ("auto", "float32") or self.dtype == "float32", wide


@dataclass(frozen=True)
class TrainSettings(
    HealSettings,
    StageSettings,
    OptimizerSettings,
    RegularizationSettings,
    EvaluationSettings,
    FineTuningSettings,
    DeviceSettings,
):
    """Settings of the script that can do everything."""

    lr: float = other_default(RunSettings, "lr", 3e-3)
    width: int = other_default(GPTSettings, "width", 128)

    @property
    def why_no_graph(self) -> str:
        """What no CUDA graph can have a step of, or nothing."""
        reasons = {
            f"--device {self.device}": self.device != "cuda",
            f"--dp {self.dp} and --pp {self.pp} together": self.dp > 1 and self.pp > 1,  # never tried
            f"--heal {self.heal}": self.heal != "none",
            f"--dropout {self.dropout}": self.dropout > 0,
            f"--optimizer {self.optimizer}": self.optimizer != "adamw",
            "--lr-scale": bool(self.lr_scales),
            f"--compress {self.compress}": self.compress != "none",
            "--exact": self.exact,
            f"--check-every {self.check_every}": self.check_every > 0,
            f"--dtype {self.dtype}": self.dtype != "float32",
            "MINIGRAD_KERNELS=numpy": os.environ.get("MINIGRAD_KERNELS") == "numpy",
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def rules(self, world_size: int) -> Iterator[Rule]:
        yield from super().rules(world_size)
        no_shards = f"--precision float16 scales whole gradients, got --zero {self.zero}"
        yield self.precision != "float16" or not self.zero, no_shards
        yield self.graph != "on" or not self.why_no_graph, f"--graph on does not go with {self.why_no_graph}"
