"""The text, the command line and the progress view that the example scripts share."""

import io
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import common
from common import Progress, Settings

ROOT = Path(__file__).parent.parent
TEXT = bytes(range(200))  # each byte is its own position


# ---- the text -------------------------------------------------------------------------------------------------------


def test_default_text_is_long_and_the_same_each_time() -> None:
    text = common.load_text(None)
    assert 400_000 < len(text) < 1_000_000
    assert text == common.load_text(None)


def test_text_from_a_file_is_taken_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xff\r\n\x00")
    assert common.load_text(str(tmp_path / "text")) == b"\xff\r\n\x00"


def test_unreadable_text_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^--text must be a file that can be read, got .*gone: No such file"):
        common.load_text(str(tmp_path / "gone"))
    with pytest.raises(ValueError, match=r"^--text must be a file that can be read, got .*: Is a directory"):
        common.load_text(str(tmp_path))


def test_validation_is_the_tail() -> None:
    train, validation = common.split(TEXT, context=8)
    assert (train, validation) == (TEXT[:180], TEXT[180:])


@pytest.mark.parametrize(("length", "context"), [(200, 20), (0, 1), (9, 1)])
def test_text_shorter_than_a_window_is_refused(length: int, context: int) -> None:
    rule = "the text must give more than context bytes to training and to validation, got"
    with pytest.raises(
        ValueError, match=f"{rule} {length - length // 10} and {length // 10} bytes and context={context}"
    ):
        common.split(TEXT[:length], context=context)


def test_shortest_text_that_is_long_enough() -> None:
    _, validation = common.split(TEXT, context=19)
    ((x, y),) = common.validation_batches(validation, batch=4, context=19)
    assert x.tolist() == [list(validation[:-1])]
    assert y.tolist() == [list(validation[1:])]


def test_batch_is_windows_and_what_follows_each_byte() -> None:
    x, y = common.sample_batch(TEXT, batch=64, context=7, seed=1, step=2)
    assert x.shape == y.shape == (64, 7)
    assert x.dtype == y.dtype == np.int64
    np.testing.assert_array_equal(x, x[:, :1] + np.arange(7))
    np.testing.assert_array_equal(y, x + 1)


def test_batches_reach_both_ends_of_the_text() -> None:
    x, y = common.sample_batch(TEXT[:10], batch=100, context=7, seed=0, step=0)
    assert set(x[:, 0].tolist()) == {0, 1, 2}
    assert y.max() == 9


def test_batch_depends_on_seed_and_step_alone() -> None:
    def starts(seed: int, step: int) -> list[int]:
        return common.sample_batch(TEXT, batch=32, context=7, seed=seed, step=step)[0][:, 0].tolist()

    assert starts(3, 4) == starts(3, 4)
    assert starts(3, 4) != starts(3, 5)
    assert starts(3, 4) != starts(4, 4)
    assert starts(3, 4) != starts(4, 3)
    assert starts(2**64 - 1, 0) != starts(0, 0)


def test_validation_windows_cover_the_text_once() -> None:
    batches = list(common.validation_batches(TEXT[:30], batch=2, context=7))
    assert [len(x) for x, _ in batches] == [2, 2]
    assert np.concatenate([x.reshape(-1) for x, _ in batches]).tolist() == list(range(28))
    assert np.concatenate([y.reshape(-1) for _, y in batches]).tolist() == list(range(1, 29))


def test_last_validation_batch_may_be_smaller() -> None:
    assert [len(x) for x, _ in common.validation_batches(TEXT[:29], batch=3, context=7)] == [3, 1]
    assert [len(x) for x, _ in common.validation_batches(TEXT[:28], batch=3, context=7)] == [3]


def test_trigram_table_on_the_default_text() -> None:
    train, validation = common.split(common.load_text(None), context=64)
    assert common.trigram_nats(train, validation) == pytest.approx(1.70, abs=0.05)


