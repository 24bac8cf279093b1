"""What a start line says, as a table of places and words: no machine is looked at but in the last tests."""

import os
import sys
from types import SimpleNamespace

import pytest

from distributed.comm.topology import RankPlace, blas_threads, describe_places, short_name, this_place
from minigrad import kernels


def place(*cores, host="a", threads=1, device="cpu"):
    return RankPlace(host, frozenset(cores), threads, device)


LINES = [
    ([place(0, 1, threads=2)], "1 rank, MPI 4, 2 threads and 2 cores, cpu"),
    ([place(0)], "1 rank, MPI 4, 1 thread and 1 core, cpu"),
    ([place(0), place(1)], "2 ranks on 1 host, MPI 4, 1 thread and 1 core a rank, cpu"),
    (
        [place(*range(8), host=host, threads=2) for host in "aabb"],
        "4 ranks on 2 hosts, MPI 4, 2 threads and 8 cores a rank, cpu",
    ),
    (
        [place(*range(4), host="a", threads=4), place(0, host="b")],
        "2 ranks on 2 hosts, MPI 4, 1-4 threads and 1-4 cores a rank, cpu",
    ),
    # A system that does not tell cores.
    ([place(threads=8), place(threads=8)], "2 ranks on 1 host, MPI 4, 8 threads a rank, cpu"),
    ([place(0, host="linux"), place(host="mac")], "2 ranks on 2 hosts, MPI 4, 1 thread a rank, cpu"),
    # GPUs.
    ([place(0, device="H100"), place(1, device="H100")], "2 ranks on 1 host, MPI 4, 1 thread and 1 core a rank, H100"),
    (
        [place(0, device="A100"), place(1, device="H100"), place(2, device="A100")],
        "3 ranks on 1 host, MPI 4, 1 thread and 1 core a rank, A100 and H100",
    ),
    # Bound to the same core.
    (
        [place(0)] * 4,
        "4 ranks on 1 host, MPI 4, 1 thread and 1 core a rank, cpu; "
        "warning: 4 ranks share core 0: start with --bind-to none",
    ),
    (
        [place(5), place(5), place(6), place(6), place(6), place(7)],  # the worst place is neither first nor last
        "6 ranks on 1 host, MPI 4, 1 thread and 1 core a rank, cpu; "
        "warning: 3 ranks share core 6: start with --bind-to none",
    ),
    (
        [place(0, host="a"), place(1, host="a"), place(0, host="b"), place(0, host="b")],
        "4 ranks on 2 hosts, MPI 4, 1 thread and 1 core a rank, cpu; "
        "warning: 2 ranks share core 0 of b: start with --bind-to none",
    ),
    ([place(0, host="a"), place(0, host="b")], "2 ranks on 2 hosts, MPI 4, 1 thread and 1 core a rank, cpu"),
    # More threads than cores.
    (
        [place(0, 1, threads=2)] * 4,
        "4 ranks on 1 host, MPI 4, 2 threads and 2 cores a rank, cpu; warning: 8 threads on 2 cores",
    ),
    ([place(0, 1)] * 2, "2 ranks on 1 host, MPI 4, 1 thread and 2 cores a rank, cpu"),
    (
        [place(0, 1, threads=2, host="a"), *[place(0, 1, threads=2, host="b")] * 2],
        "3 ranks on 2 hosts, MPI 4, 2 threads and 2 cores a rank, cpu; warning: 4 threads on 2 cores of b",
    ),
    # One rank's core is among the cores of two others: 3 threads want cores 0 and 1, and the worst place is named.
    (
        [place(0), place(0, 1), place(0, 1)],
        "3 ranks on 1 host, MPI 4, 1 thread and 1-2 cores a rank, cpu; warning: 3 threads on 2 cores",
    ),
    (
        [*[place(0)] * 3, place(0, 1)],
        "4 ranks on 1 host, MPI 4, 1 thread and 1-2 cores a rank, cpu; "
        "warning: 3 ranks share core 0: start with --bind-to none",
    ),
]


@pytest.mark.parametrize(("places", "line"), LINES)
def test_the_line_says_what_ranks_run_on_and_what_is_wrong_with_it(places, line):
    assert describe_places(places, "MPI 4") == line


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({}, 8),
        ({"OPENBLAS_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"MKL_NUM_THREADS": "4"}, 4),
        ({"MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "5"}, 5),
        ({"MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "3"}, 3),
        ({"OPENBLAS_NUM_THREADS": "64"}, 8),  # OpenBLAS starts no more threads than there are cores
        ({"OPENBLAS_NUM_THREADS": "0", "OMP_NUM_THREADS": "3"}, 3),  # 0 says nothing
        ({"OPENBLAS_NUM_THREADS": "", "OMP_NUM_THREADS": "many"}, 8),
        ({"OMP_NUM_THREADS": "4,2"}, 4),  # nested loops have a second number
    ],
)
def test_threads_are_those_that_the_environment_allows(environ, threads):
    assert blas_threads(8, environ) == threads


def test_this_process_has_the_cores_and_threads_that_it_may_use(monkeypatch):
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert this_place("cpu") == RankPlace(os.uname().nodename, frozenset({3, 5}), 2, f"cpu with {kernels.describe()}")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert this_place("cpu").num_threads == 1
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    assert this_place("cpu")[1:] == (frozenset(), 6, f"cpu with {kernels.describe()}")


def test_a_gpu_goes_by_its_own_name(monkeypatch):
    runtime = SimpleNamespace(getDeviceProperties=lambda number: {"name": f"GPU number {number}".encode()})
    fake = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Device=lambda: SimpleNamespace(id=1)))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    assert this_place("cuda").device == f"GPU number 1 with {kernels.describe_gpu()}"


LIBRARIES = {  # what MPI_Get_library_version says -> what the start line says
    "Open MPI v5.0.11, package: Open MPI user@host Distribution, ident: 5.0.11, Jun 1, 2026": "Open MPI v5.0.11",
    "Open MPI v4.1.4rc1, package: Open MPI root@host Distribution, ident: 4.1.4rc1": "Open MPI v4.1.4rc1",
    "MPICH Version:      5.0.2\nMPICH Release date: Mon Oct  6\nMPICH ABI:          17:2:5\n": "MPICH 5.0.2",
    "MPICH Version:\t3.3.2\nMPICH Release date:\tTue Nov 12 21:23:16 CST 2019\n": "MPICH 3.3.2",
    "Intel(R) MPI Library 2021.8 for Linux* OS\n\n": "Intel(R) MPI Library 2021.8",
    "Intel(R) MPI Library 2019 Update 6 for Linux* OS\n": "Intel(R) MPI Library 2019 Update 6",
    "Intel(R) MPI Library 2021.6 for Windows\n": "Intel(R) MPI Library 2021.6",
    "MVAPICH2 Version      :\t2.3.5\nMVAPICH2 Release date :\tMon November 30\n": "MVAPICH2 2.3.5",
    "MVAPICH Version:\t3.0\nMVAPICH Release date:\tFri Feb 16\n": "MVAPICH 3.0",
    "MPI VERSION    : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)\nMPI BUILD INFO : Sun": "CRAY MPICH 8.1.25.17",
    "another MPI 1.0\nwith pages of text": "another MPI 1.0",
    "": "",
}


def test_a_library_has_a_short_name():
    assert {said: short_name(said) for said in LIBRARIES} == LIBRARIES
