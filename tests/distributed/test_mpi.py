"""What MPICommunicator adds to the contract: sums in rank order, limits of time, a progress thread.

The settings of a world cannot be changed once it exists, so each test makes a family of its own over MPI's world.
"""

import re
import time
from functools import reduce
from types import SimpleNamespace

import numpy as np
import pytest
from jobs import needs_mpirun, run_job

from distributed import LocalWorld, ReduceOp, launched_by_mpi, world
from distributed.comm.mpi import roll_call
from distributed.comm.mpi.rank_order import RankOrderReduction

under_mpirun = pytest.mark.skipif(not launched_by_mpi(), reason="about processes")


def make(comm, **settings):
    """Make a communicator of the same ranks with settings of its own."""
    from mpi4py import MPI

    from distributed.comm.mpi.communicator import MPICommunicator
    from distributed.comm.settings import Settings

    return MPICommunicator(MPI.COMM_WORLD.Dup, Settings(**settings))


def hurry(comm, seconds):
    """Let no wait of a communicator, and of those it comes from, last longer than this from now on."""
    comm._engine.timeout_seconds = seconds


def reductions(comm, dtype):
    """Reduce numbers whose sum depends on the order, in every way; return the bytes."""
    values = np.random.default_rng(comm.rank).standard_normal(9973).astype(dtype)
    works = [comm.allreduce(values[:n].copy(), op=op) for n in (9973, 1, 2, 17) for op in ReduceOp]
    padded = values[: 600 * comm.size // comm.size * comm.size].copy()
    works += [comm.reduce_scatter(padded.copy(), op=op) for op in ReduceOp]
    return [works[i].wait().tobytes() for i in np.random.default_rng(comm.rank).permutation(len(works)).argsort()]


@under_mpirun
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_sums_in_rank_order_have_the_bits_of_local_world(ranks, dtype):
    def program(comm):
        ordered = make(comm, deterministic=True)
        found = reductions(ordered, dtype)
        part = ordered.split(0, key=comm.rank)  # a child sums in rank order too
        assert reductions(part, dtype) == found
        assert found == LocalWorld(comm.size).run(reductions, dtype)[comm.rank]

    ranks.run(program)


@under_mpirun
def test_phases_of_dropped_and_late_sums_are_launched_in_order(ranks):
    def program(comm):
        ordered = make(comm, deterministic=True)
        arrays = [np.full(100, float(comm.rank + k)) for k in range(20)]
        works = [ordered.allreduce(array) for array in arrays]
        last = works[-1]
        del works
        junk = [np.full(100, -1.0) for _ in range(100)]
        if comm.rank % 2:
            time.sleep(0.01)
        last.wait()
        ordered.allreduce(np.zeros(1)).wait()  # phases are in order, so all before are over
        for k, array in enumerate(arrays):
            assert (array == comm.size * k + comm.size * (comm.size - 1) / 2).all()
        return len(junk)

    ranks.run(program)


@under_mpirun
def test_a_wait_for_one_message_lets_the_sums_of_others_go_on(ranks):
    def program(comm):
        ordered = make(comm, deterministic=True)
        work = ordered.allreduce(np.ones(1000))  # in several phases
        if comm.rank == 0:
            for source in range(1, comm.size):
                ordered.recv(np.empty(1), source=source, tag=0)  # sent only once the sum is complete
            work.wait()
        else:
            assert (work.wait() == comm.size).all()
            ordered.send(np.ones(1), dest=0, tag=0)

    ranks.run(program)


@under_mpirun
def test_a_wait_too_long_says_who_waits_for_what(ranks):
    def program(comm):
        hasty = make(comm, timeout_seconds=0.2)
        before = (comm.rank - 1) % comm.size
        receive = hasty.irecv(np.empty((2, 3), np.float32), source=before, tag=5)
        rule = (
            f"no rank may wait longer than 0.2 s, but rank {comm.rank} waits for recv from {before} tag 5 of "
            "float32[2, 3], 24 bytes, for stage 1, for micro-batch 7"
        )
        too_long = pytest.raises(TimeoutError, match=re.escape(rule) + "(;|$)")
        with too_long, hasty.waiting_for("stage 1"), hasty.waiting_for(lambda: "micro-batch 7"):
            receive.wait()
        with pytest.raises(TimeoutError, match=r"float32\[2, 3\], 24 bytes(;|$)"):  # no longer in anybody's name
            receive.wait()
        comm.barrier()
        hurry(hasty, 30)  # no more: the other rank may be late
        hasty.isend(np.zeros((2, 3), np.float32), dest=(comm.rank + 1) % comm.size, tag=5)
        receive.wait()

    ranks.run(program)


@under_mpirun
@pytest.mark.ranks(3, 4)
def test_a_wait_in_a_part_names_its_ranks(ranks):
    def program(comm):
        part = make(comm).split(comm.rank % 2)  # where ranks wait for each other
        hurry(part, 0.2)
        rule = f"recv from 0 tag 0 of float64[1], 8 bytes among ranks {list(range(comm.rank % 2, comm.size, 2))}"
        receive = part.irecv(np.empty(1), source=0, tag=0)
        with pytest.raises(TimeoutError, match=re.escape(rule)):
            receive.wait()
        comm.barrier()
        hurry(part, 30)
        if part.rank == 0:
            for dest in range(part.size):
                part.isend(np.empty(1), dest=dest, tag=0)
        receive.wait()
        comm.barrier()

    ranks.run(program)


@under_mpirun
@pytest.mark.parametrize("call", ["barrier", "split", "gather_objects"])
def test_calls_that_block_are_limited_too(ranks, call):
    def program(comm):
        hasty = make(comm, timeout_seconds=0.2)
        late = comm.rank == comm.size - 1
        ask = {
            "barrier": hasty.barrier,
            "split": lambda: hasty.split(0),
            "gather_objects": lambda: hasty.gather_objects(0),
        }
        if not late:
            what = {
                "barrier": "barrier #0;",
                "split": "split #0;",
                "gather_objects": "gather_objects #0;",
            }
            with pytest.raises(TimeoutError, match=what[call]):
                ask[call]()

    ranks.run(program)


@under_mpirun
def test_a_progress_thread_moves_what_nobody_polls(ranks):
    def program(comm):
        quiet = make(comm, progress_thread=True, deterministic=True)
        array = np.ones(1 << 16)
        work = quiet.allreduce(array)
        deadline = time.monotonic() + 20
        while not work.complete and time.monotonic() < deadline:
            time.sleep(0.001)  # no call to MPI on this thread
        assert work.complete
        assert (array == comm.size).all()
        quiet._engine.stop()

    ranks.run(program)


@under_mpirun
def test_a_progress_thread_needs_threads_in_mpi(ranks, monkeypatch):
    from mpi4py import MPI

    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)

    def program(comm):
        rule = "progress_thread=True needs an MPI that allows calls from several threads, this one does not"
        with pytest.raises(RuntimeError, match=rule):
            make(comm, progress_thread=True)

    ranks.run(program)


