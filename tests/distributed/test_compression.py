"""Gradients in few bits: against a plain reference, and the bound on what is kept."""

import numpy as np
import pytest

from distributed.data_parallel.buckets.manager import GradientBucketManager
from distributed.data_parallel.compression.few_bits import LARGEST, ErrorFeedback
from minigrad.nn import Buffer

QUANTUM = {"int8": 1 / 254, "float8_e4m3fn": 1 / 16, "float16": 2**-11, "bfloat16": 2**-8}  # of a slice's largest


def gradient(rank, step, size=7):
    return np.random.default_rng([rank, step]).standard_normal(size)


def int8_reference(num_ranks, num_steps):
    """Return what every rank gets in each step."""

    def narrow(values):
        scale = np.float64(np.float32(abs(values).max() / 127))
        return np.rint(values / scale) * scale

    length = -(-7 // num_ranks)
    sent, reduced = np.zeros((num_ranks, num_ranks, length)), np.zeros((num_ranks, length))
    results = []
    for step in range(num_steps):
        said = np.zeros_like(sent)
        for rank in range(num_ranks):
            sent[rank] += np.pad(gradient(rank, step), (0, num_ranks * length - 7)).reshape(num_ranks, length)
            said[rank] = [narrow(row) if row.any() else row for row in sent[rank]]
            sent[rank] -= said[rank]
        reduced += said.sum(axis=0)
        back = np.array([narrow(row) if row.any() else row for row in reduced])
        reduced -= back
        results.append(back.reshape(-1)[:7])
    return results


def run_hook(comm, dtype, num_steps, gradient=gradient, size=7):
    """Return what a bucket holds after each step."""
    hook = ErrorFeedback(dtype)
    manager = GradientBucketManager([("w", size, np.float64)], comm, comm_hook=hook)
    hook.attach(manager)
    results = []
    for step in range(num_steps):
        manager.grad("w")[:] = gradient(comm.rank, step)
        manager.reset(share=1.0)
        manager.mark_ready("w")
        manager.wait()
        results.append(manager.grad("w").copy())
        manager.params[0].hold = None
    return results, hook.sent_bytes, hook.plain_bytes


@pytest.mark.ranks(2, 3, 4)
def test_int8_is_the_plain_reference_on_every_rank(ranks):
    wanted = int8_reference(ranks.size, 5)
    for results, *_ in ranks.run(lambda comm: run_hook(comm, "int8", 5)):
        np.testing.assert_allclose(results, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("size", "num_blocks", "block"), [(1, 1, 1), (256, 1, 256), (257, 2, 129), (300, 2, 150), (5000, 20, 250)]
)
def test_each_block_has_its_scale(size, num_blocks, block):
    """With one scale for all of a slice, what is small beside its largest number was rounded to nothing."""
    hook = ErrorFeedback("int8")
    rows = np.zeros((1, num_blocks * block))
    rows[0, :size] = np.random.default_rng(0).standard_normal(size) * 10.0 ** -(np.arange(size) // 50 % 7)
    rows = rows.reshape(1, num_blocks, block)
    kept = Buffer(np.zeros_like(rows), "kept")
    packed = hook.narrowed(rows, kept)
    assert packed.shape == (1, num_blocks * (block + 4))
    found = hook.widened(packed, rows)
    np.testing.assert_allclose(found + kept.data, rows, atol=1e-12)
    largest = abs(rows).max(axis=2, keepdims=True)
    assert (abs(kept.data) <= largest / 254 * 1.0001).all()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", LARGEST)
def test_what_was_sent_differs_from_what_was_true_by_what_is_kept_alone(ranks, dtype):
    pytest.importorskip("ml_dtypes")
    by_rank = ranks.run(lambda comm: run_hook(comm, dtype, 40, lambda rank, step: gradient(rank, 0, 700), size=700))
    true = 40 * sum(gradient(rank, 0, 700) for rank in range(ranks.size))  # what is lost in a step is lost in all
    results = by_rank[0][0]
    error = abs(np.sum(results, axis=0) - true).max()
    largest = max(abs(np.array(results)).max(), 4.0)
    assert 0 < error < 2 * (ranks.size + 1) * QUANTUM[dtype] * largest
    for others, sent_bytes, plain_bytes in by_rank:
        np.testing.assert_array_equal(others, results)
        assert 0 < sent_bytes < plain_bytes


def test_what_is_no_format_is_refused():
    with pytest.raises(ValueError, match=r"gradients can be sent as int8, .*, got 'int4'"):
        ErrorFeedback("int4")
