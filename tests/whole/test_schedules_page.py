"""docs/schedules.md shows what the code gives: its pictures are drawn again, its errors are made."""

import re
import runpy
from pathlib import Path

import pytest

from pipeline import FORWARD_ONLY, SCHEDULES, ScheduleError, check_deadlock_free, lower
from pipeline.__main__ import main

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "schedules.md").read_text(encoding="utf-8")
DRAWINGS = runpy.run_path(str(DOCS / "drawings.py"))["drawings"]()


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_picture_is_what_the_code_draws(name):
    assert (DOCS / "img" / name).read_text(encoding="utf-8") == DRAWINGS[name], "run `make drawings`"


def test_every_schedule_is_on_the_page_with_its_picture():
    assert re.findall(r"!\[(.*)\]\(img/\1\.svg\)", PAGE) == list(SCHEDULES)
    assert re.findall(r"^### (\w+):", PAGE, re.MULTILINE) == [*SCHEDULES, FORWARD_ONLY.name]
    assert {path.name for path in (DOCS / "img").glob("*.svg")} == {*DRAWINGS, "timeline.svg"}  # README's


def test_the_command_below_the_comparison_draws_it(tmp_path):
    """The picture had messages of a third of a forward, the command one that is rounded: other bytes."""
    [command] = re.findall(r"`(compare .* --svg compare\.svg)`", PAGE)
    words = command.split()
    assert main([*words[:-1], str(tmp_path / words[-1])]) == 0
    assert (tmp_path / words[-1]).read_text(encoding="utf-8") == (DOCS / "img" / "compare.svg").read_text("utf-8")


def test_the_errors_on_the_page_are_real(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0BW0,0F2,0BW1,0BW2\n1BW0,1F0,1F1,1BW1,1F2,1BW2\n")
    assert main(["check", str(path)]) == 2
    assert f"```text\n{capsys.readouterr().err}```" in PAGE


def test_the_deadlock_on_the_page_is_real():
    place = {"rank_of": SCHEDULES["1f1b"].rank_of, "num_stages": 2}
    programs = lower(SCHEDULES["1f1b"].orders(2, 2), lookahead=0, **place)
    with pytest.raises(ScheduleError) as caught:
        check_deadlock_free(programs, synchronous_sends=True, **place)
    assert f"```text\n{caught.value}\n```" in PAGE
