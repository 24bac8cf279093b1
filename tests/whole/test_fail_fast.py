"""When one rank fails the whole job ends, within seconds, with that rank's own words.

Each test starts a small job of its own, with a limit of time.
"""

import re
import subprocess
import textwrap
import time

import pytest
from jobs import MPIRUN, needs_mpirun, run_job

SLOW_SECONDS = 60  # a job that fails fast takes two or three, on a busy machine some more; others wait for 600


@pytest.fixture
def job(tmp_path):
    """Run a script on two ranks (or, with ranks=None, as a plain process); it must end in seconds."""

    def run(source, *launcher, ranks=2):
        script = tmp_path / "test_script.py"
        script.write_text(textwrap.dedent(source))
        start = time.monotonic()
        result = run_job([*launcher, str(script)], ranks=ranks, cwd=tmp_path)
        assert time.monotonic() - start < SLOW_SECONDS, result.stderr
        return result

    return run


def launched(name, *values):
    """Run a test under both ways to start Python; each value once, the other half of the pairs in `make test-long`."""
    ways = {"python": (), "python -m mpi4py": ("-m", "mpi4py")}
    rows = [
        pytest.param(ways[way], value, id=f"{value}-{way}", marks=[] if (i + j) % 2 else [pytest.mark.long])
        for i, value in enumerate(values)
        for j, way in enumerate(ways)
    ]
    return pytest.mark.parametrize(("launcher", name), rows)


@needs_mpirun
@launched("error", "ValueError", "KeyboardInterrupt")
def test_uncaught_exception_ends_ranks_that_wait(job, launcher, error):
    source = f"""
        import numpy as np
        from distributed import world

        comm = world()
        if comm.rank == 1:
            raise {error}("boom")
        comm.allreduce(np.zeros(1)).wait()
    """
    result = job(source, *launcher)
    assert result.returncode != 0
    assert "[rank 1] Traceback (most recent call last):" in result.stderr
    assert result.stderr.count(f"[rank 1] {error}: boom") == 1
    assert "[rank 0]" not in result.stderr


@needs_mpirun
@launched("where", "data", "forward", "hook")
def test_exception_in_a_training_step_ends_the_job(job, launcher, where):
    source = f"""
        import numpy as np
        import minigrad as mg
        from distributed import DistributedDataParallel, world
        from minigrad.models import MLP

        comm = world()
        model = MLP([3, 5, 2])
        ddp = DistributedDataParallel(model, comm)

        def boom(here):
            if here == {where!r} and step == 1 and comm.rank == 1:
                raise ValueError("boom")

        for step in range(3):
            boom("data")
            hooks = ddp.hooks(num_samples=4)
            boom("forward")
            loss = mg.mean(model(np.ones((4, 3), np.float32)))
            mg.backward_with_hooks(loss, hooks, on_grad_ready=lambda parameter: boom("hook"))
            ddp.wait()
            mg.optim.Optimizer(model.parameters(), mg.optim.SGD(0.1)).zero_grad()
    """
    result = job(source, *launcher)
    assert result.returncode != 0
    assert result.stderr.count("[rank 1] ValueError: boom") == 1
    assert "[rank 0]" not in result.stderr


@needs_mpirun
def test_uncaught_exception_of_a_thread_ends_the_job(job):
    source = """
        import sys, threading
        from distributed import world

        comm = world()
        if comm.rank == 1:
            threading.Thread(target=sys.exit, args=(3,)).start()  # ends that thread alone
            comm.barrier()
            threading.Thread(target=lambda: 1 / 0).start()
        else:
            comm.barrier()
        comm.barrier()
        comm.barrier() if comm.rank == 0 else threading.Event().wait()
    """
    result = job(source)
    assert result.returncode != 0
    assert "[rank 1] ZeroDivisionError" in result.stderr
    assert "SystemExit" not in result.stderr


