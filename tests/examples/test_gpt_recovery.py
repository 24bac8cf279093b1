"""The example whose ranks may die: one is killed from outside, and its lines are those of an undisturbed run."""

import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from jobs import ROOT, environ, survives_deaths

NUM_STEPS = 80  # the kill must come before the end, however late its moment is seen
SMALL = ["--steps", f"{NUM_STEPS}", "--batch", "8", "--layers", "1", "--width", "16", "--context", "16"]


@pytest.mark.long
@pytest.mark.skipif(not survives_deaths(), reason="needs Open MPI with ULFM")
def test_the_loss_goes_on_as_if_nothing_had_happened() -> None:
    undisturbed, _ = run(kill_after=None)
    steps, recoveries = run(kill_after=2)
    assert steps == undisturbed
    assert [int(line.split()[1][:-1]) for line in steps] == list(range(NUM_STEPS))
    assert len(recoveries) == 1
    assert "source='a living rank'" in recoveries[0]


def run(kill_after: int | None) -> tuple[list[str], list[str]]:
    """Run the example on two ranks; return the lines of its steps, and of its recoveries."""
    command = [sys.executable, "-m", "distributed.recovery", "-n", "2", str(ROOT / "examples" / "gpt_recovery.py")]
    lines: list[str] = []
    with subprocess.Popen(
        [*command, *SMALL], env=environ(), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as job:
        assert job.stdout is not None
        limit = threading.Timer(120, os.killpg, (job.pid, signal.SIGKILL))
        limit.start()
        for line in job.stdout:
            lines.append(line.replace("\0", "").strip())
            if kill_after is not None and lines[-1].startswith(f"step {kill_after}:"):
                (pid,) = (found[1] for each in lines if (found := re.search(r"rank 1 is process (\d+)", each)))
                os.kill(int(pid), signal.SIGKILL)
                kill_after = None
    limit.cancel()
    assert job.returncode == 0, lines
    steps, recoveries = ([line for line in lines if line.startswith(word)] for word in ("step ", "Recovery("))
    return steps, recoveries
