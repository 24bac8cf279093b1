"""What is ours of NCCL's communicator, on threads: tags and sizes of messages, no deadlock, reductions as agreed.

NCCL itself is faked (`fake_cupy.py`); test_gpu_communicator.py has the same contract on GPUs.
"""

from __future__ import annotations

import threading
from typing import Any

import fake_cupy
import numpy as np
import pytest

import minigrad as mg
from distributed import LocalWorld, ReduceOp
from distributed.comm import transfer
from distributed.comm.nccl import NCCLCommunicator
from minigrad.models import gpt
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage

WORLDS = [
    pytest.param(size, synchronous, id=f"{size} {'synchronous' if synchronous else 'eager'}")
    for size in (2, 3)
    for synchronous in (False, True)
]
each_world = pytest.mark.parametrize(("size", "synchronous"), WORLDS)
each_way = pytest.mark.parametrize("cupy", ["nccl", "mailbox"], indirect=True)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Return the fake, where messages take this way: in a step that is captured they go by mailbox."""
    module = fake_cupy.install(monkeypatch)
    module.cuda.runtime.is_capturing = getattr(request, "param", "nccl") == "mailbox"
    return module


def run(size: int, program: Any, *, synchronous: bool = False, connected: bool = True) -> list[Any]:
    def on_rank(host: Any) -> Any:
        comm = NCCLCommunicator(host)
        if connected:
            comm.connect((a, b) for a in range(size) for b in range(size))
        result = program(comm)
        comm.barrier()
        return result

    return LocalWorld(size, synchronous_sends=synchronous, timeout_seconds=10).run(on_rank)


def test_arrays_of_a_single_rank_stay_on_the_gpu(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a captured step of `mpirun -n 1` would be refused: a graph has no copies to the host."""

    def program(comm: Any) -> None:
        array = cupy.full(5, 3.0, np.float32)
        for work in (comm.allreduce(array), comm.allreduce(array, op=ReduceOp.MEAN), comm.broadcast(array)):
            assert work.wait() is array
        assert comm.average(array).wait() is array
        assert array.get().tolist() == [3.0] * 5

    monkeypatch.setattr(transfer, "HostCopy", None)
    LocalWorld(1).run(program)


@each_way
@each_world
def test_messages_meet_by_tag_whatever_the_order_in_which_they_are_sent(
    cupy: Any, size: int, synchronous: bool
) -> None:
    def program(comm: Any) -> None:
        before, after = (comm.rank - 1) % size, (comm.rank + 1) % size
        arrays = [cupy.full((3, 4), 10 * comm.rank + tag, np.float32) for tag in range(6)]
        received = [cupy.zeros((3, 4), np.float32) for _ in range(6)]
        posted = {tag: comm.irecv(received[tag], source=before, tag=tag) for tag in (4, 0)}
        sends = [comm.isend(arrays[tag], dest=after, tag=tag) for tag in (3, 1, 0, 5, 4, 2)]
        for tag in (2, 5, 1, 3):  # what comes before them is nobody's yet
            posted[tag] = comm.irecv(received[tag], source=before, tag=tag)
        for tag in (5, 0, 2, 4, 3, 1):
            assert posted[tag].wait() is received[tag]
            assert (received[tag].get() == 10 * before + tag).all()
            assert posted[tag].test()
        for send, array in zip(sends, [arrays[tag] for tag in (3, 1, 0, 5, 4, 2)], strict=True):
            assert send.wait() is array

    run(size, program, synchronous=synchronous)


@each_way
@each_world
def test_messages_of_one_tag_come_in_order(cupy: Any, size: int, synchronous: bool) -> None:
    def program(comm: Any) -> None:
        before, after = (comm.rank - 1) % size, (comm.rank + 1) % size
        sends = [comm.isend(cupy.full(5, k, np.int64), dest=after, tag=7) for k in range(4)]
        works = [comm.irecv(cupy.zeros(5, np.int64), source=before, tag=7) for _ in range(4)]
        for k in (2, 0, 3, 1):
            assert (works[k].wait().get() == k).all()
        for send in sends:
            send.wait()

    run(size, program, synchronous=synchronous)


