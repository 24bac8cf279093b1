"""What hooks with a memory have in common: what is kept, when messages set out, and a run that goes on from a file."""

import functools
import time

import numpy as np
import pytest

import minigrad as mg
from distributed import DistributedDataParallel, LocalWorld
from distributed.checkpoint.checkpointer import Checkpointer
from distributed.data_parallel.compression.feedback import WithState
from distributed.data_parallel.compression.few_bits import ErrorFeedback
from distributed.data_parallel.compression.low_rank import PowerSGD
from distributed.data_parallel.compression.top_k import TopK
from minigrad.models import MLP
from minigrad.optim import SGD, Optimizer

HOOKS = {
    "int8": functools.partial(ErrorFeedback, "int8"),
    "powersgd": functools.partial(PowerSGD, 1),
    "topk": functools.partial(TopK, 0.2),
}
each_hook = pytest.mark.parametrize("make", HOOKS.values(), ids=HOOKS)
SHAPES = {"w": (6, 5), "b": (5,), "c": (2, 3, 4)}


def gradient(rank, step):
    generator = np.random.default_rng([rank, step])
    return {name: generator.standard_normal(shape) for name, shape in SHAPES.items()}


def reduce_steps(comm, make, num_steps, gradient=gradient, bucket_bytes=1 << 20):
    """Return what every parameter's gradient is after each step, what is kept, and the bytes that were sent."""
    params = [mg.Parameter(np.zeros(shape), name) for name, shape in SHAPES.items()]
    model = type("Model", (), {"parameters": lambda self: params})()
    hook = make()
    ddp = DistributedDataParallel(model, comm, comm_hook=hook, bucket_bytes=bucket_bytes)
    hook.attach(ddp.buckets)
    results = []
    for step in range(num_steps):
        for p in params:
            p.grad = None
            p.grad = gradient(comm.rank, step)[p.name]
        ddp.buckets.reset(share=1.0)
        for p in reversed(params):
            ddp.buckets.mark_ready(p)
        ddp.buckets.wait()
        results.append({p.name: p.grad.copy() for p in params})
    return results, hook.buffers(), hook.sent_bytes


@each_hook
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.ranks(2, 3)
def test_what_was_sent_and_what_is_kept_make_up_what_was_true(ranks, make, bucket_bytes):
    by_rank = ranks.run(lambda comm: reduce_steps(comm, make, 5, bucket_bytes=bucket_bytes))
    true = sum(
        value.sum() for rank in range(ranks.size) for step in range(5) for value in gradient(rank, step).values()
    )
    sent = sum(value.sum() for step in by_rank[0][0] for value in step.values())
    kept = sum(b.data.sum() for _, buffers, _ in by_rank for b in buffers if ".kept_" in b.name)
    assert max(abs(b.data).max() for _, buffers, _ in by_rank for b in buffers if ".kept_" in b.name) > 1e-3
    assert sent + kept == pytest.approx(true, rel=1e-9)
    for results, _, _ in by_rank:
        for ours, theirs in zip(results, by_rank[0][0], strict=True):
            assert {name: value.tobytes() for name, value in ours.items()} == {
                name: value.tobytes() for name, value in theirs.items()
            }


@each_hook
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.ranks(2, 3)
def test_a_gradient_that_is_not_finite_arrives_as_such_and_is_not_kept(ranks, make, bad):
    def spoiled(rank, step):
        made = {name: np.ones(shape) for name, shape in SHAPES.items()}
        if step == 1 and rank == ranks.size - 1:
            made["w"][0, 0] = bad
        return made

    for results, buffers, _ in ranks.run(lambda comm: reduce_steps(comm, make, 12, spoiled)):
        assert [all(np.isfinite(v).all() for v in step.values()) for step in results] == [True, False] + 10 * [True]
        assert all(np.isfinite(buffer.data).all() for buffer in buffers)
        mean = np.mean([step["w"].mean() for step in results[2:]])
        assert mean == pytest.approx(ranks.size, rel=0.35)  # nothing of what was spoiled, and all of what was not