def test_trigram_table_by_hand() -> None:
    """Interpolated Kneser-Ney once more, one probability at a time."""
    train, validation = b"abracadabra abracadabra", b"abrazda"

    def probability(context: bytes, symbol: bytes, longer: set[bytes] | None) -> float:
        size = len(context) + 1
        grams = (
            [train[i : i + size] for i in range(len(train) - size + 1)] if longer is None else [g[1:] for g in longer]
        )
        after = [gram for gram in grams if gram[:-1] == context]
        shorter = 1 / 256 if size == 1 else probability(context[1:], symbol, set(grams))
        if not after:
            return shorter
        kept = max(after.count(context + symbol) - 0.75, 0)
        return (kept + 0.75 * len(set(after)) * shorter) / len(after)

    expected = [-math.log(probability(validation[i : i + 2], validation[i + 2 : i + 3], None)) for i in range(5)]
    assert common.trigram_nats(train, validation) == pytest.approx(np.mean(expected), rel=1e-12)


# ---- the command line -----------------------------------------------------------------------------------------------


def test_defaults_fit_one_rank() -> None:
    common.check(Settings(), 1)


def test_each_flag_sets_its_field() -> None:
    line = (
        "--dp 1 --pp 1 --schedule gpipe --microbatches 2 --steps 3 --batch 5 --layers 6 --heads 7 --width 14"
        " --context 8 --dropout 0.25 --lr 0.5 --seed 9 --text file --dtype float64 --bucket-mb 1.5 --progress lines"
    )
    settings = common.read_settings("", line.split())
    assert settings == Settings(1, 1, "gpipe", 2, 3, 5, 6, 7, 14, 8, 0.25, 0.5, 9, "file", "float64", 1.5, "lines")
    assert all(getattr(settings, f.name) != f.default for f in fields(Settings) if f.name not in ("dp", "pp"))


def test_replicas_take_their_own_rows_of_the_global_batch() -> None:
    settings = Settings(dp=3, batch=4)
    rows = [row for dp_rank in range(3) for row in range(settings.global_batch)[settings.rows(dp_rank)]]
    assert rows == list(range(12))


@pytest.mark.parametrize(
    ("change", "world_size", "rule"),
    [
        *[({name: 0}, 1, f"--{name} must be at least 1, got 0") for name in common.COUNTS],
        ({"dp": -2, "pp": -1}, 2, "--dp must be at least 1, got -2"),
        ({"dp": 2, "pp": 2}, 3, "dp * pp must equal the number of ranks, got dp=2, pp=2 and 3 ranks"),
        ({"dp": 2}, 1, "dp * pp must equal the number of ranks, got dp=2, pp=1 and 1 rank"),
        ({"pp": 5}, 5, "--pp must be at most --layers, got 5 and 4"),
        ({"microbatches": 25}, 1, "--microbatches must be at most --batch, got 25 and 24"),
        ({"heads": 3}, 1, "--width must be a multiple of --heads, got 128 and 3"),
        ({"dropout": 1.0}, 1, "--dropout must be at least 0 and below 1, got 1.0"),
        ({"dropout": -0.1}, 1, "--dropout must be at least 0 and below 1, got -0.1"),
        ({"dropout": math.nan}, 1, "--dropout must be at least 0 and below 1, got nan"),
        ({"lr": 0.0}, 1, "--lr must be above 0 and finite, got 0.0"),
        ({"lr": math.inf}, 1, "--lr must be above 0 and finite, got inf"),
        ({"seed": -1}, 1, "--seed must be from 0 to 2**64 - 1, got -1"),
        ({"seed": 2**64}, 1, f"--seed must be from 0 to 2**64 - 1, got {2**64}"),
        ({"bucket_mb": 0.0}, 1, "--bucket-mb must be above 0 and finite, got 0.0"),
        ({"bucket_mb": math.inf}, 1, "--bucket-mb must be above 0 and finite, got inf"),
        ({"schedule": "zigzag"}, 1, f"--schedule must be one of {', '.join(common.SCHEDULES)}, got zigzag"),
        ({"dtype": "int8"}, 1, "--dtype must be one of float32, float64, got int8"),
        ({"progress": "pie"}, 1, "--progress must be one of auto, bar, lines, got pie"),
    ],
)
def test_broken_rules_are_named_with_their_values(change: dict[str, object], world_size: int, rule: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
        common.check(replace(Settings(), **change), world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_schedule_and_microbatches_are_allowed_with_and_without_a_pipeline(world_size: int) -> None:
    common.check(Settings(pp=world_size, schedule="gpipe", microbatches=24), world_size)


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, 3),
        ({"PMI_SIZE": "4"}, 4),
        ({"SLURM_STEP_NUM_TASKS": "5", "SLURM_NTASKS": "7"}, 5),
        ({"SLURM_NTASKS": "7"}, 1),
    ],
)
def test_launcher_size(environ: dict[str, str], size: int) -> None:
    assert common.launcher_size(environ) == size


