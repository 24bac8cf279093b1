"""Real kills: a run that is shot again and again, at random moments, must end as if nothing had happened."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from jobs import LIGHTLY, MPIRUN, ROOT, environ, metrics_of, needs_mpirun, write_text
from safetensors.numpy import load_file

IN_TESTS = [LIGHTLY, "train_gpt"]
SIZES = "--layers 4 --heads 2 --width 8 --context 8 --batch 12 --dropout 0.1 --dtype float64 --save-every 2 --quiet"
LAYOUTS = {
    "dp": "--dp 2 --pp 1",
    "pp": "--dp 1 --pp 2 --schedule 1f1b --microbatches 3",
    "zbv": "--dp 1 --pp 2 --schedule zbv --microbatches 4",
}
LIMIT_SECONDS = 120.0
LAUNCHER_SECONDS = 30.0  # that it may take to start its ranks, or to see that they are gone

pytestmark = [needs_mpirun, pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")]


class Job:
    """A run on two ranks that goes on, in its folder, where it was killed."""

    def __init__(self, folder: Path, layout: str, *, steps: int, before: Sequence[str] = ()) -> None:
        self.metrics = folder / "metrics.jsonl"
        self._folder = folder
        arguments = [*SIZES.split(), *LAYOUTS[layout].split(), "--steps", str(steps)]
        arguments += ["--text", str(write_text(folder.parent))]
        command = [sys.executable, "-m", "mpi4py", *IN_TESTS, *arguments, "--run", str(folder), "--resume", "auto"]
        assert MPIRUN is not None
        self._log = (folder.parent / f"{folder.name}.log").open("a")
        self.process = subprocess.Popen(
            [*before, MPIRUN, "-n", "2", *command],
            cwd=folder.parent,
            env=environ(),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self) -> int:
        """Wait for the end of all processes; return what the launcher says."""
        deadline = time.monotonic() + LIMIT_SECONDS
        last_seen = time.monotonic()
        while self.process.poll() is None:
            if any(True for _ in self.ranks()):
                last_seen = time.monotonic()
            elif time.monotonic() > last_seen + LAUNCHER_SECONDS:
                self.process.kill()  # Open MPI's may wait for ever for one that died while another came up
            assert time.monotonic() < deadline, "ranks live on after the death of another"
            time.sleep(0.1)  # to look for them takes milliseconds
        while list(self.ranks()):
            assert time.monotonic() < deadline, "ranks live on after their launcher"
            time.sleep(0.1)
        self._log.close()
        return self.process.returncode

    def ranks(self) -> Iterator[int]:
        """Yield the processes of the ranks that are alive."""
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().split(b"\0")
                zombie = b") Z " in (path / "stat").read_bytes()
            except OSError:
                continue  # it has just ended
            if words[0] == sys.executable.encode() and str(self._folder).encode() in words and not zombie:
                yield int(path.name)

    def kill(self, *, all_ranks: bool, choice: random.Random) -> None:
        ranks = list(self.ranks())
        if all_ranks:
            for pid in [self.process.pid, *ranks]:
                _kill(pid)
        elif ranks:
            _kill(choice.choice(ranks))


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it was faster


def curve(folder: Path) -> list[float]:
    lines = metrics_of(folder)
    assert [line["step"] for line in lines] == list(range(len(lines)))
    return [line["loss"] for line in lines]


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Return all tensors of the last checkpoint."""
    last = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
    return {name: array for part in sorted(last.glob("*.safetensors")) for name, array in load_file(part).items()}


