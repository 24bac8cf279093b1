"""`python -m minigrad.profiling`: what it notes of a script's calls, and what it prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import ROOT

import minigrad as mg
from minigrad import kernels
from minigrad.optim import SGD, AdamW, Optimizer
from minigrad.profiling.calls import BACKWARD, FORWARD, Kind, Operand, watching
from minigrad.profiling.floors import table

SCRIPT = """
import sys
import numpy as np
import minigrad as mg
from minigrad.optim import AdamW, Optimizer

if __name__ == "__main__":
    w, b = mg.Parameter(np.ones((4, 3), np.float32), "w"), mg.Parameter(np.ones(3, np.float32), "b")
    optimizer = Optimizer([w, b], AdamW(lr=0.1))
    for _ in range(int(sys.argv[1])):
        optimizer.zero_grad()
        mg.backward(mg.gelu(mg.linear(np.ones((5, 4), np.float32), w, b)).sum())
        optimizer.step()
    sys.exit(sys.argv[2] if len(sys.argv) > 2 else 0)
"""


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "minigrad.profiling", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_script_is_run_with_its_arguments_and_its_ops_are_listed(tmp_path: Path) -> None:
    result = run(tmp_path, str(tmp_path / "script.py"), "3")
    assert (result.returncode, result.stderr) == (0, "")
    title, _, *rows, end = result.stdout.splitlines()
    assert "kernels" in title
    listed = {row[:32].strip(): row[32:].split() for row in rows}
    assert {"linear", "gelu", "sum", "the optimizer", "all"} == listed.keys()
    assert listed["all"][2] == "100.0%"
    assert end.endswith("s outside of ops and updates")


def test_how_a_script_ends_is_how_the_command_ends(tmp_path: Path) -> None:
    script = str(tmp_path / "script.py")
    result = run(tmp_path, script, "1", "no luck")
    assert result.returncode == 1
    assert result.stderr == "no luck\n"
    assert "linear" in result.stdout
    result = run(tmp_path, "nowhere.py")
    assert (result.returncode, result.stderr) == (2, "python -m minigrad.profiling: there is no file nowhere.py\n")
    result = run(tmp_path)
    required = "the following arguments are required: script\n"
    assert (result.returncode, result.stderr) == (2, f"python -m minigrad.profiling: {required}")


def test_calls_have_their_bytes_and_products() -> None:
    x, w, b = (mg.Tensor(np.ones(shape, np.float32), requires_grad=True) for shape in ((5, 4), (4, 3), (3,)))
    with watching() as calls:
        for _ in range(2):
            mg.backward(mg.linear(x, w, b).sum())
    forward = Kind("linear", FORWARD, ((5, 4), (4, 3), (3,)))
    assert len(calls.seconds[forward]) == 2
    assert calls.moved[forward] == 4 * (20 + 12 + 3 + 15)
    assert len(calls.seconds[Kind("linear", BACKWARD, ((5, 3),))]) == 6  # of x, w and b
    rows, columns = (Operand(shape, "float32", False) for shape in ((5, 4), (4, 3)))
    g = Operand((5, 3), "float32", False)
    assert calls.products == {
        ("linear", rows, columns): 2,
        ("linear", g, Operand((3, 4), "float32", True)): 2,
        ("linear", Operand((4, 5), "float32", True), g): 2,
    }
    assert any(line.startswith("linear ") for line in table(calls))


@pytest.mark.parametrize(("rule", "passes"), [(AdamW(lr=0.1), 7), (SGD(lr=0.1), 3), (SGD(lr=0.1, momentum=0.9), 5)])
def test_an_update_reads_everything_and_writes_all_but_the_gradient(rule: AdamW | SGD, passes: int) -> None:
    optimizer = Optimizer([mg.Parameter(np.ones(6), "w")], rule)
    with watching() as calls:
        optimizer.step()
    assert list(calls.moved.values()) == [passes * 6 * 8]


def test_a_kernel_that_was_replaced_comes_back_after_an_error_too() -> None:
    before = kernels.kernels_of(np.ones(2)).product
    with pytest.raises(ValueError, match="matmul"), watching():
        mg.matmul(np.ones((2, 3)), np.ones((2, 3)))
    assert kernels.kernels_of(np.ones(2)).product is before
