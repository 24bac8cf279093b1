"""Every command prints its result as JSON, in the shape that docs/schedules.md says."""

import json
import re
from pathlib import Path

import pytest

from pipeline.cli.main import COMMANDS, main

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"
SMALL = ["--stages", "2", "--microbatches", "2"]
HANGS = "0F0,0BW0,0F1,0BW1\n1BW0,1F0,1F1,1BW1\n"
EXAMPLES = {
    "draw": ["1f1b", *SMALL],
    "simulate": ["1f1b", *SMALL, "--skips", "0-1"],
    "compare": ["1f1b", "interleaved_1f1b", "--ranks", "2", "--microbatches", "3"],
    "check": ["1f1b", *SMALL, "--dp", "2"],
    "verify": ["mlp", "--microbatches", "2"],
    "sweep": ["1f1b", "--ranks", "2..3", "--microbatches", "2"],
    "memory": ["mlp", "--pp", "2", "--microbatches", "2"],
    "repair": ["hangs.csv"],
    "search": ["--ranks", "2", "--microbatches", "2"],
    "dump": ["1f1b", *SMALL],
}


def documented():
    """Return the names that the page has for each command."""
    section = PAGE.read_text().partition("### As JSON")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| .*?: (.+?) \|$", section, re.MULTILINE)
    names = {
        command: re.findall("`([a-z_]+)`", what.partition(";")[0].partition(",")[0])
        for commands, what in rows
        for command in re.findall("`(.+?)`", commands)
    }
    return names | {"simulate": [*names["draw"][:-1], "skips_that_wait", "peak_bytes"]}


@pytest.mark.usefixtures("young_heap")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_json_of_the_shape_that_the_page_has(command, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("hangs.csv").write_text(HANGS)
    assert main([command, *EXAMPLES[command], "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    for row in found if isinstance(found, list) else [found]:
        assert list(row) == documented()[command]
    # What a schedule does not allow is said beside it.
    assert said.err.startswith("interleaved_1f1b  interleaved 1F1B needs") == (command == "compare")


def test_numbers_that_json_has_not_are_null(capsys):
    assert main(["compare", "1f1b", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert row["memory"] is row["bandwidth"] is None


def test_what_is_moved_drawn_and_found_is_there(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("hangs.csv").write_text(HANGS)

    def read(*arguments):
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert read("repair", "hangs.csv")["moved"] == [{"rank": 1, "action": "1F0", "from": 1, "to": 0}]
    assert read("draw", "1f1b", *SMALL)["ranks"][1][:2] == [["1F0", 1, 2], ["1BW0", 2, 4]]
    assert read("dump", "1f1b", *SMALL)["ranks"][1] == ["1F0", "1BW0", "1F1", "1BW1"]
    assert read("dump", "zero_bubble_h1", *SMALL, "--for", "torch")["ranks"][1][:3] == ["1F0", "1I0", "1F1"]
    found = read("search", *EXAMPLES["search"], "--placement", "one")
    assert found["time"] == found["bound"]
    assert found["placements"] == {"one": found["time"]}
    assert [len(row) for row in found["ranks"]] == [6, 6]


def test_a_command_that_fails_prints_no_json(capsys):
    assert main(["draw", "1f1b", "--forward", "1,2", "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
