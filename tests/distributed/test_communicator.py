"""What every communicator does: one suite over a single rank, threads and, under mpirun, MPI.

Expected values are functions of rank, root and size, so that any number of ranks will do.
"""

import functools
import gc
import re
import time

import numpy as np
import pytest
from wide_sums import in_both_dtypes, wide_bytes

from distributed import LocalWorld, ReduceOp, SoloCommunicator
from distributed.comm.transfer import longest_message
from minigrad.words import counted

pytestmark = pytest.mark.every_world

RING_BYTES = 16 << 20
try:
    import ml_dtypes
except ModuleNotFoundError:
    HALVES = [np.float16]
else:
    HALVES = [np.float16, ml_dtypes.bfloat16]


def neighbours(comm):
    return (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size


# Collectives


def test_ranks_are_numbered_from_zero(ranks):
    results = ranks.run(lambda comm: (comm.rank, comm.size))
    assert results == [(rank, ranks.size) for rank in range(ranks.size)]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, bool, "S3", np.complex128])
def test_broadcast_overwrites_with_the_array_of_any_root(ranks, dtype):
    def program(comm):
        for root in range(comm.size):
            array = np.full((2, 3), comm.rank + 1).astype(dtype)
            assert comm.broadcast(array, root=root).wait() is array
            assert (array == np.full((2, 3), root + 1).astype(dtype)).all()

    ranks.run(program)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64, np.uint8, *HALVES])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0, 2), (2, 3)])
def test_allreduce_by_every_op(ranks, dtype, shape):
    def program(comm):
        expected = {ReduceOp.SUM: comm.size * (comm.size + 1) // 2, ReduceOp.MIN: 1, ReduceOp.MAX: comm.size}
        for op, value in expected.items():
            array = np.full(shape, comm.rank + 1, dtype)
            assert comm.allreduce(array, op=op).wait() is array
            np.testing.assert_array_equal(array, np.full(shape, value, dtype), strict=True)

    ranks.run(program)


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.longdouble, *HALVES])
def test_nan_on_any_rank_is_nan_everywhere(ranks, dtype, op):
    """Whether MPI.MAX sees nan, and what it gives beside one, depends on the order in which an MPI compares."""

    def program(comm):
        finite = np.arange(2 * comm.size) + comm.rank  # then rank r has nan in element r, among finite ones
        array = finite.astype(dtype)
        array[comm.rank] = np.nan
        of_all = np.arange(2 * comm.size) + np.arange(comm.size)[:, None]
        combine = {ReduceOp.SUM: np.sum, ReduceOp.MEAN: np.mean, ReduceOp.MIN: np.min, ReduceOp.MAX: np.max}[op]
        expected = combine(of_all, axis=0).astype(dtype)
        expected[: comm.size] = np.nan
        for negative in (False, True):  # a nan has a sign, and no reduction asks for it
            values = np.where(np.isnan(array), np.copysign(array, -1), array) if negative else array.copy()
            buffer = comm.buffer(values.size, dtype) if dtype != np.longdouble else np.empty_like(values)
            buffer[:] = values
            for whole in (comm.allreduce(values.copy(), op=op).wait(), comm.allreduce(buffer, op=op).wait()):
                np.testing.assert_array_equal(whole.astype(np.float64), expected.astype(np.float64))
            own = comm.reduce_scatter(values.copy(), op=op).wait()
            np.testing.assert_array_equal(
                own.astype(np.float64), expected[2 * comm.rank : 2 * comm.rank + 2].astype(np.float64)
            )
        assert np.isnan(comm.allreduce(np.array(np.nan if comm.rank == 0 else 1, dtype), op=op).wait())

    ranks.run(program)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, *HALVES])
def test_mean_is_the_sum_divided_when_it_completes(ranks, dtype):
    def program(comm):
        array = np.full((2, 3), 4 * comm.rank + 1).astype(dtype)
        flat = np.full(2 * comm.size, 4 * comm.rank + 1).astype(dtype)
        for result in [
            comm.allreduce(array, op=ReduceOp.MEAN).wait(),
            comm.reduce_scatter(flat, op=ReduceOp.MEAN).wait(),
        ]:
            assert result.dtype == dtype
            assert (result == 2 * (comm.size - 1) + 1).all()

    ranks.run(program)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_mean_is_divided_and_not_multiplied_by_a_rounded_share(ranks, dtype):
    """5 / 3 and 5 * (1 / 3) are two numbers."""

    def program(comm):
        total = np.arange(1000, dtype=dtype)
        values = total if comm.rank == 0 else np.zeros(1000, dtype)
        buffer = comm.buffer(1000, dtype)
        buffer[:] = values
        for array in (values.copy(), buffer):
            np.testing.assert_array_equal(comm.allreduce(array, op=ReduceOp.MEAN).wait(), total / dtype(comm.size))

    ranks.run(program)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, *HALVES])
