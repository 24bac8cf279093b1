"""What LocalWorld adds to the contract: failures, mismatches, waits that last too long, and strictness about time."""

import contextvars
import signal
import threading
import time

import numpy as np
import pytest

from distributed import LocalWorld, ReduceOp
from distributed.comm.failure import Heal
from distributed.comm.local.job import Job

SETTING = contextvars.ContextVar("SETTING", default="unset")


def test_results_come_by_rank_and_arguments_go_to_all():
    assert LocalWorld(3).run(lambda comm, factor: factor * comm.rank, 10) == [0, 10, 20]


def test_a_world_has_a_rank():
    with pytest.raises(ValueError, match="a LocalWorld needs at least 1 rank, got 0"):
        LocalWorld(0)


def test_first_failure_in_time_is_raised_and_wakes_the_others():
    error = KeyError("first")
    woken = []

    def program(comm):
        if comm.rank == 2:
            time.sleep(0.05)
            raise error
        try:
            comm.barrier()
        finally:
            woken.append(comm.rank)
            if comm.rank == 0:
                raise ValueError("a consequence, later")

    with pytest.raises(KeyError) as caught:
        LocalWorld(3).run(program)
    assert caught.value is error
    assert error.__notes__ == ["[rank 2]"]
    assert sorted(woken) == [0, 1]


def test_a_failure_ends_ranks_that_poll_or_launch():
    def program(comm):
        if comm.rank == 0:
            raise ValueError("gone")
        work = comm.irecv(np.zeros(1), source=0, tag=0)
        if comm.rank == 1:
            while not work.test():
                comm.progress()
        while True:
            comm.allreduce(np.zeros(1))
            comm.isend(np.zeros(1), dest=0, tag=0)

    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="gone"):
        LocalWorld(3).run(program)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("wait", [lambda comm: comm.vote(True), lambda comm: comm.heal(Heal.SHRINK)])
def test_a_failure_ends_ranks_that_vote_or_heal(wait):
    before = set(threading.enumerate())

    def program(comm):
        if comm.rank == 0:
            time.sleep(0.02)
            raise ValueError("gone")
        wait(comm)

    with pytest.raises(ValueError, match="gone"):
        LocalWorld(3, survive=True).run(program)
    assert set(threading.enumerate()) <= before


def test_a_rank_that_computes_for_ever_keeps_no_process_alive():
    assert LocalWorld(1).run(lambda comm: threading.current_thread().daemon) == [True]


def test_a_send_waits_for_its_receive_only_where_it_is_asked_to():
    assert LocalWorld(1).run(lambda comm: comm.isend(np.zeros(1), dest=0, tag=0).test()) == [True]
    synchronous = LocalWorld(1, synchronous_sends=True)
    assert synchronous.run(lambda comm: comm.isend(np.zeros(1), dest=0, tag=0).test()) == [False]


def test_threads_of_ranks_are_over_when_the_run_is(monkeypatch):
    # A rank's program was over, and its thread, with all that it held, for a moment not.
    end = Job.end

    def slowly(job, rank):
        end(job, rank)
        time.sleep(0.05)  # as where another thread has its turn

    monkeypatch.setattr(Job, "end", slowly)
    before = set(threading.enumerate())
    LocalWorld(3).run(lambda comm: None)
    assert set(threading.enumerate()) <= before


def test_abort_is_the_failure_even_where_the_rank_catches_it():
    def program(comm):
        if comm.rank == 1:
            try:
                comm.split(comm.rank).abort("disk full")
            except SystemExit:
                return
        comm.split(comm.rank)
        comm.barrier()

    with pytest.raises(SystemExit, match=r"\[rank 1\] disk full"):
        LocalWorld(2).run(program)


def test_an_interrupt_of_the_caller_ends_the_ranks():
    def program(comm):
        if comm.rank == 0:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        comm.recv(np.zeros(1), source=comm.rank, tag=0)

    threads = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        LocalWorld(2).run(program)
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=30)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("first", "second", "calls"),
    [
        (
            lambda comm: comm.allreduce(np.zeros(3)),
            lambda comm: comm.allreduce(np.zeros(5)),
            r"rank 0 calls allreduce of float64\[3\] by SUM HERE and rank 1 calls allreduce of float64\[5\] by SUM",
        ),
        (
            lambda comm: comm.reduce_scatter(np.zeros(2, np.float32)),
            lambda comm: comm.reduce_scatter(np.zeros(2, np.int32)),
            r"rank 0 calls reduce_scatter of float32\[2\] by SUM HERE and rank 1 calls reduce_scatter of int32\[2\]",
        ),
        (
            lambda comm: comm.allreduce(np.zeros(())),
            lambda comm: comm.allreduce(np.zeros(()), op=ReduceOp.MAX),
            r"rank 0 calls allreduce of float64\[\] by SUM HERE and rank 1 calls allreduce of float64\[\] by MAX",
        ),
        (
            lambda comm: comm.broadcast(np.zeros(1)),
            lambda comm: comm.broadcast(np.zeros(1), root=1),
            r"rank 0 calls broadcast of float64\[1\] from 0 HERE and rank 1 calls broadcast of float64\[1\] from 1",
        ),
        (
            lambda comm: comm.allgather(np.zeros((2, 3))),
            lambda comm: comm.barrier(),
            r"rank 0 calls allgather of float64\[2, 3\] HERE and rank 1 calls barrier",
        ),
        (
            lambda comm: comm.split(0),
            lambda comm: comm.gather_objects(1),
            "rank 0 calls split HERE and rank 1 calls gather_",
        ),
    ],
)
def test_mismatched_collectives_are_named_on_every_rank(first, second, calls):
    messages = []

    def program(comm):
        comm.barrier()
        call = second if comm.rank == 1 else first
        rule = "same collectives in the same order, but for collective #1 " + calls
        with pytest.raises(RuntimeError, match=rule.replace("HERE", r"\(.*test_local\.py:\d+\)")):
            call(comm).wait()
        messages.append(comm.rank)

    LocalWorld(2).run(program)
    assert sorted(messages) == [0, 1]


