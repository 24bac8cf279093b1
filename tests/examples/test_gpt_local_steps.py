"""gpt_local_steps.py, run as a person runs it: what it sends, and that it may end after any step."""

import re
import shlex
from pathlib import Path

import pytest
from flag_values import listed_values
from jobs import ROOT, metrics_of, needs_mpirun, run_job, run_lines, write_text
from safetensors.numpy import load_file

from common.settings import LocalStepsSettings
from distributed.run.flags import flag_of

SCRIPT = ROOT / "examples" / "gpt_local_steps.py"
SMALL = "--seed 1 --lr 0.01 --batch 8 --layers 2 --heads 2 --width 16 --context 16 --text squares.txt"

# The script, where a signal ends it from within: rank 1 gets it in step 4 of 12, between two agreements.
ENDED = f"""
import os, runpy, signal, sys
from distributed.data.batches import TokenBatches
from distributed import world

class Ended(TokenBatches):
    num_taken = 0

    def next(self):
        Ended.num_taken += 1
        if Ended.num_taken == 5 and world().rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().next()

import distributed.data.batches
distributed.data.batches.TokenBatches = Ended
sys.argv = [{str(SCRIPT)!r}, *sys.argv[1:]]
sys.path.insert(0, {str(SCRIPT.parent)!r})
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def losses_of(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics_of(folder)]


def tensors_of(folder: Path) -> dict[str, bytes]:
    """Return all that the last checkpoint has."""
    parts = [load_file(folder / "checkpoints" / "step-00000012" / f"rank-{rank}.safetensors") for rank in range(2)]
    return {name: array.tobytes() for part in parts for name, array in part.items()}


def run_all(lines: list[str], folder: Path) -> None:
    """Run command lines on two ranks, in one job."""
    run_lines("gpt_local_steps", [f"2 {line} --quiet" for line in lines], folder, sample_tokens=2)


@needs_mpirun
def test_every_listed_value_runs_to_its_end(tmp_path: Path) -> None:
    write_text(tmp_path)
    listed = listed_values(LocalStepsSettings)
    assert listed.keys() == {"dtype", "progress", "compress"}
    values = [f"{flag_of(name)} {value}" for name, values in listed.items() for value in values]
    run_all(
        [f"{SMALL} --every 2 --delay 1 --steps 2 --run run-{value.split()[1]} {value}" for value in values], tmp_path
    )
    for value in values:
        assert (tmp_path / f"run-{value.split()[1]}" / "summary.json").exists()


@pytest.mark.long
@needs_mpirun
@pytest.mark.parametrize("way", ["--every 4", "--every 4 --delay 1 --alpha 0.5 --outer-momentum 0.5 --compress none"])
def test_a_run_in_two_parts_is_the_whole_one_bit_by_bit(way: str, tmp_path: Path) -> None:
    write_text(tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    begin = f"{SMALL} --steps 6 --run parts {way}"
    run_all([f"{SMALL} --steps 12 --run whole {way}", begin, "--steps 12 --run parts --resume auto"], tmp_path)
    losses = losses_of(whole)
    assert losses[-1] < losses[0] - 0.3
    assert losses_of(parts) == losses
    assert tensors_of(parts) == tensors_of(whole)


@pytest.mark.long
@needs_mpirun
def test_a_signal_ends_it_between_two_agreements_and_it_goes_on_bit_by_bit(tmp_path: Path) -> None:
    write_text(tmp_path)
    way = shlex.split(f"{SMALL} --every 6 --fragments 2 --delay 2 --compress none --steps 12")
    ended = run_job(["-m", "mpi4py", "-c", ENDED, *way, "--run", "parts"], ranks=2, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "stopped after step 5 as asked" in ended.stdout
    lines = ["2 --run parts --resume auto", " ".join(["2", *way, "--run whole"])]
    (resumed, warned), (whole, _) = run_lines("gpt_local_steps", lines, tmp_path)
    sent, plain = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+) (?:bytes|of gradients)", whole))
    assert plain == pytest.approx(6 * sent, rel=1e-3)
    assert "anew" not in warned
    assert "goes on after step 5" in resumed
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")
    assert tensors_of(tmp_path / "parts") == tensors_of(tmp_path / "whole")
    assert re.findall(r"a rank sent .*", resumed) == re.findall(r"a rank sent .*", whole)