def test_average_is_the_sum_of_values_each_times_its_equal_share(ranks, dtype):
    def program(comm):
        values = (np.arange(1, 1001) * (comm.rank + 1) / 7).astype(dtype)
        weighted = comm.allreduce(values * np.dtype(dtype).type(1 / comm.size)).wait()
        own = comm.average(np.tile(values, comm.size), everywhere=False).wait()
        assert comm.average(values).wait() is values
        np.testing.assert_array_equal(values, weighted, strict=True)
        np.testing.assert_array_equal(own, weighted, strict=True)
        with pytest.raises(TypeError, match="average by MEAN needs floats"):
            comm.average(np.zeros(3, np.int32))
        with pytest.raises(ValueError, match="average needs a contiguous array"):
            comm.average(np.zeros(4, dtype)[::2])
        if comm.size > 1:
            with pytest.raises(ValueError, match="average needs"):
                comm.average(np.zeros(comm.size + 1, dtype), everywhere=False)

    ranks.run(program)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
def test_half_precision_is_summed_wide_and_rounded_once(ranks, dtype, op):
    def program(comm):
        values = np.random.default_rng(comm.rank).uniform(0.5, 2, 5000).astype(dtype)
        total = sum(part.astype(np.float32) for part in comm.allgather(values).wait())
        expected = (total / comm.size if op is ReduceOp.MEAN else total).astype(dtype)
        assert (comm.allreduce(values.copy(), op=op).wait() == expected).all()
        padded = np.concatenate([values, np.zeros(-len(values) % comm.size, dtype)])
        own = comm.reduce_scatter(padded, op=op).wait()
        n = len(own)
        whole = np.concatenate([expected, np.zeros(n * comm.size - len(expected), dtype)])
        assert (own == whole[n * comm.rank : n * (comm.rank + 1)]).all()

    ranks.run(program)


def test_mean_of_large_halves_does_not_overflow(ranks):
    def program(comm):
        assert comm.allreduce(np.array([60000], np.float16), op=ReduceOp.MEAN).wait() == 60000

    ranks.run(program)


def test_allreduce_sums_by_default(ranks):
    def program(comm):
        return int(comm.allreduce(np.array([comm.rank + 1])).wait()[0])

    assert ranks.run(program) == [ranks.size * (ranks.size + 1) // 2] * ranks.size


def test_float_sums_have_the_same_bits_on_every_rank(ranks):
    def program(comm):
        array = np.random.default_rng(comm.rank).standard_normal(10_000).astype(np.float32)
        return comm.allreduce(array).wait().tobytes()

    assert len(set(ranks.run(program))) == 1


@pytest.mark.parametrize("n", [0, 1, 5])
def test_reduce_scatter_leaves_each_rank_its_slice(ranks, n):
    def program(comm):
        flat = np.arange(comm.size * n, dtype=np.float64) * (comm.rank + 1)
        own = comm.reduce_scatter(flat).wait()
        first = comm.rank * n
        np.testing.assert_array_equal(own, np.arange(first, first + n) * (comm.size * (comm.size + 1) / 2))
        assert own.base is flat or own.base is flat.base
        assert own.shape == (n,)
        own[:] = -1  # a view: it writes into flat
        assert (flat[first : first + n] == -1).all()

    ranks.run(program)


@pytest.mark.parametrize("n", [0, 1, 50])
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("in_buffer", ["all", "array", ""])
def test_a_wide_sum_is_rounded_once_whoever_has_wide_values(ranks, n, everywhere, in_buffer):
    def program(comm):
        size = comm.size * n
        num_bytes = wide_bytes(size)
        memory = comm.buffer(num_bytes, np.uint8) if in_buffer else np.zeros(num_bytes, np.uint8)
        wide, array, is_wide = in_both_dtypes(memory, size)
        if in_buffer == "array":
            wide, is_wide = wide.copy(), is_wide.copy()
        values = np.random.default_rng(comm.rank).standard_normal(size).astype(np.float32)
        expected = functools.reduce(np.add, comm.allgather(values).wait().astype(np.float64))
        own = slice(None) if everywhere else slice(comm.rank * n, comm.rank * n + n)
        for ranks_with_sums in ([], [0], range(comm.size)):
            is_wide[0] = comm.rank in ranks_with_sums
            array[:] = wide[:] = np.nan
            (wide if is_wide[0] else array)[:] = values
            result = comm.sum_widely(array, wide, is_wide, everywhere=everywhere).wait()
            assert result is array
            error = np.abs(array[own] - expected[own])  # the order of a sum of float64 is the communicator's own
            assert (error <= 2**-24 * np.abs(expected[own])).all()

    ranks.run(program)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("array", "wide", "is_wide", "error", "rule"),
    [
        (np.float32, np.float32, 1, TypeError, "sum_widely adds float32 up in a wider dtype, got float32"),
        (np.complex64, np.complex128, 1, TypeError, "sum_widely reduces native integers and floats, got complex64"),
        (np.float32, np.float64, 2, ValueError, "two arrays of (n,) and one of (1,), got (3,), (3,) and (2,)"),
    ],
)
def test_what_cannot_be_added_up_widely_is_refused(ranks, array, wide, is_wide, error, rule):
    def program(comm):
        with pytest.raises(error, match=re.escape(rule)):
            comm.sum_widely(np.zeros(3, array), np.zeros(3, wide), np.zeros(is_wide, np.uint8))

    ranks.run(program)