def run_as_rank(rank: int, size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script that reads its settings and its text, as Open MPI would start it."""
    program = (
        "import sys, common; common.GRACE_SECONDS = 0.0; sys.argv[0] = 'train.py'; "
        "common.read_text(common.read_settings('Teaches.')); print('ready')"
    )
    environ = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
    }
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--dp 3", "dp * pp must equal the number of ranks, got dp=3, pp=1 and 2 ranks"),
        ("--dp 2 --steps many", "argument --steps: invalid int value: 'many'"),
        ("--dp 2 --step 3", "unrecognized arguments: --step 3"),
    ],
)
def test_wrong_command_line_is_one_line_from_one_rank(arguments: str, line: str) -> None:
    for rank, expected in ((0, f"train.py: {line}\n"), (1, "")):
        result = run_as_rank(rank, 2, *arguments.split())
        assert (result.returncode, result.stdout, result.stderr) == (2, "", expected)


def test_unreadable_text_is_one_line_and_a_lone_rank_says_so_too() -> None:
    line = "train.py: --text must be a file that can be read, got gone: No such file or directory\n"
    for rank, expected in ((0, line), (1, f"[rank 1] {line}")):
        result = run_as_rank(rank, 2, "--dp", "2", "--text", "gone")
        assert (result.returncode, result.stdout, result.stderr) == (2, "", expected)


def test_help_teaches_every_flag_once() -> None:
    result = run_as_rank(0, 2, "--help")
    assert result.returncode == 0
    assert "Teaches." in result.stdout
    for f in fields(Settings):
        assert result.stdout.count(f"\n  --{f.name.replace('_', '-')} ") == 1
    result = run_as_rank(1, 2, "--help")
    assert (result.returncode, result.stdout) == (0, "")


def test_right_command_line_goes_on() -> None:
    result = run_as_rank(1, 4, "--dp", "2", "--pp", "2")
    assert (result.returncode, result.stdout, result.stderr) == (0, "ready\n", "")


# ---- the view -------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, settings: Settings, *, visible: bool = True) -> str:
    with Progress(settings, visible=visible, stream=stream) as progress:
        for step in range(settings.steps):
            progress.update(loss=2.0 - step / settings.steps)
    return stream.getvalue()


@pytest.mark.parametrize(("steps", "lines"), [(1, 1), (7, 7), (20, 20), (33, 20), (1000, 20)])
def test_at_most_twenty_lines_where_there_is_no_terminal(steps: int, lines: int) -> None:
    output = shown(io.StringIO(), Settings(steps=steps)).splitlines()
    assert len(output) == lines
    assert output[-1].startswith(f"step {steps}/{steps}, 00:00 left, loss {1 + 1 / steps:.3f}, ")
    assert output[-1].endswith(" tokens/s")


def test_speed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 102.0, 104.0])
    monkeypatch.setattr(common.time, "perf_counter", lambda: next(clock))
    progress = Progress(Settings(steps=60, dp=2, batch=3, context=10), visible=True, stream=(stream := io.StringIO()))
    for _ in range(2):
        progress.update(loss=1.0)
    assert stream.getvalue() == ""
    monkeypatch.setattr(common.time, "perf_counter", lambda: 106.0)
    progress.update(loss=1.0)
    assert stream.getvalue() == "step 3/60, 01:54 left, loss 1.000, 30 tokens/s\n"


@pytest.mark.parametrize(
    ("make_stream", "choice", "is_bar"),
    [
        (Terminal, "auto", True),
        (io.StringIO, "auto", False),
        (Terminal, "lines", False),
        (io.StringIO, "bar", True),
    ],
)
def test_bar_or_lines(make_stream: Callable[[], io.StringIO], choice: str, is_bar: bool) -> None:
    output = shown(make_stream(), Settings(steps=3, progress=choice))
    assert ("\r" in output) == is_bar
    assert output.count("\n") == (1 if is_bar else 3)
    for part in ("step 3/3", "00:00 left", "loss 1.333", "tokens/s"):
        assert part in output


@pytest.mark.parametrize("choice", ["auto", "bar", "lines"])
def test_other_ranks_are_silent(choice: str) -> None:
    assert shown(Terminal(), Settings(steps=3, progress=choice), visible=False) == ""