@each_hook
@pytest.mark.ranks(2, 3)
def test_a_run_that_goes_on_from_a_checkpoint_is_the_undisturbed_one(ranks, make, tmp_path):
    def program(comm):
        folder = comm.broadcast_object(tmp_path)  # each process of MPI has another one

        def begin(name):
            model, hook = MLP([4, 6, 3], seed=0), make()
            ddp = DistributedDataParallel(model, comm, comm_hook=hook)
            hook.attach(ddp.buckets)
            optimizer = Optimizer(model.parameters(), SGD(0.1))
            return model, ddp, optimizer, Checkpointer(folder / name, comm, WithState(model, hook), optimizer)

        def train(model, ddp, optimizer, first, last):
            for step in range(first, last):
                x = np.random.default_rng([comm.rank, step]).standard_normal((5, 4)).astype(np.float32)
                optimizer.zero_grad()
                loss = mg.cross_entropy(model(x), np.arange(5) % 3)
                mg.backward_with_hooks(loss, ddp.hooks(num_samples=5))
                ddp.wait()
                optimizer.step()

        model, ddp, optimizer, checkpoints = begin("run")
        train(model, ddp, optimizer, 0, 4)
        checkpoints.save(4)
        checkpoints.wait()
        train(model, ddp, optimizer, 4, 8)
        again, ddp, optimizer, checkpoints = begin("run")
        assert checkpoints.load().step == 4
        train(again, ddp, optimizer, 4, 8)
        for name, value in model.state_dict().items():
            np.testing.assert_array_equal(again.state_dict()[name], value, err_msg=name)

    ranks.run(program)


@each_hook
@pytest.mark.ranks(2, 3)
def test_what_is_of_other_buckets_or_of_no_hook_begins_anew(ranks, make, tmp_path):
    def program(comm):
        folder = comm.broadcast_object(tmp_path)

        def begin(bucket_bytes, has_hook=True):
            model, hook = MLP([4, 6, 3], seed=0), make()
            how = {"comm_hook": hook} if has_hook else {}
            ddp = DistributedDataParallel(model, comm, bucket_bytes=bucket_bytes, **how)
            optimizer = Optimizer(model.parameters(), SGD(0.1))
            if has_hook:
                hook.attach(ddp.buckets)
            first = [buffer.data.copy() for buffer in hook.buffers()]
            held = WithState(model, hook) if has_hook else model
            return model, hook, first, Checkpointer(folder, comm, held, optimizer)

        model, hook, _, checkpoints = begin(1 << 20)
        for buffer in hook.buffers():
            buffer.data += 1 + comm.rank if ".kept_" in buffer.name else 1
        weights = {name: value.copy() for name, value in model.state_dict().items()}
        checkpoints.save(1)
        checkpoints.wait()
        for bucket_bytes, has_hook in ((1, True), (1 << 20, False), (1 << 20, True)):
            same = bucket_bytes > 1 and has_hook
            model, again, first, checkpoints = begin(bucket_bytes, has_hook)
            for buffer in again.buffers():
                buffer.data -= 5
            assert checkpoints.load().forgets == (not same)
            wanted = [buffer.data for buffer in hook.buffers()] if same else first
            for buffer, value in zip(again.buffers(), wanted, strict=True):
                np.testing.assert_array_equal(buffer.data, value)
            for name, value in model.state_dict().items():
                np.testing.assert_array_equal(value, weights[name])

    ranks.run(program)


@pytest.mark.parametrize("make", [HOOKS["int8"], HOOKS["powersgd"]], ids=["int8", "powersgd"])
@pytest.mark.ranks(2, 3)
def test_the_second_message_sets_out_when_the_first_has_come_and_in_the_order_of_buckets(ranks, make):
    """It began in wait() only: with nothing left of the backward to hide it behind."""

    def program(comm):
        log = []
        hook = make()
        params = [mg.Parameter(np.ones((8, 6 + i)), name) for i, name in enumerate("abc")]
        model = type("Model", (), {"parameters": lambda self: params})()
        ddp = DistributedDataParallel(model, comm, comm_hook=hook, bucket_bytes=1)
        hook.attach(ddp.buckets)
        for name in ("allgather", "allreduce"):
            call = getattr(hook._later, name)

            def noted(array, call=call):
                log.append(array.size)
                return call(array)

            setattr(hook._later, name, noted)
        ddp.buckets.reset()
        for p in reversed(params):
            p.grad = np.outer(np.ones(8), np.arange(1.0, p.shape[1] + 1)) * (comm.rank + 1)
            ddp.buckets.mark_ready(p)
        works = [bucket.work for bucket in ddp.buckets.buckets]
        num_second = 0 if comm.size == 2 and make is HOOKS["int8"] else len(works)  # int8 of two ranks is one message
        until = time.monotonic() + 20
        while len(log) < num_second and time.monotonic() < until:  # as a backward goes on: nobody waits
            ddp.comm.progress()
            if comm.rank == 0:
                [work.test() for work in works]
            else:
                [work.test() for work in reversed(works)]
        assert len(log) == num_second
        ddp.buckets.wait()
        return [p.grad.copy() for p in params]

    mean = sum(range(1, ranks.size + 1)) / ranks.size
    for grads in ranks.run(program):
        for grad in grads:
            row = np.arange(1.0, grad.shape[1] + 1)
            np.testing.assert_allclose(grad, np.outer(np.ones(8), row) * mean, rtol=0.03, atol=0.1)


