"""CuPy arrays through communicators: right where the MPI reads GPU memory and where it does not.

mpirun -n 2 python -m pytest -m gpu tests           through pinned memory, or by an MPI that reads GPU memory
mpirun -n 2 python -m pytest -m gpu --nccl tests    through NCCL, where there are two GPUs
"""

import numpy as np
import pytest

from distributed import DistributedDataParallel, ReduceOp, SoloCommunicator
from distributed.comm.nccl import NCCLCommunicator
from minigrad.cuda_graph import CapturedStep
from minigrad.models import GPT, GPTConfig
from minigrad.optim import AdamW, Optimizer
from minigrad.precision import use_precision

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu


def test_an_array_whose_kernels_still_run_is_reduced_right(ranks):
    """An MPI that is handed the array too early, or the host copy of it, gives a sum of old values."""

    def program(comm):
        stream = cupy.cuda.Stream(non_blocking=True)
        slow = cupy.ones((2048, 2048), np.float32)
        array = cupy.empty(1 << 22, np.float32)
        for k in range(1, 51):
            with stream:
                for _ in range(20):
                    slow = cupy.matmul(slow, slow) * np.float32(0)
                array.fill((comm.rank + 1) * k)
                assert comm.allreduce(array, op=ReduceOp.MEAN).wait() is array
                total = array + slow[0, 0]  # on the same stream, at once
                mean = k * (comm.size + 1) / 2
                assert bool((total == np.float32(mean)).all()), k

    ranks.run(program)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("limit", [7, 2**31 - 1])
def test_collectives_take_arrays_of_the_gpu(ranks, dtype, limit):
    def program(comm):
        comm = comm.duplicate()
        comm.max_message_elements = limit
        n = np.arange(12)
        mine = cupy.asarray(n + comm.rank, dtype)
        mean = n + (comm.size - 1) / 2
        sources = np.arange(comm.size)[:, None]
        array = mine.copy().reshape(3, 4)
        assert comm.allreduce(array, op=ReduceOp.MEAN).wait() is array
        np.testing.assert_array_equal(array.get(), mean.reshape(3, 4).astype(dtype))
        assert (comm.broadcast(mine.copy(), root=comm.size - 1).wait().get() == n + comm.size - 1).all()
        gathered = comm.allgather(mine.reshape(3, 4)).wait()
        assert isinstance(gathered, cupy.ndarray)
        np.testing.assert_array_equal(gathered.get().reshape(comm.size, 12), n + sources)
        rows = cupy.stack([mine + 20 * dest for dest in range(comm.size)])
        exchanged = comm.all_to_all(rows.astype(dtype)).wait()
        np.testing.assert_array_equal(exchanged.get(), n + sources + 20 * comm.rank)
        flat = cupy.tile(mine, comm.size)
        own = comm.reduce_scatter(flat, op=ReduceOp.MAX).wait()
        np.testing.assert_array_equal(own.get(), n + comm.size - 1)
        own[:] = -1  # a view
        assert (flat[12 * comm.rank : 12 * (comm.rank + 1)] == -1).all()
        assert comm.allreduce(cupy.empty(0, dtype)).wait().shape == (0,)

    ranks.run(program)


@pytest.mark.point_to_point
def test_messages_take_arrays_of_the_gpu(ranks):
    def program(comm):
        before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        sent = cupy.full((3, 1 << 20), comm.rank, np.float32)
        received = cupy.full_like(sent, -1)
        work = comm.isend(sent, dest=after, tag=1)
        assert comm.irecv(received, source=before, tag=1).wait() is received
        assert work.wait() is sent
        assert bool((received == before).all())
        on_host = np.empty((3, 1 << 20), np.float32)  # what was sent from a GPU may be received on a host
        work = comm.isend(sent, dest=after, tag=2)
        assert (comm.recv(on_host, source=before, tag=2) == before).all()
        work.wait()

    ranks.run(program)


def test_a_strided_array_of_the_gpu_is_refused(ranks):
    def program(comm):
        with pytest.raises(ValueError, match="allreduce needs a contiguous array"):
            comm.allreduce(cupy.zeros(4)[::2])

    ranks.run(program)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
def test_reductions_are_those_of_the_host(ranks, dtype):
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)

    def program(comm):
        values = (np.arange(1, 1001) * (comm.rank + 1) / 7).astype(dtype)
        kinds = [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX] + [ReduceOp.MEAN] * (np.dtype(dtype).kind != "i")
        for op in kinds:
            expected = comm.allreduce(values.copy(), op=op).wait()
            found = comm.allreduce(cupy.asarray(values), op=op).wait().get()
            np.testing.assert_allclose(found.astype(float), expected.astype(float), rtol=1e-6, err_msg=str(op))

    ranks.run(program)


