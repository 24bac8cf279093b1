"""Every listed value of every flag runs to its end through the script that a person types, and goes on from there.

Starting a job takes longer than a short run of a tiny model, so one job runs many of them, see support/many_runs.py.
"""

import json
from dataclasses import fields
from pathlib import Path

import pytest
from flag_values import listed_values
from jobs import needs_mpirun, run_lines

from common.train_gpt_settings import TrainSettings
from distributed.recovery.attempts import UNHEALED
from distributed.run.flags import flag_of
from pipeline import SCHEDULES

SIZES = "--layers 8 --heads 1 --width 2 --context 2 --batch 8 --quiet --microbatches 4"
LAYOUTS = [(1, 2), (2, 2), (1, 4)]  # dp, pp
TURNS = 2  # layouts in which a schedule runs, one after another: each layout has two thirds of the schedules


def run_all(lines: list[str], folder: Path) -> list[str]:
    """Run command lines in one job, each after the number of ranks that it needs; return what each one warns of."""
    (folder / "squares.txt").write_text(" ".join(str(i * i) for i in range(60)))
    lines = [f"{line} {SIZES} --text squares.txt" for line in lines]
    said, warnings = zip(*run_lines("train_gpt", lines, folder, sample_tokens=2, limit_seconds=240), strict=True)
    assert set(said) == {""}
    return list(warnings)


@pytest.mark.long
@needs_mpirun
def test_every_schedule_runs_to_its_end_and_goes_on_in_another_layout(tmp_path: Path) -> None:
    """A run of each schedule begins in one layout and goes on in the next one, a step in each."""
    warnings = run_all(
        [
            f"{dp * pp} --dp {dp} --pp {pp} --schedule {name} --steps {steps} --run {name} --resume auto"
            for first, name in enumerate(SCHEDULES)
            for steps, (dp, pp) in ((i + 1, LAYOUTS[(first + i) % len(LAYOUTS)]) for i in range(TURNS))
        ],
        tmp_path,
    )
    assert {warning.partition(" finds")[0] for warning in warnings[::TURNS]} == {"--resume auto"}
    assert not any(warnings[i] for i in range(len(warnings)) if i % TURNS)
    losses = set()
    for name in SCHEDULES:
        folder = tmp_path / name
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["steps"] == TURNS
        losses.add(round(summary["validation_loss"], 4))
        assert (folder / "checkpoints" / "latest").read_text() == f"step-{TURNS:08d}\n"
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
    warnings = run_all([f"2 --dp 2 --steps 1 {run} --run run{run.replace(' ', '-')}" for run in runs], tmp_path)
    unhealed = {f"--heal {how}": UNHEALED for how in listed["heal"] if how != "none"}  # under mpirun, as here
    assert {run: warning.strip() for run, warning in zip(runs, warnings, strict=True) if warning} == unhealed
    for run in runs:
        assert (tmp_path / f"run{run.replace(' ', '-')}" / "summary.json").exists()
