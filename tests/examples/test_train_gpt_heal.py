"""train_gpt.py with --heal: rank 0 is killed in the midst of a run, and the run is that of nobody killed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import HELD, LIGHTLY, ROOT, metrics_of, run_job, start, survives_deaths, write_text

import train_gpt
from common.train_gpt_settings import TrainSettings
from minigrad.models import gpt
from pipeline import SCHEDULES

NUM_STEPS = 100
HELD_AT = 50  # until the kill has come, however late its moment is seen
LIMIT_SECONDS = 120
SIZES = f"--steps {NUM_STEPS} --layers 2 --heads 2 --width 16 --context 16 --batch 12 --dropout 0.1"
SCRIPT = str(ROOT / "examples" / "train_gpt.py")
IN_TESTS = [LIGHTLY, "train_gpt"]


def layouts(dp: int, pp: int, microbatches: int, num_ranks: int, *, exact: bool = False) -> tuple[int, int, int]:
    settings = TrainSettings(dp=dp, pp=pp, microbatches=microbatches, exact=exact)
    return settings.layout(num_ranks)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_spare_rehearses_a_step_of_any_schedule(schedule: str) -> None:
    """Of one block, whatever the schedule: those with two stages on a rank could not be cut from it."""
    settings = TrainSettings(dp=2, pp=2, schedule=schedule, microbatches=4, heal="spares", spares=1, context=4, width=4)
    config = gpt.GPTConfig(context=4, num_layers=4, num_heads=1, width=4)
    train_gpt.rehearse(settings, config, np.zeros(400, np.int64))


def test_a_layout_for_those_that_are_left_keeps_the_step() -> None:
    assert layouts(2, 2, 4, 4) == (2, 2, 4)
    assert layouts(2, 2, 4, 3) == (1, 2, 4)
    assert layouts(2, 4, 4, 3) == (1, 3, 4)
    assert layouts(4, 1, 2, 3) == (3, 1, 2)
    assert layouts(4, 1, 2, 3, exact=True) == (2, 1, 4)  # as many micro-batches: 3 replicas cannot share 8
    assert layouts(3, 1, 1, 2, exact=True) == (1, 1, 3)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    """What an undisturbed run of one process prints, and the loss of each of its steps."""
    folder = tmp_path_factory.mktemp("alone")
    flags = [*SIZES.split(), "--exact", "--text", str(write_text(folder)), "--microbatches", "4", "--run", "alone"]
    result = run_job([*IN_TESTS, *flags], ranks=None, cwd=folder)
    assert result.returncode == 0, result.stderr
    return result.stdout, [line["loss"] for line in metrics_of(folder / "alone")]


@pytest.mark.skipif(not survives_deaths(), reason="needs Open MPI with ULFM")
@pytest.mark.long
@pytest.mark.parametrize(
    ("flags_of_it", "num_ranks", "follows", "script"),
    [
        ("--heal replace", 2, "a new rank takes its place", [SCRIPT]),
        ("--heal spares --spares 1", 3, "a spare takes its place if one is left", IN_TESTS),
        ("--heal shrink --pp 2", 4, "the others go on without it", IN_TESTS),  # one that trained waits
    ],
)
def test_a_healed_run_has_each_step_once_and_the_weights_of_an_undisturbed_one(
    flags_of_it: str, num_ranks: int, follows: str, script: list[str], alone: tuple[str, list[float]], tmp_path: Path
) -> None:
    """With exact sums there is one hash for every layout, so also for one process, and for a run that changed it.

    It saves before the kill and after it.
    """
    flags = [*SIZES.split(), "--save-every", "3", "--exact", "--text", str(write_text(tmp_path))]
    flags += ["--dp", "2", "--microbatches", "2", *flags_of_it.split(), "--run", "healed", "--progress", "lines"]
    code, output, errors = kill_in([*script, *flags], tmp_path, num_ranks=num_ranks)
    assert code == 0, errors
    lines = metrics_of(tmp_path / "healed")
    check_same(output, lines, alone)
    assert [line["redone_steps"] for line in lines if "redone_steps" in line] == [0]
    assert len(set(re.findall(r"kill -TERM (\d+) saves", output))) == 2  # of rank 0, then of who took its place
    assert f"rank 0 died: {follows}\n" in errors
    healed = r"rank 0 died, healed in \d+\.\d s: 2 ranks go on after step \d+, from a living rank\n"
    assert re.search(healed, errors)
    names = {path.name for path in (tmp_path / "healed").iterdir()}
    assert {"summary.json", "checkpoints"} <= names
    assert ("loss.png" in names) == (script is not IN_TESTS)
    assert (tmp_path / "healed" / "checkpoints" / f"step-{NUM_STEPS:08d}").is_dir()


@pytest.mark.skipif(not survives_deaths(), reason="needs Open MPI with ULFM")
@pytest.mark.long
def test_a_run_whose_every_process_is_killed_goes_on_from_its_checkpoint(
    alone: tuple[str, list[float]], tmp_path: Path
) -> None:
    flags = [*SIZES.split(), "--save-every", "20", "--exact", "--text", str(write_text(tmp_path))]
    flags += ["--dp", "2", "--microbatches", "2", "--heal", "replace", "--run", "healed"]
    code, output, errors = kill_in([*IN_TESTS, *flags], tmp_path, whom="mpirun", after=21)
    assert code == 0, errors
    check_same(output, metrics_of(tmp_path / "healed"), alone)
    assert re.search(r"the job was lost after \d+ steps? \(mpirun died of SIGKILL\): all ranks start again\n", errors)
    again = r"2 ranks go on after step (20|40|60|80), from the last checkpoint(, \d+ steps? (is|are) done again)?\n"
    assert re.search(again, errors), errors


def check_same(output: str, healed: list[dict[str, Any]], alone: tuple[str, list[float]]) -> None:
    """Check that a healed run has the other one's weights, and a line for each step with the other one's loss."""
    assert weights(output) == weights(alone[0])
    assert [line["step"] for line in healed] == list(range(NUM_STEPS))
    assert [line["loss"] for line in healed] == alone[1]


def weights(output: str) -> str:
    (found,) = re.findall(r"^weights (\w{64})$", output, re.MULTILINE)
    return found


def kill_in(
    command: list[str], folder: Path, *, num_ranks: int = 2, whom: str = "rank 0", after: int = 4
) -> tuple[int, str, str]:
    """Run a job, and kill something after so many steps; return its exit code and what it says."""
    held = [HELD, str(HELD_AT), str(folder / "killed"), *command]
    launch = [sys.executable, "-m", "distributed.recovery", "-n", str(num_ranks), *held]
    metrics, pid, saved = (folder / "healed" / name for name in ("metrics.jsonl", "pid", "checkpoints/latest"))
    with start(launch, folder) as job:
        end = time.monotonic() + LIMIT_SECONDS
        while job.poll() is None and time.monotonic() < end:
            if saved.exists() and metrics.read_bytes().count(b"\n") >= after:
                started = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
                os.kill(int(pid.read_text() if whom == "rank 0" else started[0]), signal.SIGKILL)
                (folder / "killed").touch()
                break
            time.sleep(0.002)
        try:
            output, errors = job.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            job.kill()
            raise
    return job.returncode, output, errors
