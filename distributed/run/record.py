"""What rank 0 of a run writes down: files in the run's folder, and the same numbers to trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.run.command_line import to_save, warn
from distributed.run.folder import RunFolder
from distributed.run.settings import RunSettings
from distributed.run.step_line import StepLine
from distributed.run.summary import summarize
from distributed.run.trackers import Trackers
from distributed.trace.perfetto import Event


class Record:
    """A run's folder and its trackers, in the hands of the rank that writes.

    What goes wrong with a tracker or a picture ends no run: it is a line on stderr.

    Args:
        folder: of the run.
        settings: of the run.
    Attributes:
        folder: of the run.
    """

    def __init__(self, folder: RunFolder, settings: RunSettings) -> None:
        self.folder = folder
        self._settings = settings
        self._trackers: Trackers | None = None  # before the first step

    def begin(
        self,
        start_line: str,
        metrics_before: Path,
        first: int,
        *,
        goes_on: bool = True,
        last: dict[str, Any] | None = None,
    ) -> None:
        """Write the settings and what is known of earlier steps, and open the trackers.

        Args:
            start_line: what the screen says of the ranks.
            metrics_before: of what is gone on from.
            first: the step to come.
            goes_on: whether there is a step to come.
            last: see `RunFolder.begin`.
        Raises:
            OSError, ValueError: a file cannot be written, the metrics from before not be read, or a tracker not begin.
        """
        saved = to_save(self._settings) | {"start": start_line}
        self.folder.begin(saved, metrics_before, first, goes_on=goes_on, last=last)
        if self._trackers is None:
            self._trackers = Trackers(self._settings, self.folder.path, first, saved)

    def write(self, line: Mapping[str, Any]) -> None:
        """Write a step's line of metrics.

        Raises:
            OSError: the disk is full, or the folder was removed.
        """
        self.folder.write_metrics(line)
        self._track(line)

    def sum_up(self, line: StepLine, figures: Mapping[str, float]) -> str:
        """Write the summary; return what to say, nothing where no step is known.

        Args:
            line: of the last step: says what speed is counted in.
            figures: of the caller's own, for the summary and the trackers.
        """
        lines = self.folder.read_metrics()
        if not lines:
            return ""  # all steps were done elsewhere, and nobody knows how
        summary, words = summarize(lines, line.samples, line.speed)
        self.folder.write_summary(summary | dict(figures))
        self._track({"step": lines[-1]["step"], **figures})
        return words

    def draw(self, events: Sequence[Event], loss_unit: str) -> None:
        """Draw the metrics, and what ran when in the last step.

        Args:
            events: of that step; empty where it was not recorded.
            loss_unit: nats, say.
        """
        for fault in self.folder.draw(events, self._settings.steps, loss_unit=loss_unit):
            warn(fault)

    def close(self) -> None:
        """End the trackers, and let other processes into the folder."""
        for fault in self._trackers.close() if self._trackers is not None else []:
            warn(fault)
        self.folder.close()

    def _track(self, line: Mapping[str, Any]) -> None:
        for fault in self._trackers.write(line) if self._trackers is not None else []:
            warn(fault)