@under_mpirun
def test_an_error_of_mpi_belongs_to_its_message_whoever_polls_it(ranks):
    from mpi4py import MPI

    def program(comm):
        other = make(comm)
        before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        short = other.irecv(np.empty(2), source=before, tag=0)
        whole = other.irecv(np.empty(2), source=before, tag=1)
        sends = [other.isend(np.ones(8 if tag == 0 else 2), dest=after, tag=tag) for tag in (0, 1)]
        assert (whole.wait() == 1).all()  # this wait polls the other message, which is longer than its receive
        while not short.complete:
            other.progress()
        other.barrier()
        for _ in range(2):
            with pytest.raises(ValueError, match=r"the one from rank \d, tag 0, is longer than float64\[2\]") as caught:
                short.wait()
            assert isinstance(caught.value.__cause__, MPI.Exception)
        for send in sends:
            send.wait()

    ranks.run(program)


@under_mpirun
@pytest.mark.ranks(2, 3, 4)
def test_world_hands_on_its_settings(ranks):
    from mpi4py import MPI

    def program(comm):
        ordered = world(deterministic=True)
        assert reductions(ordered, np.float32) == LocalWorld(comm.size).run(reductions, np.float32)[comm.rank]
        assert ordered._in_rank_order  # two ranks have one order only
        assert ordered.max_tag == MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        assert world(check_collectives=comm.rank == 1)._check is not None  # one that asks is enough
        assert world(check_collectives=False)._check is None
        synchronous = world(synchronous_sends=True)
        if comm.rank == 0:
            send = synchronous.isend(np.ones(1), dest=1, tag=0)
            for _ in range(100):
                assert not send.test()  # however small it is
        comm.barrier()
        if comm.rank == 1:
            synchronous.recv(np.empty(1), source=0, tag=0)
        elif comm.rank == 0:
            send.wait()
        comm.barrier()
        hasty = world(timeout_seconds=0.5)  # in which all must be here
        with pytest.raises(TimeoutError, match=r"longer than 0\.5 s"):
            hasty.irecv(np.empty(1), source=comm.rank, tag=0).wait()
        hasty.send(np.ones(1), dest=comm.rank, tag=0)

    ranks.run(program)