def test_nccl_of_one_rank_does_what_the_host_does():
    """All that one card can show of it: calls, dtypes, streams, and that a capture takes them."""
    comm, dtypes = NCCLCommunicator(SoloCommunicator()), ["int8", "int16", "int64", "float16", "float32", "float64"]
    for dtype in dtypes:
        values = np.arange(-6, 7).astype(dtype)
        if values.dtype.kind == "f":
            values[:3] = np.nan, np.inf, -np.inf
        for op in ReduceOp:
            if op is not ReduceOp.MEAN or values.dtype.kind == "f":
                found = comm.allreduce(cupy.asarray(values), op=op).wait()
                np.testing.assert_array_equal(found.get(), values, err_msg=f"{dtype} {op}")
                own = comm.reduce_scatter(cupy.asarray(values), op=op).wait()
                np.testing.assert_array_equal(own.get(), values)
        if values.dtype.kind == "f":
            np.testing.assert_array_equal(comm.average(cupy.asarray(values)).wait().get(), values)
        np.testing.assert_array_equal(comm.allgather(cupy.asarray(values)).wait().get(), values[None])
        np.testing.assert_array_equal(comm.all_to_all(cupy.asarray(values)[None]).wait().get(), values[None])
    comm.connect([])
    sent = comm.isend(cupy.arange(3), dest=0, tag=1)
    assert comm.recv(cupy.zeros(3, np.int64), source=0, tag=1).get().tolist() == [0, 1, 2]
    sent.wait()
    stream, array = cupy.cuda.Stream(), cupy.ones(8, np.float32)
    with stream:
        stream.begin_capture()
        array += np.float32(1)
        works = [comm.average(array), comm.allreduce(array, op=ReduceOp.MAX)]
        assert not any(work.test() for work in works)
        for work in works:
            work.wait()
        graph = stream.end_capture()
        graph.launch(stream)
        graph.launch(stream)
        stream.synchronize()
    assert array.get().tolist() == [3.0] * 8


def test_average_has_the_bits_of_a_weighted_sum(ranks):
    def program(comm):
        values = cupy.asarray((np.arange(1, 1001) * (comm.rank + 1) / 7).astype(np.float32))
        weighted = comm.allreduce(values * np.float32(1 / comm.size)).wait()
        assert comm.average(values).wait() is values
        np.testing.assert_array_equal(values.get(), weighted.get())

    ranks.run(program)


def test_an_allreduce_is_captured_and_replayed(ranks):
    """Where no host has to wait for it: through NCCL, or with one rank."""

    def program(comm):
        if comm.size > 1 and "NCCL" not in comm.library:
            return
        stream = cupy.cuda.Stream()
        array = cupy.zeros(1 << 20, np.float32)
        with stream:
            comm.allreduce(array).wait()
            stream.begin_capture()
            array += np.float32(comm.rank + 1)
            work = comm.allreduce(array)
            work.wait()
            array *= np.float32(2)
            graph = stream.end_capture()
            array.fill(0)
            for _ in range(3):
                graph.launch(stream)
            stream.synchronize()
        total, added = 0.0, sum(range(1, comm.size + 1))
        for _ in range(3):
            total = 2 * (total * comm.size + added)
        assert bool((array == np.float32(total)).all()), (float(array[0]), total)

    ranks.run(program)


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_captured_data_parallel_step_is_the_step(ranks, zero, early, max_norm):
    """Same bits, on every rank; buckets travel inside the graph, and where it steps early beside its updates.

    A norm that shards add up may differ in its last bit.

    From the fifth step on rank 0 has fewer samples: it weighs less, in a graph of its own and in the other rank's. Only
    the sixth is again one of the first graph, straight after one that is none, whose shards are being gathered.
    """
    mg = pytest.importorskip("minigrad")
    pytest.importorskip("cudnn")

    def program(comm):
        if comm.size > 1 and "NCCL" not in comm.library:
            return
        config = GPTConfig(vocab_size=64, context=32, num_layers=2, num_heads=2, width=64)
        ids = np.random.default_rng(comm.rank).integers(0, 64, (9, 4, 33))
        batches = [x[: 3 if step in (4, 6, 7, 8) and comm.rank == 0 else 4] for step, x in enumerate(ids)]

        def train(captured):
            model = GPT(config, device="cuda")
            how = {"step_early": early, "zero": zero} if captured else {}
            ddp = DistributedDataParallel(model, comm, bucket_bytes=1 << 16, **how)
            use_precision(model.parameters(), "bfloat16")
            if captured:
                optimizer = ddp.optimizer(AdamW(1e-2), max_norm=max_norm)
            else:
                optimizer = Optimizer(model.parameters(), AdamW(1e-2), max_norm=max_norm)

            def step(x, y):
                optimizer.zero_grad()
                loss = mg.cross_entropy(model(x), y)
                mg.backward_with_hooks(loss, ddp.hooks(num_samples=len(x)))
                ddp.wait()
                optimizer.step()
                return loss

            run = CapturedStep(step, optimizer, gather=comm.gather_objects) if captured else step
            losses = [run(cupy.asarray(x[:, :-1]), cupy.asarray(x[:, 1:])).item() for x in batches]
            values = optimizer.whole_masters() or {p.name: p.data for p in model.parameters()}
            return losses, np.concatenate([values[p.name].get().reshape(-1) for p in model.parameters()])

        (losses, values), (graph_losses, graph_values) = train(captured=False), train(captured=True)
        tolerance = 1e-3 if zero and max_norm is not None else 0
        np.testing.assert_allclose(losses, graph_losses, rtol=tolerance)
        np.testing.assert_allclose(values, graph_values, rtol=tolerance, atol=tolerance)
        for other in comm.allgather(graph_values).wait():
            np.testing.assert_array_equal(other, graph_values)

    ranks.run(program)
