"""A disk that fills in the midst of a run."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.run.folder import RunFolder


def fill_disk_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be no space for the line of metrics of this step."""
    write = RunFolder.write_metrics

    def full(self: RunFolder, line: dict[str, Any]) -> None:
        if line["step"] == step:
            raise OSError(28, "No space left on device", str(self.path / "metrics.jsonl"))
        write(self, line)

    monkeypatch.setattr(RunFolder, "write_metrics", full)
