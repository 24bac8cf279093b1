"""The command line of the example scripts."""

import math
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from common.settings import COUNTS, SCHEDULES, Settings, check, launcher_size, read_settings

ROOT = Path(__file__).parent.parent


def test_defaults_fit_one_rank() -> None:
    check(Settings(), 1)


def test_each_flag_sets_its_field() -> None:
    line = (
        "--dp 1 --pp 1 --schedule gpipe --microbatches 2 --steps 3 --batch 5 --layers 6 --heads 7 --width 14"
        " --context 8 --dropout 0.25 --lr 0.5 --seed 9 --text file --device cuda --dtype float64"
        " --bucket-mb 1.5 --progress lines --trace steps.json"
    )
    settings = read_settings("", line.split())
    assert settings == Settings(
        1, 1, "gpipe", 2, 3, 5, 6, 7, 14, 8, 0.25, 0.5, 9, "file", "cuda", "float64", 1.5, "lines", "steps.json"
    )
    assert all(getattr(settings, f.name) != f.default for f in fields(Settings) if f.name not in ("dp", "pp"))


@pytest.mark.parametrize("batch", [3, 12, 13, 14])
def test_replicas_share_the_rows_of_the_batch(batch: int) -> None:
    settings = Settings(dp=3, batch=batch)
    rows = [range(batch)[settings.rows(dp_rank)] for dp_rank in range(3)]
    assert [row for part in rows for row in part] == list(range(batch))
    assert max(map(len, rows)) - min(map(len, rows)) <= 1


def test_only_a_pipeline_cuts_its_batch() -> None:
    assert Settings(pp=1, microbatches=8).num_microbatches == 1
    assert Settings(pp=2, microbatches=8).num_microbatches == 8


@pytest.mark.parametrize(
    ("change", "world_size", "rule"),
    [
        *[({name: 0}, 1, f"--{name} must be at least 1, got 0") for name in COUNTS],
        ({"dp": -2, "pp": -1}, 2, "--dp must be at least 1, got -2"),
        ({"dp": 2, "pp": 2}, 3, "dp * pp must equal the number of ranks, got dp=2, pp=2 and 3 ranks"),
        ({"dp": 2}, 1, "dp * pp must equal the number of ranks, got dp=2, pp=1 and 1 rank"),
        ({"pp": 5}, 5, "--pp must be at most --layers, got 5 and 4"),
        (
            {"dp": 2, "pp": 2, "microbatches": 25},
            4,
            "--batch must hold a sequence for each of the dp * microbatches parts, got 48 for 2 * 25",
        ),
        ({"dp": 49}, 49, "--batch must hold a sequence for each of the dp * microbatches parts, got 48 for 49 * 1"),
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
        ({"schedule": "zigzag"}, 1, f"--schedule must be one of {', '.join(SCHEDULES)}, got zigzag"),
        ({"device": "tpu"}, 1, "--device must be one of cpu, cuda, got tpu"),
        ({"dtype": "int8"}, 1, "--dtype must be one of float32, float64, got int8"),
        ({"progress": "pie"}, 1, "--progress must be one of auto, bar, lines, got pie"),
    ],
)
def test_broken_rules_are_named_with_their_values(change: dict[str, object], world_size: int, rule: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
        check(replace(Settings(), **change), world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_schedule_and_microbatches_are_allowed_with_and_without_a_pipeline(world_size: int) -> None:
    check(Settings(pp=world_size, schedule="gpipe", microbatches=24), world_size)


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
    assert launcher_size(environ) == size


def run_as_rank(rank: int, size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script that reads its settings and its text, as Open MPI would start it."""
    program = (
        "from common import settings; import sys; settings.GRACE_SECONDS = 0.0; sys.argv[0] = 'train.py'; "
        "settings.read_text(settings.read_settings('Teaches.')); print('ready')"
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
