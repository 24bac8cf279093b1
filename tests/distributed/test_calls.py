"""Ranks that make different collectives: the same error on all of them, which names both calls and their lines.

Threads compare their calls always, processes where they are asked to.
"""

import re
import time

import numpy as np
import pytest
from jobs import needs_mpirun, run_job

from distributed import DistributedDataParallel, ReduceOp, launched_by_mpi
from distributed.comm.calls import Call, call_site, describe_mismatch
from distributed.data_parallel.buckets.manager import GradientBucketManager
from minigrad import backward_with_hooks
from minigrad.models import MLP

under_mpirun = pytest.mark.skipif(not launched_by_mpi(), reason="about processes")
HERE = r"\(.*test_calls\.py:\d+\)"


def test_a_call_is_described():
    assert str(Call("barrier")) == "barrier"
    assert str(Call("allreduce", np.zeros((2, 3), np.float32), ReduceOp.SUM)) == "allreduce of float32[2, 3] by SUM"


def test_the_line_that_calls_is_the_users_own():
    assert re.fullmatch(r".*test_calls\.py:\d+", call_site())


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ({0: ("barrier", "a:1"), 1: ("barrier", "b:2")}, None),
        ({0: ("split", "a:1")}, None),
        (
            {2: ("barrier", "c:3"), 0: ("split", "a:1"), 1: ("split", "b:2")},
            "for collective #7 among ranks [1, 3, 5] rank 0 calls split (a:1) and rank 2 calls barrier (c:3)",
        ),
    ],
)
def test_a_mismatch_names_the_first_two_that_differ(calls, found):
    message = describe_mismatch(7, calls, " among ranks [1, 3, 5]")
    rule = "all ranks must call the same collectives in the same order, but "
    assert message == (found and rule + found)


def about_a_bucket(comm):
    with comm.calls_about("bucket 1"):
        return comm.allreduce(np.zeros(3))


CALLS = {
    "allreduce of float64[3] by SUM": lambda comm: comm.allreduce(np.zeros(3)),
    "allreduce of float64[3] by SUM for bucket 1": about_a_bucket,
    "allreduce of float64[5] by SUM": lambda comm: comm.allreduce(np.zeros(5)),
    "allreduce of float32[3] by SUM": lambda comm: comm.allreduce(np.zeros(3, np.float32)),
    "allreduce of float64[3] by MAX": lambda comm: comm.allreduce(np.zeros(3), op=ReduceOp.MAX),
    "reduce_scatter of float64[12] by MEAN": lambda comm: comm.reduce_scatter(np.zeros(12), op=ReduceOp.MEAN),
    "broadcast of float64[3] from 0": lambda comm: comm.broadcast(np.zeros(3)),
    "broadcast of float64[3] from 1": lambda comm: comm.broadcast(np.zeros(3), root=1),
    "allgather of float64[3]": lambda comm: comm.allgather(np.zeros(3)),
    "allgather of float64[1, 3]": lambda comm: comm.allgather(np.zeros((1, 3))),
    "all_to_all of float64[SIZE]": lambda comm: comm.all_to_all(np.zeros(comm.size)),
    "barrier": lambda comm: comm.barrier(),
    "split": lambda comm: comm.split(0),
    "gather_objects": lambda comm: comm.gather_objects(None),
}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("second", CALLS)
@pytest.mark.parametrize("first", ["allreduce of float64[3] by SUM", "barrier", "gather_objects"])
def test_different_calls_are_one_error_on_every_rank(ranks, first, second):
    if first == second:
        pytest.skip("the same call")

    def program(comm):
        if launched_by_mpi():
            comm = checked(comm)
        comm.barrier()
        last = comm.rank == comm.size - 1
        rule = (
            "all ranks must call the same collectives in the same order, but for collective #1 "
            f"rank 0 calls {first} HERE and rank {comm.size - 1} calls {second.replace('SIZE', str(comm.size))} HERE"
        )

        def call():
            work = CALLS[second if last else first](comm)
            work.wait()  # of what does not block by itself

        # Threads need not wait for rank 0 to see that two others differ.
        found = re.escape(rule).replace("HERE", HERE).replace(r"\ 0\ calls", rf"\ [0-{comm.size - 2}]\ calls")
        with pytest.raises(RuntimeError, match=found + "$"):
            call()

    ranks.run(program)


@pytest.mark.ranks(2, 3)
def test_an_average_on_one_rank_alone_is_named(ranks):
    """Half the loss, and then a message cut short somewhere else, is what MPI makes of it."""

    def program(comm):
        if launched_by_mpi():
            comm = checked(comm)
        ddp = DistributedDataParallel(MLP([3, 2]), comm)
        rule = (
            r"rank 0 calls allreduce of float64\[1\] by SUM \(.*test_calls\.py:\d+, in DistributedDataParallel\.mean\) "
            r"and rank \d calls allgather of float64\[2\] \(.*test_calls\.py:\d+, in DistributedDataParallel\.\w+\)"
        )

        def step():
            if comm.rank == 0:
                ddp.mean(1.0)
            ddp.hooks(num_samples=4)

        with pytest.raises(RuntimeError, match=rule):
            step()

    ranks.run(program)