def test_reduce_scatter_by_max(ranks):
    def program(comm):
        flat = np.full(comm.size, comm.rank)
        assert comm.reduce_scatter(flat, op=ReduceOp.MAX).wait() == comm.size - 1

    ranks.run(program)


@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", [np.int64, np.float16])
def test_allgather_stacks_in_rank_order(ranks, shape, dtype):
    def program(comm):
        array = np.full(shape, comm.rank, dtype)
        gathered = comm.allgather(array).wait()
        expected = np.stack([np.full(shape, rank, dtype) for rank in range(comm.size)])
        np.testing.assert_array_equal(gathered, expected, strict=True)
        gathered[...] = 9  # the caller's own
        assert (array == comm.rank).all()

    ranks.run(program)


@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", [np.int64, np.float16, "S3"])
def test_all_to_all_exchanges_rows(ranks, shape, dtype):
    def program(comm):
        rows = [np.full(shape, 10 * comm.rank + dest).astype(dtype) for dest in range(comm.size)]
        received = comm.all_to_all(np.stack(rows)).wait()
        expected = np.stack([np.full(shape, 10 * source + comm.rank).astype(dtype) for source in range(comm.size)])
        np.testing.assert_array_equal(received, expected, strict=True)

    ranks.run(program)


def test_buffer_is_memory_that_reduces(ranks):
    def program(comm):
        buffer = comm.buffer(10, np.float32)
        assert (buffer.shape, buffer.dtype) == ((10,), np.float32)
        assert (buffer == 0).all()
        assert comm.buffer(0, np.float32).shape == (0,)
        assert comm.buffer(1 << 14, np.uint8).shape == (1 << 14,)  # pages, of which nothing is left over
        assert comm.buffer(101, np.uint8).ctypes.data % 16 == 0
        buffer[:] = comm.rank + np.arange(10)
        part = buffer[3:9].reshape(2, 3)
        assert comm.allreduce(part, op=ReduceOp.MEAN).wait() is part
        expected = np.arange(10) + np.where((np.arange(10) >= 3) & (np.arange(10) < 9), (comm.size - 1) / 2, comm.rank)
        np.testing.assert_array_equal(buffer, expected.astype(np.float32))

    ranks.run(program)


@pytest.mark.ranks(2, 3, 4)
def test_buffer_must_be_the_same_on_every_rank(ranks):
    def program(comm):
        rule = r"buffer needs the same size and dtype on every rank, got \[\(1, 'float32'\), \(2, 'float32'\)"
        with pytest.raises(ValueError, match=rule):
            comm.buffer(comm.rank + 1, np.float32)

    ranks.run(program)


# Long messages


class Pieces(SoloCommunicator):
    """Notes how much it is asked to move at a time."""

    def __init__(self, limit):
        super().__init__(max_message_elements=limit)
        self.sizes = []

    def _allreduce(self, array, op):
        self.sizes.append(array.size)
        return super()._allreduce(array, op)

    def _isend(self, array, dest, tag):
        self.sizes.append(array.size)
        return super()._isend(array, dest, tag)

    def _all_to_all(self, array):
        self.sizes.append(array.size)
        return super()._all_to_all(array)


@pytest.mark.parametrize(
    ("limit", "sizes"), [(1000, [1000, 1000, 500]), (2500, [2500]), (2499, [2499, 1]), (1, [1] * 2500)]
)
def test_what_is_too_long_for_a_message_is_cut_up(limit, sizes):
    comm = Pieces(limit)
    values = np.arange(2500.0)
    array, received = values.copy().reshape(50, 50), np.empty(2500)
    assert comm.allreduce(array).wait() is array
    assert comm.isend(array, dest=0, tag=0).wait() is array
    comm.recv(received, source=0, tag=0)
    exchanged = comm.all_to_all(array.reshape(1, 50, 50)).wait()
    assert comm.sizes == sizes * 3
    assert (received == values).all()
    assert (exchanged == array).all()
    assert comm.split(0).max_message_elements == limit


