"""The example whose ranks may die: one is killed from outside, and its lines are those of an undisturbed run."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import HELD, ROOT, environ, killed_after, survives_deaths

from common.settings import RecoverySettings
from distributed.run import read_flags

NUM_STEPS = 80
HELD_AT = 40  # until the kill has come, however late its moment is seen
LIMIT_SECONDS = 120
SMALL = ["--steps", f"{NUM_STEPS}", "--batch", "8", "--layers", "1", "--width", "16", "--context", "16"]


@pytest.mark.long
@pytest.mark.skipif(not survives_deaths(), reason="needs Open MPI with ULFM")
def test_the_loss_goes_on_as_if_nothing_had_happened(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    undisturbed, _ = run(tmp_path_factory.mktemp("undisturbed"), kill_after=None)
    steps, deaths = run(tmp_path, kill_after=2)
    assert steps == undisturbed
    assert [int(line.split()[1][:-1]) for line in steps] == list(range(1, NUM_STEPS + 1))
    said, healed = deaths
    assert said == "rank 1 died: a new rank takes its place"
    assert re.fullmatch(r"rank 1 died, healed in \d+\.\d s: 2 ranks go on after step \d+, from a living rank", healed)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--step 3", "unrecognized arguments: --step 3; is it --steps?"),
        ("--width 65", "--width must be a multiple of --heads, got 65 and 4"),
        ("--spares 1", "--spares are for --heal shrink and spares, got 1 and --heal replace"),
        ("--spares 2 --heal shrink", "--spares must leave a rank that trains, got 2 of 2"),
        ("--batch 1", "--batch must hold a sample for each of 2 ranks, got 1"),
        ("--heal no", "--heal must be one of replace, shrink, spares, got no"),
    ],
)
def test_wrong_flags_are_one_line(
    arguments: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # They were a traceback with exit code 1, or taken: no steps, spares that nobody would ever need.
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["gpt_recovery.py"])
    with pytest.raises(SystemExit) as end:
        read_flags(RecoverySettings, None, arguments.split())
    assert (end.value.code, capsys.readouterr().err) == (2, f"gpt_recovery.py: {line}\n")


def run(folder: Path, kill_after: int | None) -> tuple[list[str], list[str]]:
    """Run the example on two ranks; return the lines of its steps, and what it says of deaths.

    Rank 1 is killed when its number and the line of a step are there, whichever comes first: each rank has a terminal
    of its own, and a busy launcher reads them in any order.
    """
    killed = folder / "killed"
    if kill_after is None:
        killed.touch()
    held = [HELD, str(HELD_AT), str(killed), str(ROOT / "examples" / "gpt_recovery.py")]
    command = [sys.executable, "-m", "distributed.recovery", "-n", "2", *held, *SMALL]
    lines: list[str] = []
    with subprocess.Popen(command, env=environ(), stdout=subprocess.PIPE, text=True, start_new_session=True) as job:
        assert job.stdout is not None
        with killed_after(LIMIT_SECONDS, job):
            for line in job.stdout:
                lines.append(line.replace("\0", "").strip())
                pids = [found[1] for each in lines if (found := re.fullmatch(r"rank 1 is process (\d+)", each))]
                if pids and not killed.exists() and any(each.startswith(f"step {kill_after}:") for each in lines):
                    os.kill(int(pids[0]), signal.SIGKILL)
                    killed.touch()
    assert job.returncode == 0, lines
    return [line for line in lines if line.startswith("step ")], [line for line in lines if " died" in line]
