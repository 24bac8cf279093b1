"""Reduction through memory that the ranks of a host share.

Threads take the part of processes where only the steps matter; under mpirun the memory is a window of MPI. One host
passes for several by an argument.
"""

import platform
import shutil
import time
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from wide_sums import in_both_dtypes, wide_bytes

from distributed import DistributedDataParallel, LocalWorld, ReduceOp, SoloCommunicator, launched_by_mpi
from distributed.comm.mpi.shared_memory import HEADER_BYTES, SharedBuffer, SharedWindow
from distributed.comm.mpi.staging import Staging
from distributed.comm.mpi.windows import lack_of_shared_files, lack_of_space, map_shared_file, share_file
from minigrad import backward_with_hooks
from minigrad.models import MLP
from minigrad.optim import SGD

under_mpirun = pytest.mark.skipif(not launched_by_mpi(), reason="about processes")


# With threads: the steps, in any order


def make_buffers(num_ranks, num_bytes):
    parts = [np.zeros(HEADER_BYTES + num_bytes, np.uint8) for _ in range(num_ranks)]
    return [SharedBuffer(SharedWindow(rank, parts, lambda: None), num_ranks, None) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(20))
def test_any_interleaving_of_ranks_and_operations_gives_the_sums(num_ranks, seed):
    chance = np.random.default_rng(seed)
    buffers = make_buffers(num_ranks, 8 * 40)
    memories = [buffer.memory.view(np.float64) for buffer in buffers]
    pending = []
    for rank, (buffer, memory) in enumerate(zip(buffers, memories, strict=True)):
        memory[:] = np.arange(40) * (rank + 1)
        pending += [(rank, k, buffer.allreduce(memory[10 * k : 10 * k + 9], ReduceOp.SUM)) for k in range(4)]
    launches = sorted(pending, key=lambda entry: entry[1])  # each rank launches in order
    under_way = []
    for _ in range(10_000):  # far more than it takes
        if launches and chance.random() < 0.3:
            candidates = {rank: entry for entry in reversed(launches) for rank in [entry[0]]}
            entry = candidates[chance.choice(list(candidates))]
            launches.remove(entry)
            under_way.append(entry)
        elif under_way:
            entry = under_way[chance.integers(len(under_way))]
        else:
            continue
        if next(entry[2], "end") == "end":  # a step yields None
            under_way.remove(entry)
    assert not under_way
    factor = np.full(40, num_ranks * (num_ranks + 1) / 2)
    for rank, memory in enumerate(memories):
        untouched = np.arange(40) % 10 == 9
        expected = np.arange(40) * np.where(untouched, rank + 1, factor)
        np.testing.assert_array_equal(memory, expected)


@pytest.mark.parametrize("seed", range(40))
def test_operations_on_the_same_memory_take_turns_on_all_ranks(seed):
    # Elements change hands: of the first operation rank 0 has 0 to 3, of the second one 0 and 1. A rank that had worked
    # on the first one went on with the second, and read what another one was about to write.
    chance = np.random.default_rng(seed)
    buffers = make_buffers(2, 8 * 8)
    memories = [buffer.memory.view(np.float64) for buffer in buffers]
    for memory in memories:
        memory[:] = 1
    steps = {}
    for rank, (buffer, memory) in enumerate(zip(buffers, memories, strict=True)):
        for number, part in enumerate((memory, memory[:4], memory[3:], memory[:1])):
            steps[rank, number] = buffer.allreduce(part, ReduceOp.SUM)
    finished(steps, chance)
    np.testing.assert_array_equal(memories, [[8, 4, 4, 8, 4, 4, 4, 4]] * 2)


def test_a_rank_reads_nothing_of_which_another_has_yet_to_write_its_slice():
    buffers = make_buffers(2, 8 * 4)
    memories = [buffer.memory.view(np.float64) for buffer in buffers]
    for memory in memories:
        memory[:] = 1
    first = [buffer.allreduce(memory, ReduceOp.SUM) for buffer, memory in zip(buffers, memories, strict=True)]
    second = [buffer.allreduce(memory[:1], ReduceOp.SUM) for buffer, memory in zip(buffers, memories, strict=True)]
    for step in (first[0], second[0], first[1], second[1], first[1], second[1], second[1]):
        next(step)  # rank 0 has launched both, and works on neither; rank 1 has the only slice of the second
    assert [memory[0] for memory in memories] == [1, 1]