def test_progress_launches_receives_and_test_ends_them(cupy: Any) -> None:
    def program(comm: Any) -> None:
        if comm.rank == 0:
            sent = comm.isend(cupy.ones(4), dest=1, tag=0)
            comm.barrier()
            while not sent.test():
                pass
        else:
            work = comm.irecv(cupy.zeros(4), source=0, tag=0)
            comm.barrier()
            while work.arrived is None:
                comm.progress()
            while not work.test():
                pass
            assert (work.wait().get() == 1).all()

    run(2, program)


@each_way
@pytest.mark.parametrize("connected", [True, False])
def test_arrays_of_the_host_travel_too_and_to_oneself(cupy: Any, connected: bool) -> None:
    def program(comm: Any) -> None:
        other = 1 - comm.rank
        if connected:
            pairs = [(np.ones, cupy.zeros), (cupy.ones, np.zeros), (np.ones, np.zeros), (cupy.ones, cupy.zeros)]
        else:
            pairs = [(np.ones, np.zeros)]
        for tag, (sent, received) in enumerate(pairs):
            work = comm.isend(sent(6) * (comm.rank + 2), dest=other, tag=tag)
            array = comm.recv(received(6), source=other, tag=tag)
            assert (np.asarray(array) == other + 2).all()
            work.wait()
        own = comm.isend(np.arange(3), dest=comm.rank, tag=0)
        assert (comm.recv(np.zeros(3, int), source=comm.rank, tag=0) == np.arange(3)).all()
        own.wait()
        nothing = comm.isend(cupy.zeros(0) if connected else np.zeros(0), dest=other, tag=9)
        assert comm.recv(cupy.zeros(0) if connected else np.zeros(0), source=other, tag=9).size == 0
        nothing.wait()

    run(2, program, connected=connected)


@each_way
@pytest.mark.parametrize(("count", "word"), [(3, "shorter"), (5, "longer")])
def test_a_message_of_another_size_is_an_error_and_the_next_one_is_right(cupy: Any, count: int, word: str) -> None:
    def program(comm: Any) -> None:
        if comm.rank == 0:
            for work in [comm.isend(cupy.ones(n), dest=1, tag=0) for n in (count, 4)]:
                work.wait()
        else:
            with pytest.raises(ValueError, match=f"from rank 0, tag 0, is {word} than"):
                comm.recv(cupy.zeros(4), source=0, tag=0)
            assert (comm.recv(cupy.zeros(4), source=0, tag=0).get() == 1).all()

    run(2, program)


def test_what_waits_for_a_message_that_nobody_sends_says_so(cupy: Any) -> None:
    told = threading.Event()

    def on_rank(host: Any) -> None:
        comm = NCCLCommunicator(host)
        comm.connect([(0, 1)])
        if comm.rank == 1:
            host._job.timeout_seconds = 0.1  # from now on: so far the ranks have waited for each other
            with comm.waiting_for("the answer"):
                try:
                    comm.recv(cupy.zeros(4), source=0, tag=0)
                finally:
                    told.set()
        told.wait()

    with pytest.raises(TimeoutError, match=r"recv from 0 .*for the answer"):
        LocalWorld(2).run(on_rank)