def test_a_message_counts_at_most_two_gigabytes():
    comm = Pieces(2**31 - 1)
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, "S1000000"), (2148,), (0,))  # no memory of that size
    assert longest_message(comm, huge) == 2147


@pytest.mark.point_to_point
@pytest.mark.parametrize("limit", [1, 1000, 2500])
def test_pieces_give_what_the_whole_gives(ranks, limit):
    n = 25 if limit == 1 else 2500

    def program(comm):
        comm = comm.duplicate()
        comm.max_message_elements = limit
        before, after = neighbours(comm)
        mine = np.arange(n, dtype=np.float32) + comm.rank
        for op, expected in [
            (ReduceOp.SUM, comm.size * np.arange(n) + comm.size * (comm.size - 1) // 2),
            (ReduceOp.MEAN, np.arange(n) + (comm.size - 1) / 2),
            (ReduceOp.MAX, np.arange(n) + comm.size - 1),
        ]:
            np.testing.assert_array_equal(comm.allreduce(mine.copy(), op=op).wait(), expected.astype(np.float32))
        rows = np.stack([mine + 100 * dest for dest in range(comm.size)])
        flat = rows.reshape(-1).copy()
        own = comm.reduce_scatter(flat).wait()
        assert np.shares_memory(own, flat)
        assert (own == comm.size * (np.arange(n) + 100 * comm.rank) + comm.size * (comm.size - 1) // 2).all()
        sources = np.arange(comm.size)[:, None]
        np.testing.assert_array_equal(
            comm.allgather(mine.reshape(5, -1)).wait().reshape(comm.size, n), mine - comm.rank + sources
        )
        exchanged = comm.all_to_all(rows.reshape(comm.size, 5, -1)).wait()
        assert exchanged.shape == (comm.size, 5, n // 5)
        assert (exchanged.reshape(comm.size, n) == np.arange(n) + sources + 100 * comm.rank).all()
        assert (comm.broadcast(mine.copy(), root=comm.size - 1).wait() == np.arange(n) + comm.size - 1).all()
        send = comm.isend(mine, dest=after, tag=2)
        assert (comm.recv(np.empty(n, np.float32), source=before, tag=2) == np.arange(n) + before).all()
        assert send.wait() is mine

    ranks.run(program)


def test_polling_completes_pieces(ranks):
    def program(comm):
        comm = comm.duplicate()
        comm.max_message_elements = 2
        array = np.ones(5)
        work = comm.allreduce(array)
        while not work.test():
            comm.progress()
        assert (array == comm.size).all()
        assert work.wait() is array

    ranks.run(program)


def test_the_limit_of_a_message_is_positive():
    with pytest.raises(ValueError, match="max_message_elements must be positive, got 0"):
        SoloCommunicator(max_message_elements=0)


# Bookkeeping


def test_gather_objects_gives_all_ranks_all_objects(ranks):
    def program(comm):
        comm.barrier()
        assert comm.gather_objects({"rank": comm.rank}) == [{"rank": rank} for rank in range(comm.size)]

    ranks.run(program)


def test_broadcast_object_gives_all_ranks_that_of_one(ranks):
    def program(comm):
        for root in range(comm.size):
            obj = {"rank": comm.rank} if comm.rank == root else None
            found = comm.broadcast_object(obj, root=root)
            assert found == {"rank": root}
            assert found is not obj  # a copy on every rank, as if it had travelled
        with pytest.raises(ValueError, match=f"broadcast needs a root in 0..{comm.size - 1}, got {comm.size}"):
            comm.broadcast_object(None, root=comm.size)

    ranks.run(program)


def test_outstanding_collectives_finish_in_any_order(ranks):
    def program(comm):
        arrays = [np.full(1 + 100 * i, i + comm.rank, dtype=np.int64) for i in range(30)]
        works = [comm.allreduce(array) for array in arrays]
        for i in np.random.default_rng(comm.rank).permutation(30):  # another order on each rank
            comm.progress()
            works[i].wait()
            assert (arrays[i] == comm.size * i + comm.size * (comm.size - 1) // 2).all()

    ranks.run(program)


def test_comparisons_keep_their_place_among_other_collectives(ranks):
    """They are two collectives of MPI's where there are floats, one of them for nan."""

    def program(comm):
        works = []
        for i in range(10):
            works.append(comm.allreduce(np.full(1000, float(comm.rank + i)), op=ReduceOp.MAX))
            if comm.rank % 2:
                time.sleep(300e-6)
                comm.progress()
            works.append(comm.allgather(np.array([comm.rank])))
        for i in range(10):
            assert (works[2 * i].wait() == comm.size - 1 + i).all()
            assert works[2 * i + 1].wait()[:, 0].tolist() == list(range(comm.size))

    ranks.run(program)


def test_different_collectives_are_outstanding_at_once(ranks):
    def program(comm):
        total, root, part = np.array([1]), np.array([comm.rank]), np.ones(comm.size)
        gathered = comm.allgather(np.array(comm.rank))
        exchanged = comm.all_to_all(np.arange(comm.size))
        works = [comm.allreduce(total), comm.broadcast(root, root=comm.size - 1), comm.reduce_scatter(part), gathered]
        works.append(exchanged)
        for work in works:
            work.wait()
        assert total == comm.size
        assert root == comm.size - 1
        assert part[comm.rank] == comm.size
        assert gathered.wait().tolist() == list(range(comm.size))
        assert exchanged.wait().tolist() == [comm.rank] * comm.size

    ranks.run(program)


def test_polling_completes_a_work_and_wait_repeats_its_result(ranks):
    def program(comm):
        array = np.array([1.0])
        work = comm.allreduce(array)
        while not work.test():
            comm.progress()
        assert array == comm.size
        array[0] = 5  # complete: wait() must not write again
        assert work.wait() is array
        assert work.test()
        assert work.wait() == 5

    ranks.run(program)


# Point to point


@pytest.mark.point_to_point
def test_ring_of_large_messages_all_sent_first(ranks):
    def program(comm):
        before, after = neighbours(comm)
        sent = np.full(RING_BYTES, comm.rank, dtype=np.uint8)
        received = np.empty_like(sent)
        send = comm.isend(sent, dest=after, tag=3)
        assert comm.irecv(received, source=before, tag=3).wait() is received
        assert send.wait() is sent
        assert (received == before).all()

    ranks.run(program)


@pytest.mark.point_to_point
def test_messages_of_one_tag_keep_their_order(ranks):
    def program(comm):
        before, after = neighbours(comm)
        received = [np.empty(1, dtype=np.int64) for _ in range(10)]
        early = [comm.irecv(array, source=before, tag=0) for array in received[:5]]
        sends = [comm.isend(np.array([10 * comm.rank + i]), dest=after, tag=0) for i in range(10)]
        late = [comm.irecv(array, source=before, tag=0) for array in received[5:]]
        for work in reversed(early + late + sends):
            work.wait()
        assert [int(array[0]) for array in received] == [10 * before + i for i in range(10)]

    ranks.run(program)


@pytest.mark.point_to_point
def test_messages_of_all_sources_are_told_apart(ranks):
    def program(comm):
        receives = [comm.irecv(np.array([-1]), source=source, tag=0) for source in reversed(range(comm.size))]
        sends = [comm.isend(np.array([comm.rank]), dest=dest, tag=0) for dest in range(comm.size)]
        assert [int(work.wait()[0]) for work in receives] == list(reversed(range(comm.size)))
        for send in sends:
            send.wait()

    ranks.run(program)


@pytest.mark.point_to_point
def test_tags_are_received_in_any_order(ranks):
    def program(comm):
        before, after = neighbours(comm)
        tags = [0, 1, 7, comm.max_tag]
        sends = [comm.isend(np.array([tag, k]), dest=after, tag=tag) for k in range(2) for tag in tags]
        for tag in reversed(tags):
            for k in range(2):
                assert comm.recv(np.empty(2, dtype=np.int64), source=before, tag=tag).tolist() == [tag, k]
        for send in sends:
            send.wait()

    ranks.run(program)


@pytest.mark.point_to_point
@pytest.mark.parametrize("dtype", [np.float32, np.float16, bool, "M8[s]", "i4,f8"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_any_dtype_and_shape_travels(ranks, dtype, shape):
    def program(comm):
        before, after = neighbours(comm)
        send = comm.isend(np.full(shape, comm.rank).astype(dtype), dest=after, tag=0)
        received = comm.recv(np.empty(shape, dtype), source=before, tag=0)
        send.wait()
        np.testing.assert_array_equal(received, np.full(shape, before).astype(dtype), strict=True)

    ranks.run(program)


@pytest.mark.point_to_point
def test_rendezvous_sends_wait_for_their_receive(ranks):
    def program(comm):
        before, after = neighbours(comm)
        other = comm.duplicate()
        sends = [each.isend(np.array([comm.rank]), dest=after, tag=0) for each in (comm, other)]
        comm.barrier()
        if ranks.synchronous_sends:
            assert not any(send.test() for send in sends)
        comm.barrier()
        for each, send in zip((comm, other), sends, strict=True):
            receive = each.irecv(np.array([-1]), source=before, tag=0)
            send.wait()
            assert receive.wait() == before

    ranks.run(program)


@pytest.mark.point_to_point
def test_a_rank_sends_to_itself(ranks):
    def program(comm):
        array = np.zeros(1)
        receive = comm.irecv(array, source=comm.rank, tag=1)
        assert not receive.test()
        send = comm.isend(np.ones(1), dest=comm.rank, tag=1)
        assert receive.wait() is array
        send.wait()
        assert array == 1

    ranks.run(program)


@pytest.mark.point_to_point
@pytest.mark.ranks(2, 4)
def test_blocking_send_and_recv_in_pairs(ranks):
    def program(comm):
        partner = comm.rank ^ 1
        array = np.array([comm.rank])
        if comm.rank < partner:
            comm.send(array, dest=partner, tag=0)
            comm.recv(array, source=partner, tag=0)
            assert array == 100 + partner
        else:
            assert comm.recv(np.empty_like(array), source=partner, tag=0) == partner
            comm.send(array + 100, dest=partner, tag=0)

    ranks.run(program)


@pytest.mark.usefixtures("young_heap")
@pytest.mark.point_to_point
def test_dropped_work_keeps_its_array(ranks):
    def program(comm):
        before, after = neighbours(comm)
        comm.isend(np.full(RING_BYTES, comm.rank, dtype=np.uint8), dest=after, tag=0)
        comm.allreduce(np.zeros(1 << 16))
        comm.allreduce(np.zeros(1 << 16, np.float16), op=ReduceOp.MEAN)
        exchange = comm.all_to_all(np.full((comm.size, RING_BYTES // comm.size), comm.rank, dtype=np.uint8))
        gc.collect()
        trash = [np.full(RING_BYTES, 255, dtype=np.uint8) for _ in range(3)]  # takes the memory, were it free
        received = comm.recv(np.empty(RING_BYTES, dtype=np.uint8), source=before, tag=0)
        assert (received == before).all()
        assert (exchange.wait() == np.arange(comm.size)[:, None]).all()
        assert comm.allreduce(np.ones(1)).wait() == comm.size
        comm.barrier()
        return len(trash)

    ranks.run(program)


@pytest.mark.point_to_point
@pytest.mark.parametrize("num_posted", [1, 3])
def test_a_receive_must_be_as_large_as_its_message(ranks, num_posted):
    def program(comm):
        before, after = neighbours(comm)
        send = comm.isend(np.zeros(2, dtype=np.float32), dest=after, tag=4)
        receive = comm.irecv(np.zeros(num_posted, dtype=np.float32), source=before, tag=4)
        rule = (
            f"a receive must be as large as its message, but the one from rank {before}, tag 4, is "
            f"{'longer' if num_posted == 1 else 'shorter'} than float32[{num_posted}], {4 * num_posted} bytes"
        )
        send.wait()
        comm.barrier()
        for _ in range(3):  # whoever finds the error first, it belongs to the receive
            time.sleep(300e-6)
            comm.progress()
        for _ in range(2):
            with pytest.raises(ValueError, match=re.escape(rule)):
                receive.wait()
        with pytest.raises(ValueError, match=re.escape(rule)):
            receive.test()

    ranks.run(program)


# Communicators made of others


@pytest.mark.parametrize("make", [lambda comm: comm.duplicate(), lambda comm: comm.split(0, key=comm.rank)])
@pytest.mark.point_to_point
def test_messages_of_two_communicators_never_meet(ranks, make):
    def program(comm):
        other = make(comm)
        before, after = neighbours(comm)
        assert (other.rank, other.size) == (comm.rank, comm.size)
        sends = [each.isend(np.array([value]), dest=after, tag=0) for each, value in ((comm, 1), (other, 2))]
        assert other.recv(np.array([0]), source=before, tag=0) == 2
        assert comm.recv(np.array([0]), source=before, tag=0) == 1
        for send in sends:
            send.wait()
        mine, yours = np.array([1]), np.array([10.0, 10.0])
        works = [comm.allreduce(mine), other.allreduce(yours)]
        for work in reversed(works):
            work.wait()
        assert mine == comm.size
        assert (yours == 10 * comm.size).all()

    ranks.run(program)


def test_split_groups_by_color_and_orders_by_key_then_rank(ranks):
    def program(comm):
        part = comm.split(color=comm.rank % 2, key=-(comm.rank // 4))
        members = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2]
        members.sort(key=lambda rank: (-(rank // 4), rank))
        assert part.size == len(members)
        assert members[part.rank] == comm.rank
        assert part.gather_objects(comm.rank) == members
        assert part.allreduce(np.array([comm.rank])).wait() == sum(members)
        backwards = part.split(color=7, key=-part.rank)  # a split of a split
        assert backwards.gather_objects(comm.rank) == members[::-1]

    ranks.run(program)


# Time


def test_time_in_waits_adds_up_over_a_communicator_and_its_splits(ranks):
    def program(comm):
        parts = [comm.split(0, key=-comm.rank), comm.duplicate().split(0)]
        for part in parts:
            for _ in range(50):
                before, start = comm.waited_seconds, time.perf_counter()
                comm.barrier()
                if comm.rank == 0:
                    time.sleep(0.05)
                came = time.perf_counter()
                part.barrier()
                waited, elapsed = comm.waited_seconds - before, time.perf_counter() - start
                assert 0 <= waited <= elapsed
                # For the last to come, most likely rank 0; less where a rank was held up on its way into the wait.
                long_enough = waited >= max(comm.gather_objects(came)) - came - 0.01
                assert [each.waited_seconds for each in parts] == [comm.waited_seconds] * 2
                if all(comm.gather_objects(long_enough)):
                    break
            else:
                pytest.fail("no wait was counted as long as it was")

    ranks.run(program)


# What the door refuses, before anything is sent


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda comm, a: comm.broadcast(a, root=comm.size), "broadcast needs a root in 0..{last}, got {size}"),
        (lambda comm, a: comm.isend(a, dest=-1, tag=0), "isend needs a dest in 0..{last}, got -1"),
        (lambda comm, a: comm.irecv(a, source=comm.size, tag=0), "irecv needs a source in 0..{last}, got {size}"),
        (lambda comm, a: comm.isend(a, dest=0, tag=-1), "isend needs a tag in 0..{max_tag}, got -1"),
        (lambda comm, a: comm.irecv(a, source=0, tag=comm.max_tag + 1), "irecv needs a tag in 0..{max_tag}, got "),
        (
            lambda comm, a: comm.all_to_all(np.zeros(comm.size + 1)),
            "all_to_all needs one row for each of {ranks}, got shape",
        ),
        (
            lambda comm, a: comm.all_to_all(np.zeros(())),
            "all_to_all needs one row for each of {ranks}, got shape ()",
        ),
        (lambda comm, a: comm.split(color=-1), "split needs color >= 0, got -1"),
        (
            lambda comm, a: comm.reduce_scatter(np.zeros(comm.size + 1)) if comm.size > 1 else comm.reduce_scatter(a),
            "reduce_scatter needs a 1-D array whose size is divisible by the number of ranks, got shape",
        ),
        (
            lambda comm, a: comm.allgather_in_place(a),
            "allgather_in_place needs a 1-D array whose size is divisible by the number of ranks, got shape (2, 2)",
        ),
    ],
)
def test_values_out_of_range_are_refused(ranks, call, rule):
    def program(comm):
        message = rule.format(
            last=comm.size - 1, size=comm.size, ranks=counted(comm.size, "rank"), max_tag=comm.max_tag
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            call(comm, np.zeros((2, 2)))

    ranks.run(program)


ARRAY_CALLS = {
    "broadcast": lambda comm, array: comm.broadcast(array),
    "allreduce": lambda comm, array: comm.allreduce(array),
    "reduce_scatter": lambda comm, array: comm.reduce_scatter(array),
    "all_to_all": lambda comm, array: comm.all_to_all(array),
    "allgather": lambda comm, array: comm.allgather(array),
    "allgather_in_place": lambda comm, array: comm.allgather_in_place(array),
    "isend": lambda comm, array: comm.isend(array, dest=0, tag=0),
    "irecv": lambda comm, array: comm.irecv(array, source=0, tag=0),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ARRAY_CALLS)
def test_arrays_must_be_contiguous_numbers(ranks, name):
    def program(comm):
        call = ARRAY_CALLS[name]
        strided = rf"{name} needs a contiguous array, got shape \(2,\) with strides \(16,\)"
        with pytest.raises(ValueError, match=strided):
            call(comm, np.zeros(4)[::2])
        for array, kind in [([1.0], "list"), (np.float64(1), "float64"), (np.array([None]), "object")]:
            with pytest.raises(TypeError, match=f"{name} needs a NumPy or CuPy array of numbers, got {kind}"):
                call(comm, array)

    ranks.run(program)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["broadcast", "allreduce", "reduce_scatter", "allgather_in_place", "irecv"])
def test_arrays_that_are_written_must_be_writeable(ranks, name):
    def program(comm):
        array = np.zeros(3)
        array.flags.writeable = False
        with pytest.raises(ValueError, match=rf"{name} writes into its array, got a read-only one of shape \(3,\)"):
            ARRAY_CALLS[name](comm, array)

    ranks.run(program)


def test_read_only_arrays_are_sent_and_gathered(ranks):
    def program(comm):
        before, after = neighbours(comm)
        array = np.array([comm.rank])
        array.flags.writeable = False
        send = comm.isend(array, dest=after, tag=0)
        assert comm.recv(np.array([-1]), source=before, tag=0) == before
        send.wait()
        assert comm.allgather(array).wait().shape == (comm.size, 1)

    ranks.run(program)


@pytest.mark.parametrize("dtype", [bool, "complex64", ">f4", "S4"])
@pytest.mark.parametrize("name", ["allreduce", "reduce_scatter"])
def test_only_native_integers_and_floats_are_reduced(ranks, dtype, name):
    def program(comm):
        array = np.zeros(comm.size, dtype)
        with pytest.raises(
            TypeError, match=f"{name} reduces native integers and floats, got {re.escape(str(array.dtype))}"
        ):
            ARRAY_CALLS[name](comm, array)

    ranks.run(program)


@pytest.mark.parametrize("name", ["allreduce", "reduce_scatter"])
def test_a_mean_is_of_floats(ranks, name):
    def program(comm):
        with pytest.raises(TypeError, match=f"{name} by MEAN needs floats, got int64"):
            getattr(comm, name)(np.zeros(comm.size, np.int64), op=ReduceOp.MEAN)

    ranks.run(program)


# A single rank


def test_solo_wait_for_a_message_that_was_not_sent_raises():
    receive = SoloCommunicator().irecv(np.zeros(1), source=0, tag=5)
    with pytest.raises(RuntimeError, match="a single rank waits for a message to itself, tag 5, before it sends it"):
        receive.wait()


def test_solo_never_waits():
    comm = SoloCommunicator()
    part = comm.split(0)
    comm.allreduce(np.ones(1)).wait()
    comm.barrier()
    part.send(np.ones(1), dest=0, tag=0)
    part.recv(np.empty(1), source=0, tag=0)
    assert comm.waited_seconds == part.waited_seconds == 0


@pytest.mark.parametrize("abort", [lambda: SoloCommunicator().abort("no data"), lambda: LocalWorld(1).run(_abort)])
def test_abort_ends_the_program_with_rank_and_message(abort):
    with pytest.raises(SystemExit, match=r"\[rank 0\] no data"):
        abort()


def _abort(comm):
    comm.abort("no data")


@pytest.mark.parametrize("in_buffer", [False, True, "the first"])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("n", [0, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.int16])
def test_slices_are_gathered_in_place(ranks, n, dtype, in_buffer, together):
    def program(comm):
        size = comm.size * n
        memory = comm.buffer(2 * size + 1, dtype) if in_buffer else np.zeros(2 * size + 1, dtype)
        memory[:] = -1
        parts = [memory[1 + size :], memory[1 : 1 + size]]
        if in_buffer == "the first":
            parts[1] = parts[1].copy()
        for part, first in zip(parts, (0, 100), strict=True):
            part[comm.rank * n : (comm.rank + 1) * n] = np.arange(comm.rank * n, (comm.rank + 1) * n) + first
        works = [comm.allgather_in_place(*parts)] if together else [comm.allgather_in_place(part) for part in parts]
        for work, part in zip(works, parts, strict=False):
            assert work.wait() is part
        for part, first in zip(parts, (0, 100), strict=True):
            np.testing.assert_array_equal(part, np.arange(size) + first)
        assert memory[0] == -1

    ranks.run(program)


def test_several_gathers_at_once_keep_their_place_among_other_collectives(ranks):
    def program(comm):
        flats = [np.full(comm.size * n, float(comm.rank)) for n in (1 << 16, 1)]
        works = [comm.allgather_in_place(*flats)]
        if comm.rank % 2:
            works[0].wait()
        works.append(comm.allgather(np.array([comm.rank + 0.5])))
        works[0].wait()
        for flat in flats:
            np.testing.assert_array_equal(flat, np.repeat(np.arange(comm.size), len(flat) // comm.size))
        np.testing.assert_array_equal(works[1].wait()[:, 0], np.arange(comm.size) + 0.5)

    ranks.run(program)


def test_a_slice_of_a_buffer_is_reduced_to_slices(ranks):
    def program(comm):
        buffer = comm.buffer(3 * comm.size + 2, np.float64)
        for step in range(3):
            buffer[:] = np.arange(buffer.size) + comm.rank + step
            part = buffer[1 : 1 + 2 * comm.size]
            own = comm.reduce_scatter(part).wait()
            first = 1 + 2 * comm.rank
            expected = comm.size * (np.arange(first, first + 2) + step) + sum(range(comm.size))
            np.testing.assert_array_equal(own, expected)
            np.testing.assert_array_equal(buffer[first : first + 2], expected)

    ranks.run(program)
