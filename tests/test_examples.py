"""The example scripts, run as a user runs them, small."""

import json
import re
from pathlib import Path

import pytest
from jobs import needs_mpirun, run_job

SIZES = "--steps 4 --layers 2 --heads 2 --width 16 --context 16 --batch 12"
TINY = f"{SIZES} --dropout 0.1 --dtype float64".split(" ")
SCRIPT = "examples/train_gpt.py"


@pytest.fixture(scope="module")
def one_process() -> str:
    result = run_job([SCRIPT, *TINY], ranks=None)
    assert result.returncode == 0, result.stderr
    return result.stdout


def learned(output: str) -> str:
    """What a run prints of its model: validation loss and sample, without the start line and the speed."""
    return output[output.index("validation loss") :]


def test_it_shows_progress_a_validation_loss_and_a_sample(one_process: str) -> None:
    assert one_process.startswith("1 rank, no MPI: dp=1 pp=1\n")
    assert re.search(r"validation loss \d\.\d{3} nats a byte; a trigram table gets 1\.\d{3}", one_process)
    assert "it writes:\n" in one_process


@needs_mpirun
@pytest.mark.parametrize(
    "layout",
    ["--dp 2", "--pp 2 --microbatches 3", "--dp 2 --pp 2 --schedule gpipe --microbatches 2"],
)
def test_every_layout_trains_the_same_model(one_process: str, layout: str) -> None:
    ranks = 4 if "--dp 2 --pp 2" in layout else 2
    result = run_job(["-m", "mpi4py", SCRIPT, *TINY, *layout.split()], ranks=ranks)
    assert result.returncode == 0, result.stderr
    assert learned(result.stdout) == learned(one_process)


@needs_mpirun
def test_a_trace_shows_the_last_step_on_every_rank(tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    layout = ["--dp", "2", "--pp", "2", "--microbatches", "2", "--steps", "2", "--trace", str(trace)]
    result = run_job(["-m", "mpi4py", SCRIPT, *TINY, *layout], ranks=4)
    assert result.returncode == 0, result.stderr
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    for rank in range(4):
        mine = {event["name"]: event["cat"] for event in events if event["pid"] == rank}
        stage = rank % 2
        assert {name for name, category in mine.items() if category == "compute"} == {
            f"{stage}{kind}{i}" for kind in ("F", "BW") for i in range(2)
        }
        assert any(category.startswith("bucket") for category in mine.values())


@needs_mpirun
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--dp 3", "dp * pp must equal the number of ranks, got dp=3, pp=1 and 2 ranks"),
        ("--pp 2 --layers 1", "--pp must be at most --layers, got 2 and 1"),
        ("--dp 2 --text nowhere.txt", "--text must be a file that can be read, got nowhere.txt"),
        ("--dp 2 --steps many", "argument --steps: invalid int value: 'many'"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(flags: str, line: str) -> None:
    result = run_job(["-m", "mpi4py", SCRIPT, *flags.split()], ranks=2)
    assert result.returncode == 2
    assert len(re.findall(f"^train_gpt.py: {re.escape(line)}", result.stderr, re.MULTILINE)) == 1
    assert "Traceback" not in result.stderr
