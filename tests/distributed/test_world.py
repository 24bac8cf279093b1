"""Which world a process finds itself in, told from a launcher's environment."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import MPIRUN, environ, needs_mpirun, run_job

from distributed import LocalWorld, SoloCommunicator, describe, launched_by_mpi, launcher_rank, local_rank, world
from distributed.comm.world import launcher_size

OWN_OPEN_MPI = Path(sys.prefix) / "setup-openmpi.stamp"  # what `make setup` leaves
LAUNCHED = [
    ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3"}, 3),
    ({"PMI_SIZE": "4", "PMI_RANK": "2"}, 2),
    ({"PMIX_RANK": "1", "SLURM_PROCID": "1"}, 1),
    ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}, 2),
    ({"OMPI_COMM_WORLD_RANK": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, 1),  # mpirun inside srun
]
ALONE = [
    {},
    {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script, which is not a rank
    {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # an interactive shell
]


@pytest.mark.parametrize(("environ", "rank"), LAUNCHED)
def test_launchers_are_recognised(environ, rank):
    assert launched_by_mpi(environ)
    assert launcher_rank(environ) == rank


@pytest.mark.parametrize("environ", ALONE)
def test_a_process_without_launcher_is_rank_zero(environ):
    assert not launched_by_mpi(environ)
    assert launcher_rank(environ) == 0


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0"}, 3),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, 4),
        ({"SLURM_STEP_NUM_TASKS": "5", "SLURM_NTASKS": "7", "SLURM_PROCID": "0"}, 5),
        ({"SLURM_NTASKS": "7"}, 1),
        ({"PMIX_RANK": "2"}, None),
    ],
)
def test_launcher_size(environ, size):
    assert launcher_size(environ) == size


def test_world_without_launcher_is_a_single_rank_and_loads_no_mpi():
    assert isinstance(world(synchronous_sends=True), SoloCommunicator)
    script = "import sys, distributed; distributed.world(); sys.exit('mpi4py' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_launcher_rank_is_the_rank_in_the_world(ranks):
    results = ranks.run(lambda comm: (comm.rank, launcher_rank()))
    if launched_by_mpi():
        assert all(rank == launched for rank, launched in results)
    else:
        assert {launched for _, launched in results} == {0}


def test_description_counts_ranks_and_hosts(ranks):
    for text in ranks.run(describe):
        assert text.startswith("1 rank, " if ranks.size == 1 else f"{ranks.size} ranks on ")


def test_description_of_worlds_without_mpi():
    assert re.fullmatch(
        r"1 rank, no MPI, \d+ threads?( and \d+ cores?)?, cpu with \w+ kernels.*", describe(SoloCommunicator())
    )
    lines = LocalWorld(2).run(describe)
    assert lines[0] == lines[1]
    assert lines[0].startswith("2 ranks on 1 host, threads of one process, ")


@pytest.mark.parametrize(
    ("environ", "rank"), [({}, 0), ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 1), ({"SLURM_LOCALID": "3"}, 3)]
)
def test_local_rank(environ, rank):
    assert local_rank(environ) == rank


MPIRUN_2 = {"PMIX_NAMESPACE": "job-1", "PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
HYDRA_2 = {"PMI_FD": "9", "PMI_RANK": "0", "PMI_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "launch", "launched"),
    [
        (MPIRUN_2, "job-1,0,,,,,", False),
        (MPIRUN_2 | {"PMIX_NAMESPACE": "job-2"}, "job-1,0,,,,,", True),  # an mpirun that a rank started
        (HYDRA_2, ",,9,,0,,", False),
        (HYDRA_2 | {"PMI_FD": "11"}, ",,9,,0,,", True),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "1", "SLURM_PROCID": "2"}, ",,,,,1,2", False),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "2", "SLURM_PROCID": "2"}, ",,,,,1,2", True),
    ],
)
def test_what_a_rank_starts_is_no_rank(environ, launch, launched):
    rank = 4_194_305  # no process has this number
    assert launched_by_mpi(environ)
    assert launched_by_mpi(environ | {"MINIGRAD_RANK_PROCESS": f"{os.getpid()} {launch}"})  # the rank itself
    assert launched_by_mpi(environ | {"MINIGRAD_RANK_PROCESS": f"{rank} {launch}"}) is launched


def test_mpich_hands_its_ranks_a_socket():
    with socket.socket() as end:
        environ = HYDRA_2 | {"PMI_FD": str(end.fileno())}
        assert launched_by_mpi(environ | {"MINIGRAD_RANK_PROCESS": f"1 ,,{end.fileno()},,0,,"})


@needs_mpirun
def test_a_script_that_a_rank_starts_is_alone_and_harms_nobody(tmp_path):
    """It has the launcher's variables, so it took the rank's place in MPI: both hung. open-mpi/ompi#3158"""
    (tmp_path / "evaluate.py").write_text(
        "from distributed import launcher_rank, world\n"
        "comm = world(timeout_seconds=100)\n"
        "comm.barrier()\n"
        "print('evaluated on', comm.size, 'as', launcher_rank(), flush=True)\n"
    )
    (tmp_path / "train.py").write_text(
        "import multiprocessing, subprocess, sys\n"
        "from distributed import world\n"
        "comm = world(timeout_seconds=120)\n"
        "if comm.rank == 1:\n"
        "    subprocess.run([sys.executable, 'evaluate.py'], check=True, timeout=100)\n"
        "    fork = multiprocessing.get_context('fork')\n"
        "    process = fork.Process(target=lambda: print('forked on', world().size, flush=True))\n"
        "    process.start()\n"
        "    process.join()\n"
        "comm.barrier()\n"
        "print('trained', flush=True)\n"
    )
    result = run_job(["train.py"], ranks=2, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["evaluated on 1 as 0", "forked on 1", "trained", "trained"]


@needs_mpirun
def test_a_rank_may_start_a_job_of_its_own(tmp_path):
    (tmp_path / "job.py").write_text(
        "import subprocess, sys\n"
        "from distributed import world\n"
        "comm = world(timeout_seconds=120)\n"
        f"command = [{MPIRUN!r}, '-n', '2', sys.executable, 'job.py', 'inner']\n"
        "if len(sys.argv) == 1:\n"
        "    subprocess.run(command, check=True, timeout=100)\n"
        "comm.barrier()\n"
        "print(*sys.argv[1:], comm.size, flush=True)\n"
    )
    result = run_job(["job.py"], ranks=1, cwd=tmp_path)
    assert sorted(result.stdout.split()) == ["1", "2", "2", "inner", "inner"], result.stderr


@needs_mpirun
def test_a_launcher_of_another_mpi_is_an_error(tmp_path, monkeypatch):
    """Each process would train for itself: every line twice, and exit status 0. mpi4py#155"""
    version = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, check=True).stdout
    if "Open MPI" not in version:
        pytest.skip("MPICH ends such a process itself")
    for name, value in {"PMI_SIZE": "2", "PMI_RANK": "1", "PMI_FD": "9"}.items():  # as MPICH's mpiexec starts it
        monkeypatch.setenv(name, value)
    result = run_job(["-c", "from distributed import world; world()"], ranks=None, cwd=tmp_path)
    assert result.returncode != 0
    rule = (
        r"LaunchError: ranks need the launcher of their own MPI, but a launcher of MPICH's kind \(PMI_SIZE\) "
        r"started 2 ranks and each is alone in Open MPI v\d.*, which mpi4py loads"
    )
    assert re.search(rule, result.stderr)


