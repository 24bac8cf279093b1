"""Which world a process finds itself in, told from a launcher's environment."""

import re
import subprocess
import sys

import pytest

from distributed import LocalWorld, SoloCommunicator, describe, launched_by_mpi, launcher_rank, local_rank, world
from distributed.comm.world import launcher_size

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