@pytest.mark.ranks(2, 3)
def test_ranks_that_reduce_as_many_gradients_of_something_else_are_named_with_the_parameter(ranks):
    """Sums of one layer's gradients on a rank and another's on the next are finite, and nobody would notice."""

    def program(comm):
        if launched_by_mpi():
            comm = checked(comm)
        layout = [("up.weight", 4, np.float32), ("down.weight", 4, np.float32)]
        last = comm.rank == comm.size - 1
        manager = GradientBucketManager(layout[::-1] if last else layout, comm, bucket_bytes=1)
        manager.reset()
        bucket = (
            r"calls allreduce of float32\[4\] by SUM for bucket 0 of 2, {}\.weight \.\.\. \(.*test_calls\.py:\d+, .*\)"
        )
        rule = rf"rank \d {bucket.format('(down|up)')} and rank \d {bucket.format('(down|up)')}$"

        def step():
            for name, _, _ in reversed(layout):
                manager.mark_ready(name)
            manager.wait()

        with pytest.raises(RuntimeError, match=rule):
            step()

    ranks.run(program)


@pytest.mark.ranks(2)
def test_a_backward_on_one_rank_alone_is_named_with_the_bucket(ranks):
    def program(comm):
        if launched_by_mpi():
            comm = checked(comm)
        model = MLP([3, 2])
        ddp = DistributedDataParallel(model, comm)

        def step():
            hooks = ddp.hooks(num_samples=2)
            if comm.rank == 0:
                ddp.mean(1.0)
            backward_with_hooks(model(np.ones((2, 3), np.float32)).sum(), hooks)
            ddp.wait()

        with pytest.raises(
            RuntimeError, match=r"by SUM for bucket 0 of 1, fc0\.bias \.\.\. \(.*test_calls\.py:\d+, .*\)"
        ):
            step()

    ranks.run(program)


def checked(comm, **settings):
    """Make a communicator whose ranks compare their calls, so that the tests' own is not the one that fails."""
    from mpi4py import MPI

    from distributed.comm.mpi.communicator import MPICommunicator
    from distributed.comm.settings import Settings

    return MPICommunicator(MPI.COMM_WORLD.Dup, Settings(check_collectives=True, timeout_seconds=30, **settings))


@under_mpirun
@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"progress_thread": True}])
def test_calls_under_way_are_compared_in_order(ranks, settings):
    def program(comm):
        comm = checked(comm, **settings)
        window = comm.buffer(40, np.float64)
        window[:] = 1
        arrays = [np.full(1 + 100 * i, i + comm.rank, np.float64) for i in range(30)]
        works = [comm.allreduce(array) for array in arrays] + [
            comm.allreduce(window[4 * i : 4 * i + 4]) for i in range(10)
        ]
        works += [comm.broadcast(np.full(3, float(comm.rank)), root=comm.size - 1), comm.allgather(np.array(comm.rank))]
        if comm.rank % 2:
            time.sleep(0.01)
        for i in np.random.default_rng(comm.rank).permutation(len(works)):  # another order on each rank
            works[i].wait()
        for i, array in enumerate(arrays):
            assert (array == comm.size * i + comm.size * (comm.size - 1) / 2).all()
        assert (window == comm.size).all()
        assert works[-1].wait().tolist() == list(range(comm.size))

    ranks.run(program)


@under_mpirun
def test_after_a_mismatch_every_call_fails(ranks):
    def program(comm):
        comm = checked(comm)
        if comm.size == 1:
            return
        for _ in range(2):  # the second is the same on all ranks, but which they meet is not known any more
            with pytest.raises(RuntimeError, match=r"collective #0 rank 0 calls barrier \(.* and rank 1 calls split"):
                comm.split(0) if comm.rank else comm.barrier()

    ranks.run(program)


@needs_mpirun
@pytest.mark.parametrize(
    "how", ["argument", pytest.param("environment", marks=pytest.mark.long), "environment of one rank"]
)
def test_a_users_script_ends_with_both_lines(tmp_path, monkeypatch, how):
    monkeypatch.setenv("MINIGRAD_CHECK_COLLECTIVES", "1" if how == "environment" else "0")
    script = tmp_path / "train.py"
    script.write_text(
        "import os\n"
        "import numpy as np\n"
        "from distributed import launcher_rank, world\n"
        f"if launcher_rank() == 1 and {how == 'environment of one rank'}:\n"
        "    os.environ['MINIGRAD_CHECK_COLLECTIVES'] = '1'\n"
        f"comm = world({'check_collectives=True' if how == 'argument' else ''})\n"
        "if comm.rank == 0:\n"
        "    comm.allreduce(np.zeros(3)).wait()\n"
        "comm.barrier()\n"
    )
    result = run_job(["train.py"], ranks=2, cwd=tmp_path)
    assert result.returncode != 0
    rule = "rank 0 calls allreduce of float64[3] by SUM (train.py:8) and rank 1 calls barrier (train.py:9)"
    assert rule in result.stderr