@pytest.mark.skipif(not OWN_OPEN_MPI.exists(), reason="make setup brought no Open MPI")
def test_more_ranks_than_cores_need_no_flag():
    """As README has it: a line that somebody types, with what `make setup` has written and nothing that make adds."""
    num_ranks = 1 + os.cpu_count()
    env = {name: value for name, value in environ().items() if not name.startswith("PRTE_MCA_")}
    command = [OWN_OPEN_MPI.parent / "bin" / "mpirun", "-n", str(num_ranks), "echo", "here"]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == ["here"] * num_ranks, result.stderr


GOES_AT_ONCE = """
import time
import numpy as np
from distributed import world
comm = world()
from mpi4py import MPI
if comm.rank == 0:
    request = MPI.COMM_WORLD.Isend(np.ones(1 << 19, np.uint8), 1)
    deadline = time.monotonic() + {seconds}
    while not request.Test() and time.monotonic() < deadline:
        pass
    print("gone" if request.Test() else "waits")
comm.barrier()
if comm.rank == 1:
    MPI.COMM_WORLD.Recv(np.empty(1 << 19, np.uint8), 0)
"""


@pytest.mark.skipif(
    not OWN_OPEN_MPI.exists() or sys.platform != "linux", reason="names parts of Open MPI, and Linux's lo"
)
@pytest.mark.parametrize(("limit", "seconds", "said"), [(None, 20, "gone"), ("65536", 0.5, "waits")])
def test_a_message_over_tcp_of_a_bucket_waits_for_no_receive_unless_told_to(limit, seconds, said, monkeypatch):
    for part, value in {"pml": "ob1", "btl": "self,tcp", "btl_tcp_if_include": "lo"}.items():
        monkeypatch.setenv(f"OMPI_MCA_{part}", value)
    if limit is not None:
        monkeypatch.setenv("OMPI_MCA_btl_tcp_eager_limit", limit)
    result = run_job(["-c", GOES_AT_ONCE.format(seconds=seconds)], ranks=2)
    assert result.stdout.split() == [said], result.stderr
