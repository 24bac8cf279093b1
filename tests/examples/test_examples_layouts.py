"""Every listed value of every flag runs to its end through the script that a person types, and goes on from there.

Starting a job takes longer than a short run of a tiny model, so one job runs many of them, see support/many_runs.py.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest
from flag_values import listed_values
from jobs import ROOT, needs_mpirun, run_job

from common.train_gpt_settings import TrainSettings
from distributed.run.flags import flag_of
from pipeline import SCHEDULES

SIZES = "--layers 8 --heads 1 --width 2 --context 2 --batch 8 --quiet --microbatches 4"
LAYOUTS = [(1, 2), (2, 2), (1, 4)]  # dp, pp
MANY_RUNS = str(ROOT / "tests" / "support" / "many_runs.py")


def run_all(lines: list[str], folder: Path, said: Sequence[str] = ()) -> None:
    """Run command lines in one job, each after the number of ranks that it needs.

    Args:
        said: how each line of stderr begins.
    """
    (folder / "squares.txt").write_text(" ".join(str(i * i) for i in range(60)))
    text = "--text squares.txt"
    (folder / "lines").write_text("".join(f"{line} {SIZES} {text}\n" for line in lines))
    result = run_job(["-m", "mpi4py", MANY_RUNS, "train_gpt", "lines"], ranks=4, cwd=folder, limit_seconds=240)
    assert result.returncode == 0, f"{result.stdout.splitlines()[-1:]}\n{result.stderr}"
    assert len(result.stdout.splitlines()) == len(lines)
    warnings = result.stderr.splitlines()
    assert all(line.startswith(words) for line, words in zip(warnings, said, strict=True)), warnings


@pytest.mark.long
@needs_mpirun
def test_every_schedule_runs_to_its_end_in_every_layout_and_goes_on(tmp_path: Path) -> None:
    """A run of each schedule begins in one layout, and goes on in the next ones, a step in each."""
    run_all(
        [
            f"{dp * pp} --dp {dp} --pp {pp} --schedule {name} --steps {steps} --run {name} --resume auto"
            for name in SCHEDULES
            for steps, (dp, pp) in enumerate(LAYOUTS, start=1)
        ],
        tmp_path,
        said=[f"--resume auto finds nothing to go on with in {name}" for name in SCHEDULES],
    )
    losses = set()
    for name in SCHEDULES:
        folder = tmp_path / name
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["steps"] == len(LAYOUTS)
        losses.add(round(summary["validation_loss"], 4))
        assert (folder / "checkpoints" / "latest").read_text() == f"step-{len(LAYOUTS):08d}\n"
        assert "<rect" in (folder / "timeline.svg").read_text()
    assert len(losses) == 1, "every schedule trains the same model"


@pytest.mark.long
@needs_mpirun
def test_every_listed_value_of_the_other_flags_runs_to_its_end(tmp_path: Path) -> None:
    listed = listed_values(TrainSettings)
    assert {"progress", "dtype", "device"} <= listed.keys()
    del listed["schedule"]  # above
    runs = [f"{flag_of(name)} {value}" for name, values in listed.items() for value in values if value != "cuda"]
    runs.remove("--graph on")  # of a GPU too
    switches = [flag_of(f.name) for f in fields(TrainSettings) if f.default is False and f.name != "quiet"]
    assert {"--exact", "--recompute", "--tensorboard"} <= set(switches)
    runs += switches
    run_all([f"2 --dp 2 --steps 1 {run} --run run{run.replace(' ', '-')}" for run in runs], tmp_path)
    for run in runs:
        assert (tmp_path / f"run{run.replace(' ', '-')}" / "summary.json").exists()
