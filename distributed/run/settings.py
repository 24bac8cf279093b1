"""What every run can be told; a script adds flags of its own, see `flags.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from distributed.run.flags import COUNT, POSITIVE, Bounds, Rule, flag
from minigrad.extras import needs
from minigrad.words import counted


@dataclass(frozen=True)
class RunSettings:
    """Settings of every run."""

    steps: int = flag(600, "optimizer steps", bounds=COUNT)
    batch: int = flag(
        48, "samples in a step, over all ranks: the same batch trains the same model in any layout", bounds=COUNT
    )
    lr: float = flag(3e-3, "peak learning rate", "RATE", bounds=POSITIVE)
    seed: int = flag(
        0,
        "start of all random numbers; the same seed gives the same run",
        bounds=Bounds(at_least=0, at_most=2**64 - 1),
        fixed=True,
    )
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
    save_every: int = flag(100, "steps between two checkpoints; the last step is always saved", bounds=COUNT)
    keep: int = flag(3, "checkpoints that stay", bounds=COUNT)
    progress: str = flag(
        "auto",
        "auto is a bar where stderr is a terminal; mpirun hides terminals",
        choices=("auto", "bar", "lines"),
        once=True,
    )
    quiet: bool = flag(False, "say nothing but warnings and errors", once=True)
    tensorboard: bool = flag(
        False, "write the metrics into tensorboard/ of the run's folder too; needs tensorboardX", once=True
    )
    wandb: str | None = flag(
        None, "project of Weights & Biases that gets the metrics too; needs wandb", "PROJECT", once=True
    )

    @classmethod
    def inherited(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a new run takes over where a flag is not given, by field.

        Args:
            given: fields whose flags are.
        Raises:
            ValueError, OSError: it cannot be read, or a flag says something else.
        """
        return {}

    def rules(self, world_size: int) -> Iterator[Rule]:
        """Yield what must hold between flags on so many ranks.

        A rule may rely on those before it.
        """
        asked = {
            "--progress bar": (self.progress == "bar", "tqdm", "examples"),
            "--tensorboard": (self.tensorboard, "tensorboardX", "tensorboard"),
            "--wandb": (self.wandb is not None, "wandb", "wandb"),
        }
        for wanted, (is_asked, package, extra) in asked.items():
            yield not is_asked or find_spec(package) is not None, needs(wanted, package, extra)


@dataclass(frozen=True)
class ReplicaSettings(RunSettings):
    """Settings of a script whose ranks are all replicas."""

    def rules(self, world_size: int) -> Iterator[Rule]:
        yield from super().rules(world_size)
        enough = f"--batch must hold a sample for each of {counted(world_size, 'rank')}, got {self.batch}"
        yield self.batch >= world_size, enough