def finished(steps, chance):
    """Run the steps of operations, (rank, number) -> steps, in any order but that of each rank's launches."""
    results, waiting, under_way = {}, sorted(steps, key=lambda key: key[1]), []
    while waiting or under_way:
        if waiting and (not under_way or chance.random() < 0.3):
            first = {rank: (rank, number) for rank, number in reversed(waiting)}
            key = first[int(chance.choice(list(first)))]
            waiting.remove(key)
            under_way.append(key)  # and runs to its first wait, as an engine starts it
        else:
            key = under_way[chance.integers(len(under_way))]
        try:
            next(steps[key])
        except StopIteration as end:
            results[key] = end.value.copy()
            under_way.remove(key)
    return results


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(10))
def test_gathers_among_sums_write_each_slice_to_all(num_ranks, seed):
    buffers = make_buffers(num_ranks, 8 * 8 * num_ranks)
    memories = [buffer.memory.view(np.float64).reshape(4, -1) for buffer in buffers]
    steps = {}
    for rank, (buffer, memory) in enumerate(zip(buffers, memories, strict=True)):
        memory[:] = rank + 1
        for number, row in enumerate(memory):
            halves = [row[:num_ranks], row[num_ranks:]]
            steps[rank, number] = buffer.allgather(halves) if number % 2 else buffer.allreduce(row, ReduceOp.SUM)
    finished(steps, np.random.default_rng(seed))
    for memory in memories:
        np.testing.assert_array_equal(memory[::2], num_ranks * (num_ranks + 1) / 2)
        np.testing.assert_array_equal(memory[1::2], [np.tile(np.arange(num_ranks) + 1.0, 2)] * 2)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(10))
