"""What a benchmark keeps of its report."""

from __future__ import annotations

from pathlib import Path

import pytest
from results_file import keep


def test_a_quick_look_does_not_take_the_place_of_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results" / "engine.txt"
    keep(["one", "two"], path, is_default=True)
    keep(["three"], path, is_default=False)
    assert path.read_text() == "one\ntwo\n"
    assert capsys.readouterr().out == "not kept: results/engine.txt has what is measured without options\n"
