"""Who else gets the numbers of a run, beside its metrics.jsonl: TensorBoard, Weights & Biases. On rank 0 alone.

A tracker is made when the run begins, so what it lacks (a package, an account) ends the run before any work. What goes
wrong later is never worth a run: it is said once, and the tracker gets no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from distributed.run.settings import RunSettings

Numbers = Mapping[str, float]


class Tracker(Protocol):
    """Takes a line of metrics at a time."""

    def write(self, step: int, numbers: Numbers) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in a folder, for `tensorboard --logdir`.

    Args:
        first_step: what an earlier process wrote from there on counts no more.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, step: int, numbers: Numbers) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of a project of Weights & Biases, with this run's name.

    A run that goes on goes on there too. What wandb reads from the environment counts: WANDB_API_KEY,
    WANDB_MODE=offline and others.
    """

    def __init__(self, project: str, folder: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=project, name=folder.name, id=folder.name, resume="allow", dir=str(folder), config=dict(settings)
        )

    def write(self, step: int, numbers: Numbers) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """All that the settings ask for.

    Args:
        folder: of the run.
        first_step: that this process does.
        saved: the settings, as JSON can say them.
    Raises:
        ValueError: one cannot begin; says which flag asked for it.
    """

    def __init__(self, settings: RunSettings, folder: Path, first_step: int, saved: Mapping[str, Any]) -> None:
        self._open: dict[str, Tracker] = {}  # by the flag that asked for it
        try:
            if settings.tensorboard:
                flag = "--tensorboard"
                self._open[flag] = TensorBoard(folder / "tensorboard", first_step)
            if settings.wandb is not None:
                flag = "--wandb"
                self._open[flag] = WeightsAndBiases(settings.wandb, folder, saved)
        except Exception as error:  # whatever these packages raise
            self.close()
            raise ValueError(f"{flag} cannot begin: {_one_line(error)}") from error

    def write(self, line: Mapping[str, Any]) -> list[str]:
        """Give a line of metrics to all; return what went wrong."""
        numbers = {name: value for name, value in line.items() if name != "step"}
        return self._each(lambda tracker: tracker.write(line["step"], numbers))

    def close(self) -> list[str]:
        """End what was begun; return what went wrong."""
        faults = self._each(lambda tracker: tracker.close())
        self._open.clear()
        return faults

    def _each(self, tell: Any) -> list[str]:
        faults = []
        for flag, tracker in list(self._open.items()):
            try:
                tell(tracker)
            except Exception as error:
                del self._open[flag]
                faults.append(f"{flag} ends here: {_one_line(error)}")
        return faults


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