@each_hook
def test_a_hook_without_its_memory_is_refused(make):
    def program(comm):
        with pytest.raises(RuntimeError, match=r"keeps what it does not send: call hook.attach\(ddp.buckets\) once"):
            make()(np.zeros(3), comm)

    LocalWorld(2).run(program)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: PowerSGD(0), "PowerSGD sends at least 1 column, got 0"),
        (lambda: TopK(0.0), "must be above 0 and at most 1, got 0.0"),
        (lambda: TopK(1.5), "must be above 0 and at most 1, got 1.5"),
    ],
)
def test_what_sends_nothing_is_refused(make, rule):
    with pytest.raises(ValueError, match=rule):
        make()


def gradient_of(shape, rank, step):
    return np.random.default_rng([rank, step, 7]).standard_normal(shape)


def powersgd_reference(num_ranks, num_steps, first, shape):
    """Return what every rank gets in each step: Vogels et al. 2019, algorithms 1 and 2, with their Gram-Schmidt."""
    q, errors, results = first, [np.zeros(shape) for _ in range(num_ranks)], []
    for step in range(num_steps):
        m = [gradient_of(shape, rank, step) + errors[rank] for rank in range(num_ranks)]
        p = sum(each @ q for each in m)
        for i in range(p.shape[1]):
            p[:, i] /= np.linalg.norm(p[:, i])
            p[:, i + 1 :] -= p[:, i : i + 1] * (p[:, i] @ p[:, i + 1 :])
        own = [each.T @ p for each in m]
        errors = [each - p @ mine.T for each, mine in zip(m, own, strict=True)]
        q = sum(own)
        results.append(p @ q.T)
    return results


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.ranks(2, 3)
def test_powersgd_is_the_papers_algorithm(ranks, rank):
    shape = (9, 7)

    def program(comm):
        hook, w = PowerSGD(rank), mg.Parameter(np.zeros(shape), "w")
        model = type("Model", (), {"parameters": lambda self: [w]})()
        ddp = DistributedDataParallel(model, comm, comm_hook=hook)
        hook.attach(ddp.buckets)
        first = hook.buffers()[1].data.copy()
        results = []
        for step in range(4):
            w.grad = None
            w.grad = gradient_of(shape, comm.rank, step)
            ddp.buckets.reset(share=1.0)
            ddp.buckets.mark_ready(w)
            ddp.buckets.wait()
            results.append(w.grad.copy())
        return results, first, hook.sent_bytes, hook.plain_bytes

    for results, first, sent, plain in ranks.run(program):
        np.testing.assert_allclose(results, powersgd_reference(ranks.size, 4, first, shape), rtol=1e-9, atol=1e-12)
        assert np.linalg.matrix_rank(results[0]) == rank
        share = 2 * (ranks.size - 1) / ranks.size * 8 * 4
        assert sent == pytest.approx(share * rank * (9 + 7), abs=8)
        assert plain == pytest.approx(share * 9 * 7, abs=8)


@pytest.mark.ranks(2, 3)
def test_a_gradient_of_low_rank_arrives_whole(ranks):
    u = np.arange(1.0, 6)

    def low(rank, step):
        return {
            "w": np.outer(np.ones(6), u) * (rank + 1),
            "b": u * rank,
            "c": np.multiply.outer([1.0, 2], np.ones((3, 4))),
        }

    for results, _, _ in ranks.run(lambda comm: reduce_steps(comm, lambda: PowerSGD(1), 2, low)):
        for step in results:
            for name in SHAPES:
                true = sum(low(rank, 0)[name] for rank in range(ranks.size))
                np.testing.assert_allclose(step[name], true, rtol=1e-10, atol=1e-10)


@pytest.mark.ranks(2, 3)
def test_top_k_is_the_papers_algorithm(ranks):
    """Stich et al. 2018, algorithm 1: g = comp_k(m + gradient), m = m + gradient - g."""
    wanted, memory = [], np.zeros((ranks.size, 59))
    for step in range(4):
        total = np.zeros(59)
        for rank in range(ranks.size):
            memory[rank] += np.concatenate([gradient(rank, step)[name].reshape(-1) for name in ("c", "b", "w")])
            largest = np.argsort(abs(memory[rank]))[-12:]
            total[largest] += memory[rank][largest]
            memory[rank][largest] = 0
        wanted.append(total)
    for results, _, sent_bytes in ranks.run(lambda comm: reduce_steps(comm, lambda: TopK(0.2), 4)):
        found = [np.concatenate([step[name].reshape(-1) for name in ("c", "b", "w")]) for step in results]
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
        assert sent_bytes == 4 * (ranks.size - 1) * 12 * (4 + 8)
