"""What every run can be told; a script adds flags of its own, see `flags.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from distributed.run.flags import COUNT, POSITIVE, Bounds, Rule, flag


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

    def rules(self, world_size: int) -> Iterator[Rule]:
        """Yield what must hold between flags on so many ranks; a rule may rely on those before it."""
        yield from ()


@dataclass(frozen=True)
class ReplicaSettings(RunSettings):
    """Settings of a script whose ranks are all replicas."""

    def rules(self, world_size: int) -> Iterator[Rule]:
        yield from super().rules(world_size)
        enough = f"--batch must hold a sample for each of {world_size} ranks, got {self.batch}"
        yield self.batch >= world_size, enough