def shoot(folder: Path, *, steps: int, num_kills: int, layouts: list[str], seed: int) -> None:
    """Run to the end; up to the last kill, kill one rank or all of them some steps after each start."""
    choice = random.Random(seed)
    sys.stderr.write(f"seed {seed}\n")  # which pytest shows of a test that fails
    for kill in range(num_kills):
        job = Job(folder, layouts[kill % len(layouts)], steps=steps)
        before = _num_lines(job.metrics)
        # Anywhere in the rest of the run that leaves each later kill a step; now and then before the first step.
        target = before + choice.randint(0, max(1, (steps - before) // (num_kills - kill)))
        deadline = time.monotonic() + LIMIT_SECONDS
        while job.process.poll() is None and _num_lines(job.metrics) < target:
            assert time.monotonic() < deadline, "no progress"
            time.sleep(0.0005)
        time.sleep(choice.uniform(0, 0.02))
        job.kill(all_ranks=bool(choice.getrandbits(1)), choice=choice)
        job.wait()
    assert Job(folder, layouts[num_kills % len(layouts)], steps=steps).wait() == 0, _log(folder)


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _log(folder: Path) -> str:
    """Return the end of what a run and its launcher have said."""
    return (folder.parent / f"{folder.name}.log").read_text()[-3000:]


@pytest.mark.long
def test_five_kills_leave_no_trace(tmp_path: Path) -> None:
    assert Job(tmp_path / "undisturbed", "dp", steps=60).wait() == 0, _log(tmp_path / "undisturbed")
    shoot(tmp_path / "shot", steps=60, num_kills=5, layouts=["dp"], seed=time.time_ns())
    assert curve(tmp_path / "shot") == curve(tmp_path / "undisturbed")
    expected = weights(tmp_path / "undisturbed")
    found = weights(tmp_path / "shot")
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    leftovers = [path.name for path in (tmp_path / "shot" / "checkpoints").iterdir()]
    assert sorted(leftovers) == ["latest", "step-00000056", "step-00000058", "step-00000060"]


def test_sigterm_to_one_rank_saves_and_ends_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = Job(folder, "dp", steps=10_000)
    while _num_lines(job.metrics) < 3:
        assert job.process.poll() is None, _log(folder)
        time.sleep(0.01)
    os.kill(max(job.ranks()), signal.SIGTERM)
    assert job.wait() == 0, _log(folder)
    done = len(curve(folder))
    assert (folder / "checkpoints" / "latest").read_text() == f"step-{done:08d}\n"
    assert Job(folder, "pp", steps=done + 3).wait() == 0, _log(folder)
    assert len(curve(folder)) == done + 3


def test_one_ctrl_c_of_make_train_saves_and_ends_the_run(tmp_path: Path) -> None:
    """Open MPI's mpirun alone would kill its ranks in the step that is under way, whatever they do on a signal."""
    launcher = [sys.executable, str(ROOT / "examples" / "common" / "ctrl_c.py")]
    job = Job(tmp_path / "run", "dp", steps=10_000, before=launcher)
    while _num_lines(job.metrics) < 3:
        assert job.process.poll() is None, _log(tmp_path / "run")
        time.sleep(0.01)
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 0, _log(tmp_path / "run")
    done = len(curve(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == f"step-{done:08d}\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 128 + signal.SIGUSR1), (signal.SIGTERM, 143)])
def test_a_signal_that_comes_as_the_launcher_is_started_is_handed_to_it(number: int, code: int) -> None:
    # It ended the process that hands it on, and the run went on alone.
    source = f"""
import signal, subprocess, sys
from common import ctrl_c
start = subprocess.Popen
def start_and_be_told(*command, **how):
    job = start(*command, **how)
    signal.raise_signal({int(number)})
    return job
subprocess.Popen = start_and_be_told
sys.exit(ctrl_c.run(["sleep", "20"]))
"""
    result = subprocess.run([sys.executable, "-c", source], cwd=ROOT / "examples", capture_output=True, timeout=60)
    assert result.returncode == code, result.stderr


@pytest.mark.soak
def test_a_hundred_kills_in_changing_layouts_leave_no_trace(tmp_path: Path) -> None:
    steps = 600
    assert Job(tmp_path / "undisturbed", "dp", steps=steps).wait() == 0, _log(tmp_path / "undisturbed")
    shoot(tmp_path / "shot", steps=steps, num_kills=100, layouts=list(LAYOUTS), seed=time.time_ns())
    np.testing.assert_allclose(curve(tmp_path / "shot"), curve(tmp_path / "undisturbed"), rtol=1e-9)