def test_ranks_that_connect_others_are_told(cupy: Any) -> None:
    def on_rank(host: Any) -> None:
        comm = NCCLCommunicator(host)
        with pytest.raises(ValueError, match="connect needs the same pairs on every rank"):
            comm.connect([(0, comm.rank)])
        comm.connect([(0, 1)])
        with pytest.raises(RuntimeError, match="once of a communicator"):
            comm.connect([(0, 1)])

    LocalWorld(2).run(on_rank)


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("dtype", ["int8", "int16", "int64", "float16", "float32", "float64", "bfloat16"])
def test_reductions_are_those_of_the_host(cupy: Any, op: ReduceOp, dtype: str) -> None:
    kind = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    if op is ReduceOp.MEAN and np.dtype(kind).kind == "i":
        pytest.skip("a mean is of floats")

    def program(comm: Any) -> None:
        values = ((np.arange(12) - 5) * (comm.rank + 1)).astype(kind)
        if np.dtype(kind).kind != "i":
            values[comm.rank] = np.nan
            values[4:7] = [np.inf, -np.inf, -0.0][comm.rank :] + [np.inf, -np.inf, -0.0][: comm.rank]
        with np.errstate(invalid="ignore"):
            expected = comm.allreduce(values.copy(), op=op).wait()
            found = comm.allreduce(cupy.asarray(values).copy(), op=op).wait()
            own = comm.reduce_scatter(cupy.asarray(values).copy(), op=op).wait()
            expected_own = comm.reduce_scatter(values.copy(), op=op).wait()
        for got, want in ((found, expected), (own, expected_own)):
            np.testing.assert_array_equal(np.asarray(got).astype(np.float64), want.astype(np.float64))

    run(3, program, connected=False)


def test_average_is_one_reduction_and_has_the_bits_of_a_weighted_sum(cupy: Any) -> None:
    def program(comm: Any) -> None:
        values = (np.arange(1, 101) * (comm.rank + 1) / 7).astype(np.float32)
        weighted = comm.allreduce(values * np.float32(1 / 3)).wait()
        found = cupy.asarray(values).copy()
        assert comm.average(found).wait() is found
        np.testing.assert_array_equal(np.asarray(found), weighted)
        flat = np.tile(values, 3)
        own = comm.average(cupy.asarray(flat).copy(), everywhere=False).wait()
        np.testing.assert_array_equal(np.asarray(own), weighted)
        half = cupy.asarray(values).astype(np.float16)
        np.testing.assert_allclose(np.asarray(comm.average(half).wait()), weighted, rtol=2e-3)

    run(3, program, connected=False)


@pytest.mark.parametrize("with_host", [False, True])
@pytest.mark.parametrize("sizes", [(1, 5, 2), (0, 5, 0), (0,)], ids=str)
def test_slices_of_several_arrays_are_gathered_in_place(cupy: Any, sizes: tuple[int, ...], with_host: bool) -> None:
    def program(comm: Any) -> None:
        wholes = [np.arange(3 * n, dtype=np.float32) + n for n in sizes]
        flats = []
        for whole in wholes:
            flat = cupy.asarray(np.full_like(whole, -1)).copy()
            own = slice(comm.rank * whole.size // 3, (comm.rank + 1) * whole.size // 3)
            flat[own] = cupy.asarray(whole[own])
            flats.append(flat)
        if with_host:  # all by way of it then
            flats[-1] = np.array(flats[-1])
        assert comm.allgather_in_place(*flats).wait() is flats[0]
        for flat, whole in zip(flats, wholes, strict=True):
            np.testing.assert_array_equal(np.asarray(flat), whole)

    run(3, program, connected=False)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_pipeline_runs_over_it_as_over_its_host(cupy: Any, schedule: str) -> None:
    config = gpt.GPTConfig(vocab_size=17, context=6, num_layers=4, num_heads=2, width=8)
    ids = np.random.default_rng(0).integers(0, 17, (4, 7))

    def program(comm: Any) -> Any:
        order = SCHEDULES[schedule]
        stages = PipelineStage.of(gpt.layers(config), comm, order)
        pipe = PipelineExecutor(stages, comm, order, num_microbatches=4, loss_fn=mg.cross_entropy)
        losses = [pipe.step(ids[:, :-1], ids[:, 1:]) for _ in range(2)]
        return losses, {p.name: p.grad.copy() for p in stages.parameters()}

    plain = LocalWorld(2).run(program)
    for (losses, grads), (found, found_grads) in zip(plain, run(2, program, connected=False), strict=True):
        assert losses == found
        for name, grad in grads.items():
            np.testing.assert_array_equal(found_grads[name], grad, err_msg=name)