class Heard:
    """A communicator of mpi4py, and the time of who asks in it: that stands still until so many have answered."""

    def __init__(self, comm, num_answers):
        self._comm, self._num_left, self._now = comm, num_answers, 0.0

    def recv(self, *, source, tag):
        self._num_left -= tag == roll_call._ANSWER
        return self._comm.recv(source=source, tag=tag)

    def monotonic(self):
        self._now += 1000 * (self._num_left == 0)
        return self._now

    def sleep(self, seconds):
        time.sleep(seconds)

    def __getattr__(self, name):
        return getattr(self._comm, name)


@under_mpirun
@pytest.mark.ranks(2, 3, 4)
def test_a_stall_names_the_ranks_that_have_not_come(ranks, monkeypatch):
    def program(comm):
        hasty = make(comm, timeout_seconds=0.2 if comm.rank == 0 else 30)
        last = comm.size - 1
        if comm.rank == 0:
            heard = Heard(hasty._engine._roll_call._comm, last - 1)
            monkeypatch.setattr(hasty._engine._roll_call, "_comm", heard)
            monkeypatch.setattr(roll_call, "time", heard)
            for rank in range(1, last):
                comm.recv(np.zeros(1), source=rank, tag=1)
            work = hasty.allreduce(np.zeros(3))
            with pytest.raises(TimeoutError) as caught:
                work.wait()
            waiting = "".join(f"; rank {rank} waits for allreduce of float64[3] by SUM #0" for rank in range(1, last))
            assert str(caught.value) == (
                "no rank may wait longer than 0.2 s, but rank 0 waits for allreduce of float64[3] by SUM #0"
                f"{waiting}; rank {last} has not come: it computes, or is gone"
            )
            comm.send(np.zeros(1), dest=last, tag=0)
            while not work.test():
                time.sleep(0.01)
        else:
            if comm.rank == last:
                comm.recv(np.zeros(1), source=0, tag=0)  # by another engine: to the hasty one it computes
            else:
                comm.send(np.zeros(1), dest=0, tag=1)
            hasty.allreduce(np.zeros(3)).wait()

    ranks.run(program)