@needs_mpirun
def test_exception_before_the_world_exists_ends_the_job(job):
    version = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, check=True).stdout
    if "Open MPI" not in version:
        pytest.skip("only Open MPI's mpirun ends a job for a rank that never reached MPI")
    source = """
        import time
        from pathlib import Path
        from distributed import launcher_rank, world

        if launcher_rank() == 1:
            while not Path("starts").exists():
                time.sleep(0.01)
            time.sleep(2)  # a rank that ends while another one connects to mpirun can hang Open MPI 5's own clean-up
            raise FileNotFoundError("no such corpus")  # loading data, say
        Path("starts").touch()
        world().barrier()
    """
    result = job(source)
    assert result.returncode != 0
    assert "FileNotFoundError: no such corpus" in result.stderr


@needs_mpirun
@launched("status", 0, 2)
def test_sys_exit_on_every_rank_keeps_its_status(job, launcher, status):
    result = job(f"import sys; from distributed import world; world().barrier(); sys.exit({status})", *launcher)
    assert result.returncode == status
    assert "Traceback" not in result.stderr
    assert "[rank" not in result.stderr


@needs_mpirun
@pytest.mark.parametrize("launcher", [(), ("-m", "mpi4py")], ids=["python", "python -m mpi4py"])
def test_ranks_that_end_together_abort_nothing(job, launcher):
    """A line about an argument would be followed by fifteen about an abort."""
    source = """
        import sys
        from distributed import exit_together, world

        comm = world()
        if comm.rank == 0:
            print("--dp must be positive", file=sys.stderr)
        exit_together(2)
    """
    result = job(source, *launcher)
    assert result.returncode == 2
    assert result.stderr.startswith("--dp must be positive\n")
    assert "abort" not in result.stderr.lower()
    assert len(result.stderr.splitlines()) < 10


@needs_mpirun
def test_abort_says_rank_and_message(job):
    source = """
        from distributed import world

        comm = world()
        comm.abort("layouts differ\\nfc1.weight") if comm.rank == 1 else comm.barrier()
    """
    result = job(source)
    assert result.returncode == 1
    assert "[rank 1] layouts differ\n[rank 1] fc1.weight\n" in result.stderr


def test_an_abort_that_blocks_is_cut_off(job):
    source = """
        import threading
        from distributed.comm.mpi.abort import JobEnd

        JobEnd(3, lambda status: threading.Event().wait(), limit_seconds=0.1).on_uncaught_exception()
        raise ValueError("boom")
    """
    result = job(source, ranks=None)
    assert result.returncode == 1
    assert "[rank 3] ValueError: boom" in result.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_that_nobody_takes_keeps_no_rank_waiting(job, stream):
    # A flush of what is closed, or of a full disk, raised in the hook: the rank ended by itself, and all others waited.
    source = f"""
        import os, sys
        from distributed.comm.mpi.abort import JobEnd

        JobEnd(3, lambda status: os._exit(40 + status)).on_uncaught_exception()
        sys.{stream}.close()
        raise ValueError("boom")
    """
    result = job(source, ranks=None)
    assert result.returncode == 41
    assert ("[rank 3] ValueError: boom" in result.stderr) == (stream == "stdout")


@needs_mpirun
def test_a_test_that_fails_on_one_rank_ends_the_test_run(job):
    source = """
        def test_fails_on_one_rank(ranks):
            def program(comm):
                assert comm.rank == 0, "boom"
                comm.barrier()

            ranks.run(program)

        def test_without_ranks():
            raise NotImplementedError  # deselected under mpirun
    """
    result = job(source, "-m", "pytest", "-q", "-p", "conftest")
    assert result.returncode != 0
    assert "test_fails_on_one_rank[mpi]" in result.stderr
    assert re.search(r"^\[rank 1\] E +AssertionError: boom", result.stderr, re.MULTILINE)
    assert "NotImplementedError" not in result.stderr