def test_what_is_longer_than_the_staging_memory_goes_through_in_pieces(num_ranks, seed):
    chance = np.random.default_rng(seed)
    stagings = [Staging(buffer, rank, num_ranks) for rank, buffer in enumerate(make_buffers(num_ranks, 64 * num_ranks))]
    arrays = chance.standard_normal((3, num_ranks, 19 * num_ranks)).astype(np.float32)  # 16 numbers a slice and piece
    expected = [np.mean(ranks, axis=0, dtype=np.float32).reshape(num_ranks, -1) for ranks in arrays]
    given = arrays.copy()
    results = finished(
        {
            (rank, number): stagings[rank].reduce_scatter(given[number, rank], ReduceOp.MEAN)
            for rank in range(num_ranks)
            for number in range(3)
        },
        chance,
    )
    for (rank, number), own in results.items():
        np.testing.assert_allclose(own, expected[number][rank], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(given[number, rank].reshape(num_ranks, -1)[rank], own)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_each_rank_says_for_itself_which_of_its_values_are_wide(num_ranks, everywhere, seed):
    chance = np.random.default_rng(seed)
    n = 4 * num_ranks
    places = np.split(np.arange(4 * (12 * n + 8)), 4)  # of each operation: n wide ones, n narrow ones, a word
    buffers = make_buffers(num_ranks, 4 * (12 * n + 8))
    values = chance.standard_normal((num_ranks, 4, n)).astype(np.float32)
    is_wide = chance.integers(0, 2, (num_ranks, 4))
    steps = {}
    for rank, buffer in enumerate(buffers):
        for number, place in enumerate(places):
            own = buffer.memory[place[0] : place[-1] + 1]
            wide, narrow, rest = in_both_dtypes(own, n)
            flag = rest[:1]
            flag[0] = is_wide[rank, number]
            wide[:], narrow[:] = np.nan, 7
            (wide if flag[0] else narrow)[:] = values[rank, number]
            steps[rank, number] = buffer.sum_widely(narrow, wide, flag, everywhere=everywhere)
    for (rank, number), found in finished(steps, chance).items():
        own = slice(None) if everywhere else slice(4 * rank, 4 * rank + 4)
        expected = values[:, number].sum(axis=0, dtype=np.float64).astype(np.float32)
        np.testing.assert_array_equal(found[own], expected[own])


def test_a_rank_is_done_only_when_all_are():
    first, second = make_buffers(2, 8)
    arrays = [each.memory.view(np.float64) for each in (first, second)]
    arrays[0][0], arrays[1][0] = 1, 2
    steps = [each.allreduce(array, ReduceOp.SUM) for each, array in zip((first, second), arrays, strict=True)]
    for _ in range(3):
        next(steps[0])  # the other one has not arrived
    assert [array[0] for array in arrays] == [1, 2]
    assert next(steps[1]) is None  # the slice of rank 1 is that element; rank 0 has not said that its own is done
    assert [array[0] for array in arrays] == [3, 3]
    assert next(steps[0], "end") == "end"
    assert next(steps[1], "end") == "end"


def test_what_is_announced_is_fenced_from_what_it_announces():
    """Elsewhere than on x86 a counter may be seen before the numbers that it stands for, or these be read before it."""
    part = np.zeros(HEADER_BYTES + 8, np.uint8)
    seen = []
    fence = lambda: seen.append((*part[:16].view(np.int64), part[HEADER_BYTES]))  # noqa: E731
    buffer = SharedBuffer(SharedWindow(0, [part, part.copy()], fence), 2, None)
    other = buffer._counters[1]
    buffer.memory[:] = 3
    steps = buffer.allreduce(buffer.memory, ReduceOp.SUM)
    other[:] = 1
    assert next(steps, "end") == "end"
    assert seen == [(0, 0, 3), (1, 0, 3), (1, 0, 3), (1, 1, 3)]


def test_a_reduction_to_slices_writes_each_rank_its_own_and_nothing_else():
    buffers = make_buffers(2, 32)
    arrays = [buffer.memory.view(np.float64) for buffer in buffers]
    for rank, array in enumerate(arrays):
        array[:] = np.arange(4) + 10 * rank
    steps = [buffer.reduce_scatter(array, ReduceOp.MEAN) for buffer, array in zip(buffers, arrays, strict=True)]
    results = [None, None]
    while any(result is None for result in results):
        for rank in (0, 1):
            if results[rank] is None:
                try:
                    next(steps[rank])
                except StopIteration as end:
                    results[rank] = end.value
    np.testing.assert_array_equal(results, [[5, 6], [7, 8]])
    np.testing.assert_array_equal(arrays, [[5, 6, 2, 3], [10, 11, 7, 8]])
    assert np.shares_memory(results[1], arrays[1])


class Elsewhere:
    """The other hosts: each sum comes back when a test lets it."""

    def __init__(self):
        self.arrived = []

    def allreduce(self, total, *, op):
        there = [False]
        self.arrived.append(there)
        return SimpleNamespace(test=lambda: there[0])


def test_what_other_hosts_send_out_of_order_is_announced_in_order():
    elsewhere = Elsewhere()
    part = np.zeros(HEADER_BYTES + 16, np.uint8)
    buffer = SharedBuffer(SharedWindow(0, [part], lambda: None), 2, elsewhere)
    array = buffer.memory.view(np.float64)
    first, second = (buffer.allreduce(array[k : k + 1], ReduceOp.SUM) for k in range(2))
    next(first)
    next(second)
    elsewhere.arrived[1][0] = True
    assert next(second, "end") is None
    elsewhere.arrived[0][0] = True
    assert next(first, "end") == "end"
    assert next(second, "end") == "end"


def test_an_array_is_told_from_one_elsewhere():
    (buffer,) = make_buffers(1, 80)
    memory = buffer.memory.view(np.float64)
    assert buffer.holds(memory)
    assert buffer.holds(memory[3:4].reshape(1, 1))
    assert not buffer.holds(memory[:0])
    assert not buffer.holds(np.zeros(10))
    assert not buffer.holds(buffer._window.parts[0][HEADER_BYTES - 1 : HEADER_BYTES])


# With processes


def make(**settings):
    from mpi4py import MPI

    from distributed.comm.mpi.communicator import MPICommunicator
    from distributed.comm.settings import Settings

    return MPICommunicator(MPI.COMM_WORLD.Dup, Settings(**settings))


def rank_0_warns(comm, match):
    return pytest.warns(UserWarning, match=match) if comm.rank == 0 else nullcontext()


def in_window(comm, buffer):
    return any(shared.holds(buffer) for shared in comm._shared)


def averages(comm, dtype):
    """Reduce slices of a buffer in several ways, several at once; return all bytes."""
    buffer = comm.buffer(10_000, dtype)
    values = np.random.default_rng(comm.rank).standard_normal(10_000).astype(dtype)
    found = []
    for op in ReduceOp:
        buffer[:] = values
        parts = [buffer[:1], buffer[1:3], buffer[3:8000], buffer[8000:].reshape(2, -1)]
        works = [comm.allreduce(part, op=op) for part in parts]
        for i in np.random.default_rng(comm.rank).permutation(4):
            comm.progress()
            works[i].wait()
        found.append(buffer.tobytes())
    return found


@under_mpirun
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_a_window_reduces_in_rank_order(ranks, dtype):
    def program(comm):
        comm = comm.duplicate()
        found = averages(comm, dtype)
        assert len(comm._shared) == 1
        assert found == LocalWorld(comm.size).run(averages, dtype)[comm.rank]

    ranks.run(program)


@under_mpirun
@pytest.mark.ranks(2, 3, 4)
def test_gradients_of_replicas_lie_in_a_window(ranks):
    """What they are reduced from; the numbers would be the same from anywhere, and the time would not."""

    def program(comm):
        ddp = DistributedDataParallel(MLP([3, 5, 2]), comm)
        for bucket in ddp.buckets.buckets:
            assert in_window(ddp.comm, bucket.range.grad)
        assert all(in_window(ddp.comm, p.grad_view()) for p in ddp.params)

    ranks.run(program)


@under_mpirun
@pytest.mark.ranks(2, 3, 4)
def test_exact_sums_are_taken_in_a_window(ranks):
    """Sums lie beside gradients, which are no sums where each is one contribution: nothing wide is written then."""

    def train(comm):
        model = MLP([3, 5, 2])
        ddp = DistributedDataParallel(model, comm, sums="exact", bucket_bytes=40)
        x = np.random.default_rng(comm.rank).standard_normal((4, 3)).astype(np.float32)
        backward_with_hooks(model(x).sum(), ddp.hooks(num_samples=4))
        ddp.wait()
        return ddp, [p.grad.tobytes() for p in ddp.params]

    def program(comm):
        ddp, grads = train(comm)
        assert all(in_window(ddp.comm, p.grad_view()) for p in ddp.params)
        for flat in {p.flat for p in ddp.params}:
            assert in_window(ddp.comm, flat.sums)
            assert not flat.sums.any()
        return grads

    expected = LocalWorld(ranks.size).run(lambda comm: train(comm)[1])
    ranks.run(lambda comm: np.testing.assert_equal(program(comm), expected[comm.rank]))


@under_mpirun
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("zero", [1, 2])
def test_with_shards_values_lie_in_a_window_and_gradients_pass_through_one(ranks, zero):
    def program(comm):
        ddp = DistributedDataParallel(MLP([3, 5, 2]), comm, zero=zero)
        for _ in range(2):  # the second finds them there
            ddp.optimizer(SGD(0.1))
        assert all(in_window(ddp.comm, p.data) for p in ddp.params)
        assert len(ddp.comm._shared) == (2 if zero == 1 else 1)
        assert (ddp.comm._staging is None) == (zero == 1)
        staging = ddp.comm._staging
        if staging is not None:
            ddp.comm.stage_reductions()
            assert ddp.comm._staging is staging

    ranks.run(program)


def scattered(comm, dtype):
    """Reduce arrays to slices, several at once, some longer than what they pass through; return all bytes."""
    comm.stage_reductions()
    lengths = (7, 2**19, 0, 1)
    arrays = [np.random.default_rng([comm.rank, n]).standard_normal(comm.size * n).astype(dtype) for n in lengths]
    copies = [(op, array.copy()) for op in ReduceOp for array in arrays]
    works = [comm.reduce_scatter(array, op=op) for op, array in copies]
    for work in reversed(works):
        work.wait()
    return [np.split(array, comm.size)[comm.rank].tobytes() for _, array in copies]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_staged_reductions_are_in_rank_order(ranks, dtype):
    def program(comm):
        comm = comm.duplicate()
        return scattered(comm, dtype)

    if launched_by_mpi():
        by_rank = LocalWorld(ranks.size).run(scattered, dtype)
        ranks.run(lambda comm: np.testing.assert_equal(program(comm), by_rank[comm.rank]))
    else:
        ranks.run(program)


@under_mpirun
@pytest.mark.ranks(4)
@pytest.mark.parametrize("hosts", ["aabb", "abab"])
def test_over_hosts_wide_sums_are_rounded_once(ranks, hosts):
    def program(comm):
        comm = make(hosts=hosts)
        wide, narrow, flags = in_both_dtypes(comm.buffer(wide_bytes(1000, num_flags=2), np.uint8), 1000)
        values = np.random.default_rng(comm.rank).standard_normal(1000).astype(np.float32)
        expected = np.sum(comm.allgather(values).wait(), axis=0, dtype=np.float64)
        for _ in range(3):
            narrow[:] = wide[:] = values
            (wide if comm.rank % 3 else narrow)[:] = np.nan
            flags[:] = comm.rank % 3 == 0
            halves = slice(500), slice(500, 1000)
            works = [comm.sum_widely(narrow[own], wide[own], flags[k : k + 1]) for k, own in enumerate(halves)]
            for work in works:
                work.wait()
            np.testing.assert_allclose(narrow, expected, rtol=2**-24)

    ranks.run(program)


@under_mpirun
@pytest.mark.ranks(4)
@pytest.mark.parametrize("hosts", ["aabb", "abab"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_over_hosts_slices_are_summed_between_them(ranks, hosts, dtype):
    def program(comm):
        comm = make(hosts=hosts)
        buffer = comm.buffer(1003, dtype)
        assert in_window(comm, buffer)
        for op in ReduceOp:
            for _ in range(3):
                buffer[:] = np.arange(1003) % 50 + comm.rank
                halves = [comm.allreduce(buffer[:500], op=op), comm.allreduce(buffer[500:], op=op)]
                halves[(comm.rank + 1) % 2].wait()
                halves[comm.rank % 2].wait()
                n = np.arange(1003) % 50
                expected = {
                    ReduceOp.SUM: 4 * n + 6,
                    ReduceOp.MEAN: n + 1.5,
                    ReduceOp.MIN: n,
                    ReduceOp.MAX: n + 3,
                }
                np.testing.assert_array_equal(buffer, expected[op].astype(dtype))

    ranks.run(program)


@under_mpirun
@pytest.mark.ranks(4)
@pytest.mark.parametrize("hosts", ["aabb", "abab"])
def test_over_hosts_slices_alone_travel_in_messages(ranks, hosts):
    def program(comm):
        comm = make(hosts=hosts)
        buffer = comm.buffer(8, np.float64)
        comm.stage_reductions()
        own = slice(2 * comm.rank, 2 * comm.rank + 2)
        for array in (buffer, np.empty(8)):
            array[:] = np.arange(8) + comm.rank
            np.testing.assert_array_equal(comm.reduce_scatter(array).wait(), 4 * np.arange(8)[own] + 6)
            comm.allgather_in_place(array).wait()
            np.testing.assert_array_equal(array, 4 * np.arange(8) + 6)
        wide, narrow, is_wide = in_both_dtypes(comm.buffer(wide_bytes(8), np.uint8), 8)
        narrow[:] = np.arange(8) + comm.rank
        comm.sum_widely(narrow, wide, is_wide, everywhere=False).wait()
        np.testing.assert_array_equal(narrow[own], 4 * np.arange(8)[own] + 6)

    ranks.run(program)


@under_mpirun
@pytest.mark.ranks(4)
@pytest.mark.parametrize("hosts", ["aabb", "abab"])
def test_over_hosts_halves_are_rounded_once(ranks, hosts):
    def program(comm):
        comm = make(hosts=hosts)
        buffer = comm.buffer(5, np.float16)
        for op, expected in [(ReduceOp.SUM, 2050), (ReduceOp.MEAN, 512.5)]:
            buffer[:] = [2048, 1, 1, 0][comm.rank]  # 2048 + 1 is 2048 in float16
            assert (comm.allreduce(buffer, op=op).wait() == expected).all()

    ranks.run(program)


@under_mpirun
@pytest.mark.ranks(3)
def test_hosts_with_unequal_numbers_of_ranks_get_a_plain_array(ranks):
    def program(comm):
        comm = make(hosts="aab")
        rule = "what ranks reduce and gather travels in messages, not shared memory: hosts have 1 or 2 ranks"
        with rank_0_warns(comm, rule):
            buffer = comm.buffer(10, np.float32)
        assert not in_window(comm, buffer)
        assert (comm.allreduce(buffer + 1).wait() == 3).all()

    ranks.run(program)


@under_mpirun
@pytest.mark.ranks(2, 3, 4)
def test_where_nothing_can_be_shared_the_array_is_plain(ranks):
    def program(comm):
        apart = make(hosts=[str(rank) for rank in range(comm.size)])
        assert not in_window(apart, apart.buffer(10, np.float32))
        if comm.size == 4:
            ordered = make(hosts="aabb", deterministic=True)  # host by host is not rank by rank
            assert not in_window(ordered, ordered.buffer(10, np.float32))
        assert not in_window(comm, np.zeros(10))
        here = make(deterministic=True)
        assert in_window(here, here.buffer(10, np.float32))  # summed in rank order there too
        num_windows = len(comm._shared)
        comm.buffer(0, np.float32)
        assert len(comm._shared) == num_windows

    ranks.run(program)


@pytest.mark.skipif(lack_of_shared_files() is not None, reason="no shared files here")
def test_each_part_of_a_shared_file_begins_a_cache_line():
    """Else what is in it has no address that its dtype allows, and MPI refuses it."""

    def program(comm):
        window, failure = share_file(comm, 101)
        assert failure is None
        return [(part.nbytes >= 101, part.ctypes.data % 64) for part in window.parts]

    assert LocalWorld(3).run(program) == [[(True, 0)] * 3] * 3


@pytest.mark.skipif(lack_of_shared_files() is not None, reason="no shared files here")
def test_a_shared_file_is_removed_once_all_have_it(monkeypatch, tmp_path):
    def late(path, rank, *rest):
        time.sleep(0.05 * rank)
        return map_shared_file(path, rank, *rest)

    monkeypatch.setattr("distributed.comm.mpi.windows._FOLDER", tmp_path)
    monkeypatch.setattr("distributed.comm.mpi.windows.map_shared_file", late)
    windows = [window for window, _ in LocalWorld(3).run(lambda comm: share_file(comm, 8))]
    for rank, window in enumerate(windows):
        window.parts[rank][:] = rank + 1
    assert [[part[0] for part in window.parts] for window in windows] == [[1, 2, 3]] * 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(lack_of_shared_files() is not None, reason="no shared files here")
@pytest.mark.parametrize("fault", ["made", "mapped"])
def test_a_file_that_one_rank_cannot_have_is_shared_by_none_and_goes(monkeypatch, tmp_path, fault):
    """Where containers have a /dev/shm each, the others find no such file: they raised, and rank 0 waited."""

    def fail(path, rank, *rest):
        if fault == "made" or rank == 1:
            raise FileNotFoundError(2, "No such file or directory")
        return map_shared_file(path, rank, *rest)

    monkeypatch.setattr("distributed.comm.mpi.windows._FOLDER", tmp_path)
    name = "new_shared_file" if fault == "made" else "map_shared_file"
    monkeypatch.setattr(f"distributed.comm.mpi.windows.{name}", fail if fault == "mapped" else lambda _: fail("", 0))
    found = LocalWorld(3).run(lambda comm: share_file(comm, 8))
    assert [window for window, _ in found] == [None] * 3
    (failure,) = {failure for _, failure in found}
    assert f"cannot be {fault}: [Errno 2] No such file or directory" in failure
    assert list(tmp_path.iterdir()) == []


def test_shared_files_are_for_systems_that_keep_them_in_memory_and_writes_in_order(monkeypatch, tmp_path):
    monkeypatch.setattr("distributed.comm.mpi.windows._FOLDER", tmp_path)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert lack_of_shared_files() is None
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert "x86 processors, which keep writes in order, not for arm64" in str(lack_of_shared_files())
    monkeypatch.setattr("distributed.comm.mpi.windows._FOLDER", tmp_path / "shm")
    assert lack_of_shared_files() == f"this system has no {tmp_path / 'shm'}"
    assert share_file(SoloCommunicator(), 8) == (None, f"this system has no {tmp_path / 'shm'}")
    assert lack_of_space(1 << 60) is None  # MPI knows where it puts windows


@under_mpirun
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("fault", ["space", "space on the last rank", "window"])
def test_a_window_that_cannot_be_made_is_done_without(ranks, monkeypatch, fault):
    from mpi4py import MPI

    def refuse(*args, **kwargs):
        raise MPI.Exception(MPI.ERR_INTERN)

    def program(comm):
        comm = comm.duplicate()
        if fault == "window":
            monkeypatch.setattr(MPI, "Win", SimpleNamespace(Allocate_shared=refuse))
            rule = "not shared memory: .*internal"
        else:
            if fault == "space" or comm.rank == comm.size - 1:
                monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=7 << 20))
            rule = f"not shared memory: /dev/shm has 7 MiB free, and {4 * comm.size + 1} MiB are needed"
        with rank_0_warns(comm, f"(?i){rule}"):
            buffer = comm.buffer(1 << 20, np.float32)
        assert not in_window(comm, buffer)
        buffer[:] = 1
        assert (comm.allreduce(buffer).wait() == comm.size).all()

    ranks.run(program)


@under_mpirun
@pytest.mark.ranks(2, 3, 4)
def test_a_window_that_one_rank_alone_cannot_have_is_done_without(ranks, monkeypatch):
    """The others, who had it, waited for that one in another collective."""

    def allocate(mpi, comm, num_bytes):
        rank = comm.Get_rank()
        if rank == comm.Get_size() - 1:
            return None, "no room"
        return SharedWindow(rank, [np.zeros(num_bytes, np.uint8)] * comm.Get_size(), lambda: None), None

    monkeypatch.setattr("distributed.comm.mpi.communicator.allocate_shared", allocate)

    def program(comm):
        comm = comm.duplicate()
        with rank_0_warns(comm, "not shared memory: no room"):
            buffer = comm.buffer(10, np.float32)
        assert not in_window(comm, buffer)

    ranks.run(program)


@under_mpirun
@pytest.mark.ranks(2, 3, 4)
def test_a_late_rank_is_waited_for_and_others_are_served_meanwhile(ranks):
    def program(comm):
        comm = comm.duplicate()
        buffer = comm.buffer(1 << 18, np.float32)
        for step in range(5):
            buffer[:] = comm.rank + step
            if comm.rank == step % comm.size:
                time.sleep(0.02)
            work = comm.allreduce(buffer)
            other = comm.allreduce(np.ones(1))
            assert other.wait() == comm.size
            assert (work.wait() == comm.size * step + comm.size * (comm.size - 1) // 2).all()

    ranks.run(program)


@under_mpirun
@pytest.mark.ranks(2, 3, 4)
def test_long_buffers_go_in_pieces_and_dropped_work_is_finished(ranks):
    def program(comm):
        comm = comm.duplicate()
        comm.max_message_elements = 1000
        buffer = comm.buffer(2500, np.float32)
        buffer[:] = 1
        comm.allreduce(buffer)
        comm.allreduce(np.ones(1)).wait()
        comm.allreduce(buffer[:1]).wait()  # the same window, so after what was dropped
        comm.barrier()
        assert buffer[0] == comm.size**2
        assert (buffer[1:] == comm.size).all()

    ranks.run(program)