@needs_mpirun
def test_a_wait_too_long_ends_the_job(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(
        "import time\n"
        "import numpy as np\n"
        "from distributed import world\n"
        "comm = world(timeout_seconds=0.5, progress_thread=True)\n"
        "if comm.rank == 1:\n"
        "    time.sleep(600)\n"
        "with comm.waiting_for('the loss'):\n"
        "    comm.allreduce(np.zeros(3)).wait()\n"
    )
    result = run_job([str(script)], ranks=2, cwd=tmp_path)
    assert result.returncode != 0
    rule = "[rank 0] TimeoutError: no rank may wait longer than 0.5 s, but rank 0 waits for allreduce of float64[3] "
    assert rule + "by SUM #0, for the loss; rank 1 has not come: it computes, or is gone" in result.stderr


@needs_mpirun
def test_a_progress_thread_is_over_before_mpi_ends(tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(
        "import numpy as np\n"
        "from distributed import world\n"
        "comm = world(progress_thread=True)\n"
        "works = [comm.allreduce(np.ones(1 << 16)) for _ in range(5)]\n"
        "assert all((work.wait() == 2).all() for work in works)\n"
        "comm.barrier()\n"
        "print('done', flush=True)\n"
    )
    result = run_job([str(script)], ranks=2, cwd=tmp_path)
    assert (result.returncode, result.stdout.count("done")) == (0, 2), result.stderr


@under_mpirun
def test_the_library_is_one_short_line(ranks, monkeypatch):
    import distributed.comm.mpi.communicator as mpi

    monkeypatch.setattr(mpi.MPI, "Get_library_version", lambda: "MPICH Version:\t3.3.2\nMPICH ABI:\t13:8:1\n")

    def program(comm):
        assert make(comm).library == "MPICH 3.3.2"

    ranks.run(program)


@under_mpirun
@pytest.mark.parametrize(("library", "answer"), [({"MPIX_Query_cuda_support": lambda: 1}, True), ({}, False)])
def test_gpu_support_is_what_the_library_says(ranks, monkeypatch, library, answer):
    import distributed.comm.mpi.cuda_aware as mpi

    monkeypatch.setattr(mpi.ctypes, "CDLL", lambda path: SimpleNamespace(**library))
    mpi.is_cuda_aware.cache_clear()

    def program(comm):
        assert mpi.is_cuda_aware() is answer
        assert make(comm)._reads_gpu_memory("allreduce") is answer
        assert not make(comm, deterministic=True)._reads_gpu_memory("allreduce")  # which adds up on the host
        assert not make(comm)._reads_gpu_memory("allgather")

    ranks.run(program)
    mpi.is_cuda_aware.cache_clear()


@under_mpirun
@pytest.mark.ranks(2, 3, 4)
def test_few_ranks_on_several_hosts_sum_in_rank_order(ranks):
    """Open MPI would send twice the bytes; from 4 ranks on its own reduction is as good."""

    def program(comm):
        apart = make(comm, hosts=[str(rank) for rank in range(comm.size)])
        terms = [np.random.default_rng(rank).standard_normal(10_001) for rank in range(comm.size)]
        total = apart.allreduce(terms[comm.rank].copy()).wait()
        in_rank_order = reduce(np.add, terms)
        np.testing.assert_allclose(total, in_rank_order, rtol=1e-12, atol=1e-12)
        if comm.size < 4:
            np.testing.assert_array_equal(total, in_rank_order)

    ranks.run(program)


@under_mpirun
@pytest.mark.ranks(3, 4)
def test_ranks_on_one_host_split_off_beside_others_on_several(ranks):
    """Some parts sum in rank order and some do not, and all are made by the same calls of MPI."""

    def program(comm):
        hosts = "abbb"[: comm.size]
        part = make(comm, hosts=hosts).split(min(comm.rank // 2, 1))
        assert part._in_rank_order == (comm.rank < 2)
        assert (part.allreduce(np.ones(3)).wait() == part.size).all()
        assert make(comm, hosts=hosts)._in_rank_order == (comm.size < 4)

    ranks.run(program)


@under_mpirun
def test_a_sequence_moves_while_its_rank_computes(ranks):
    def program(comm):
        other = comm.duplicate()
        found = []

        def steps():
            total = yield comm.allreduce(np.ones(1))
            found.extend((yield other.allgather(total))[:, 0])
            return total

        work = comm.sequence(steps())
        deadline = time.monotonic() + 20
        while not found and time.monotonic() < deadline:
            comm.progress()
        assert found == [comm.size] * comm.size
        work.wait()

    ranks.run(program)


class CountsInInts:
    """A communicator of mpi4py, of the last of three ranks, whose MPI is of before its version 4."""

    def Get_rank(self):
        return 2

    def Get_size(self):
        return 3

    def Ialltoall(self, sent, received):
        assert max(sent[0].size, received[0].size) // 3 <= 2**31 - 1
        return SimpleNamespace(Test=lambda: False)

    def Ialltoallv(self, sent, received):
        for _, (counts, places), _ in (sent, received):
            assert max(*counts, *places) <= 2**31 - 1
        return SimpleNamespace(Test=lambda: False)


@pytest.mark.parametrize("num_elements", [3 << 30, 2**31 - 1])
def test_no_slice_has_a_place_that_mpi_cannot_count(num_elements):
    # The slice of the third rank begins at byte 2**31: MPI_ERR_ARG. No page of this memory is ever touched.
    exchange = CountsInInts()
    next(RankOrderReduction(exchange, exchange).reduce_own_slice(np.empty(num_elements, np.uint8), ReduceOp.SUM))


@under_mpirun
def test_what_is_freed_goes_with_all_that_was_split_off_it(ranks):
    # Nothing ever was: MPICH has room for 2,048 in a process, and this suite made more.
    def program(comm):
        child = comm.duplicate()
        parts = [child.split(color=comm.rank % 2, key=comm.rank), child.duplicate().duplicate()]
        parts[0].buffer(100, np.float32)
        child.free()
        alive = [bool(part._comm) for part in (child, *parts)]  # a handle of mpi4py is false once it is freed
        return alive, comm.allreduce(np.ones(3)).wait().tolist()

    assert ranks.run(program) == [([False] * 3, [ranks.size] * 3)] * ranks.size


@under_mpirun
def test_a_world_is_not_freed(ranks):
    with pytest.raises(RuntimeError, match="a world is not freed, what was split off it may be"):
        ranks.run(lambda comm: make(comm).free())