def test_a_mismatch_reaches_ranks_that_join_later():
    def program(comm):
        if comm.rank == 2:
            time.sleep(0.05)
        with pytest.raises(RuntimeError, match=r"rank 0 calls barrier \(.* and rank 1 calls gather_objects \("):
            comm.gather_objects(None) if comm.rank else comm.barrier()

    LocalWorld(3).run(program)


def test_a_wait_too_long_tells_what_each_rank_waits_for():
    in_place, told = threading.Barrier(5), threading.Barrier(4)

    def program(comm):
        pair = comm.split(color=comm.rank // 2)
        in_place.wait()
        try:
            if comm.rank == 0:
                comm.recv(np.zeros(1), source=1, tag=7)
            elif comm.rank == 1:
                comm.allreduce(np.zeros(3)).wait()
            elif comm.rank == 2:
                pair.send(np.zeros(1), dest=1, tag=2)
        finally:
            if comm.rank != 3:
                told.wait()  # rank 4 computes until the others have told

    with pytest.raises(TimeoutError) as caught:
        LocalWorld(5, synchronous_sends=True, timeout_seconds=1.0).run(program)
    # Whichever of the three that wait is the one that tells, the others may have done so at the same time.
    assert str(caught.value).replace("has waited too long for", "waits for") == (
        "no rank may wait longer than 1.0 s, but rank 0 waits for recv from 1 tag 7; "
        "rank 1 waits for allreduce of float64[3] by SUM #1 (not called by ranks 0, 2, 3, 4); "
        "rank 2 waits for send to 1 tag 2 among ranks [2, 3]; "
        "rank 3 has ended; rank 4 is computing"
    )


def test_who_has_just_waited_too_long_does_not_compute():
    # Of two ranks whose time was up at once the second to tell said that the first was computing.
    turns = [threading.Event(), threading.Event()]

    def program(comm):
        if comm.rank == 1:
            turns[0].wait()
        with pytest.raises(TimeoutError) as caught:
            comm.recv(np.zeros(1), source=1 - comm.rank, tag=comm.rank)
        turns[comm.rank].set()
        turns[1].wait()
        return str(caught.value)

    assert LocalWorld(2, timeout_seconds=0.05).run(program)[1] == (
        "no rank may wait longer than 0.05 s, but rank 0 has waited too long for recv from 1 tag 0; "
        "rank 1 waits for recv from 0 tag 1"
    )


def test_a_collective_reads_the_live_arrays_when_the_last_rank_joins():
    def program(comm):
        array = np.array([1])
        if comm.rank == 1:
            comm.recv(np.zeros(1), source=0, tag=0)
        work = comm.allreduce(array)
        if comm.rank == 0:
            array[0] = 100  # a mistake, and the sum shows it
            comm.send(np.zeros(1), dest=1, tag=0)
        return int(work.wait()[0])

    assert LocalWorld(2).run(program) == [101, 101]


def test_results_land_at_wait_and_not_before():
    def program(comm):
        array, message = np.array([1]), np.array([0])
        works = [comm.allreduce(array), comm.irecv(message, source=0, tag=0)]
        if comm.rank == 0:
            for dest in range(comm.size):
                comm.send(np.array([5]), dest=dest, tag=0)
        comm.barrier()  # both are complete on every rank by now
        assert (array, message) == (1, 0)
        for work in works:
            work.wait()
        assert (array, message) == (comm.size, 5)

    LocalWorld(2).run(program)


@pytest.mark.parametrize(("synchronous_sends", "received"), [(False, 1), (True, 2)])
def test_a_send_reads_its_array_at_once_or_when_it_is_matched(synchronous_sends, received):
    def program(comm):
        array = np.array([1])
        if comm.rank == 0:
            work = comm.isend(array, dest=1, tag=0)
            assert work.test() is not synchronous_sends
            array[0] = 2
            comm.barrier()
            work.wait()
            array[0] = 3
            comm.barrier()
        else:
            comm.barrier()
            work = comm.irecv(array, source=0, tag=0)
            comm.barrier()
            assert work.wait() == received

    LocalWorld(2, synchronous_sends=synchronous_sends).run(program)


def test_sums_are_taken_in_rank_order():
    values = [1e16, 1.0, -1e16, 1.0]

    def program(comm):
        time.sleep(0.02 * (comm.size - comm.rank))  # the last rank joins first
        return float(comm.allreduce(np.array(values[comm.rank])).wait())

    assert LocalWorld(4).run(program) == [((1e16 + 1.0) - 1e16) + 1.0] * 4


def test_gathered_objects_are_copies():
    shared = [0]

    def program(comm):
        for copy in comm.gather_objects(shared):
            copy.append(comm.rank)

    LocalWorld(2).run(program)
    assert shared == [0]


def test_each_rank_starts_with_its_own_copy_of_the_context():
    def program(comm):
        inherited = SETTING.get()
        SETTING.set(f"rank {comm.rank}")
        comm.barrier()
        return inherited, SETTING.get()

    SETTING.set("caller")
    assert LocalWorld(2).run(program) == [("caller", "rank 0"), ("caller", "rank 1")]
    assert SETTING.get() == "caller"
