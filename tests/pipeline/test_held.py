"""Bytes that were measured, as a file, and in the commands that speak of memory."""

import json
import re

import pytest

from pipeline import SCHEDULES
from pipeline.cli.main import main
from pipeline.schedules.compare import Work, peaks_of, searched, timeline_of
from pipeline.schedules.held import StageBytes, from_json, rank_bytes, to_json
from pipeline.schedules.placed import problem_of

STAGES = {  # two chunks a rank: unequal, so that a sum over the wrong stages shows
    2: [StageBytes(100, 100, 200, 10, 4, 13, 3, 3, 3, 0), StageBytes(50, 50, 100, 20, 8, 26, 6, 6, 6, 5)],
    4: [StageBytes(100 + s, 10 * s, s, 5 + s, 2, 5 + 4 * s, *[3 * s] * 3, s) for s in range(4)],
}
TEXT = to_json(STAGES, num_microbatches=4, num_shards=2)


def run(capsys, *command):
    status = main([*map(str, command)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "held.json"
    file.write_text(TEXT)
    return file


def test_what_is_written_is_read_back():
    measured = from_json(TEXT, "held.json")
    assert {count: measured.stages_of(count) for count in STAGES} == STAGES
    assert measured.num_shards == 2
    with pytest.raises(ValueError, match=r"held.json has a model cut into 2, 4 stages, and not 8"):
        measured.stages_of(8)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"shards": 1, "stages": []}',
        TEXT.replace('"shards": 2', '"shards": 0'),
        TEXT.replace('"weights": 50', '"weights": -50'),
        TEXT.replace('"weights": 50', '"weights": 0.5'),
        TEXT.replace('"backward": 6', '"forwards": 6'),
        TEXT.replace('"2": [', '"3": ['),
        "[" * 100_000,
    ],
)
def test_a_file_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=r"^held.json is nothing that `python -m pipeline memory --json` writes$"):
        from_json(text, "held.json")


@pytest.mark.parametrize("name", ["1f1b", "zbv", "zero_bubble_h1"])
def test_simulate_and_compare_say_the_bytes_of_every_rank(name, path, capsys):
    schedule = SCHEDULES[name]
    num_stages = schedule.num_stages(2)
    wanted = rank_bytes(STAGES[num_stages], schedule, num_ranks=2, num_microbatches=4, num_shards=2)
    shown = " ".join(f"{peak:.4g}" for peak in wanted)
    sizes = ["--stages", num_stages, "--microbatches", 4, "--measured", path]
    assert run(capsys, "simulate", name, *sizes)[1].endswith(f"peak memory a rank                      {shown}\n")
    out = run(capsys, "compare", name, "--ranks", 2, "--microbatches", 4, "--measured", path, "--memory", 1)[1]
    assert f"  {shown}  too much" in out
    assert "peak memory a rank" in out


def test_the_search_keeps_what_its_ranks_really_hold_under_the_limit(path, capsys):
    measured = from_json(TEXT, "held.json")
    sizes = ["--ranks", 2, "--microbatches", 4, "--measured", path, "--seconds", 2]
    status, out, _ = run(capsys, "search", *sizes, "--placement", "one", "--memory", 330)
    assert status == 0
    peaks = [float(peak) for peak in re.findall(r"^memory a rank +(.*)$", out, re.MULTILINE)[0].split()]
    assert 300 < max(peaks) <= 330
    status, _, err = run(capsys, "search", *sizes, "--placement", "one", "--memory", 300)
    assert (status, err) == (
        2,
        "python -m pipeline: --memory must be more than what ranks hold beside their micro-batches, "
        "got 300 and 303 161\n",
    )
    work = Work(measured=measured, memory=330)
    schedule = searched(2, 4, work, num_tries=20)
    assert max(peaks_of(schedule, timeline_of(schedule, 2, 4, work), work)) <= 330


def test_memory_that_is_kept_for_what_stages_pass_is_part_of_the_error():
    """Ranks had 8 where 7 were held, and it said that this must be more."""
    work = dict.fromkeys(("forward", "backward_input", "backward_weight", "activations"), 1.0)
    with pytest.raises(ValueError, match=r"got 8 and 7, and 2 for what stages pass to each other$"):
        problem_of(
            "one",
            num_ranks=2,
            num_microbatches=2,
            latency=0.0,
            deferred=0.0,
            static=7.0,
            memory=8.0,
            reserve=2.0,
            **work,
        )


@pytest.mark.long
def test_a_model_is_measured_on_the_spot_and_by_the_command(tmp_path, capsys):
    status, text, _ = run(capsys, "memory", "mlp", "1f1b", "zbv", "--pp", 2, "--microbatches", 4, "--json")
    assert status == 0
    assert list(json.loads(text)["stages"]) == ["2", "4"]
    file = tmp_path / "held.json"
    file.write_text(text)
    outputs = [
        run(capsys, "simulate", "1f1b", "--stages", 2, "--microbatches", 4, "--measured", what)[1].splitlines()[-1]
        for what in (file, "mlp")
    ]
    assert all("KiB" in line for line in outputs)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["search", "--measured", "held.json"], "--measured held.json cannot be read: "),
        (["simulate", "1f1b", "--measured", "gtp"], "the model must be gpt or mlp, or MODULE:FUNCTION, got 'gtp'"),
        (["compare", "--measured", "mlp", "--static", "3"], "--measured is in place of --static: give one of them"),
        (["simulate", "1f1b", "--microbatches", "25", "--measured", "mlp"], "--microbatches must be at most 24, the"),
        (["simulate", "1f1b", "--stages", "9", "--measured", "mlp"], "a model of 8 layers, embedding and"),
    ],
)
def test_a_wrong_flag_is_said_on_one_line(command, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *command)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
