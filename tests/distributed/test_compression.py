"""Gradients in few bits: against a plain reference, and the bound on what is kept."""

from types import SimpleNamespace

import fake_cupy
import numpy as np
import pytest

from distributed.data_parallel.buckets.manager import GradientBucketManager
from distributed.data_parallel.compression.few_bits import ErrorFeedback
from distributed.data_parallel.compression.number_formats import NUMBER_FORMATS, number_format

QUANTUM = {  # of a slice's largest number
    "int8": 1 / 254,
    "int4": 1 / 14,
    "float4_e2m1fn": 1 / 6,
    "float8_e4m3fn": 1 / 16,
    "float16": 2**-11,
    "bfloat16": 2**-8,
}


def gradient(rank, step, size=7):
    return np.random.default_rng([rank, step]).standard_normal(size)


def reference(num_ranks, num_steps, largest):
    """Return what every rank gets in each step."""

    def narrow(values):
        scale = np.float64(np.float32(abs(values).max() / largest))
        return np.rint(values / scale) * scale if values.any() else values

    num_slices = num_ranks if num_ranks > 2 else 1
    length = -(-7 // num_slices)
    sent, reduced = np.zeros((num_ranks, num_slices, length)), np.zeros((num_slices, length))
    results = []
    for step in range(num_steps):
        said = np.zeros_like(sent)
        for rank in range(num_ranks):
            padded = np.pad(gradient(rank, step), (0, num_slices * length - 7))
            sent[rank] += padded.reshape(num_slices, length)
            said[rank] = [narrow(row) for row in sent[rank]]
            sent[rank] -= said[rank]
        total = said.sum(axis=0)
        if num_slices > 1:
            reduced += total
            total = np.array([narrow(row) for row in reduced])
            reduced -= total
        results.append(total.reshape(-1)[:7])
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


@pytest.mark.parametrize(("dtype", "largest"), [("int8", 127), ("int4", 7)])
@pytest.mark.ranks(2, 3, 4)
def test_whole_numbers_are_the_plain_reference_on_every_rank(ranks, dtype, largest):
    wanted = reference(ranks.size, 5, largest)
    for results, *_ in ranks.run(lambda comm: run_hook(comm, dtype, 5)):
        np.testing.assert_allclose(results, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", ["int8", "int4", "float16"])
@pytest.mark.parametrize(
    ("size", "num_blocks", "room"), [(1, 1, 16), (256, 1, 256), (257, 2, 288), (300, 2, 320), (5000, 20, 5120)]
)
def test_each_block_has_its_scale(size, num_blocks, room, dtype):
    """With one scale for all of a slice, what is small beside its largest number was rounded to nothing."""
    style = number_format(dtype)
    values = np.random.default_rng(0).standard_normal(size) * 10.0 ** -(np.arange(size) // 50 % 7)
    kept, found = np.zeros(room), np.empty(size)
    assert style.room_for(size) == room
    packed = np.empty(style.packed_bytes(room), np.uint8)
    assert packed.nbytes == 4 * num_blocks + room * {"int8": 1, "int4": 0.5, "float16": 2}[dtype]
    said = values.copy()
    style.pack(said, kept, packed)
    style.unpack(packed, room, found, add=False)
    np.testing.assert_array_equal(said, found)
    np.testing.assert_allclose(found + kept[:size], values, atol=1e-12)
    assert not kept[size:].any()
    padded = np.pad(values, (0, room - size)).reshape(num_blocks, -1)
    largest = abs(padded).max(axis=1, keepdims=True)
    assert (abs(kept.reshape(num_blocks, -1)) <= largest * QUANTUM[dtype] * 1.0001).all()


def test_floats_of_4_bits_are_those_of_e2m1():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    style, values = number_format("float4_e2m1fn"), np.random.default_rng(0).uniform(-6, 6, 8192)
    values[::128] = 6.0  # the largest of each block, so that its scale is 1/2 and numbers are what they are
    for kind in (np.float64, np.float32):  # compiled, where numba is
        said, found = values.astype(kind), np.empty(8192, kind)
        packed = np.empty(style.packed_bytes(8192), np.uint8)
        assert packed.nbytes == 4 * 64 + 4096
        style.pack(said, np.zeros(8192, kind), packed)
        style.unpack(packed, 8192, found, add=False)
        np.testing.assert_array_equal(found, values.astype(kind).astype(ml_dtypes.float4_e2m1fn).astype(kind))
        np.testing.assert_array_equal(said, found)


def test_numbers_too_small_for_an_exact_scale_keep_their_sign():
    """1.4 of the smallest float32 is a scale of 1 of it: 127 scales became 178 of them, -78 as a byte."""
    style, values = number_format("int8"), np.full(16, 178 * 2.0**-149)
    kept, found, packed = np.zeros(16), np.empty(16), np.empty(20, np.uint8)
    style.pack(values, kept, packed)
    style.unpack(packed, 16, found, add=False)
    np.testing.assert_array_equal(found, 127 * 2.0**-149)
    np.testing.assert_array_equal(kept, 51 * 2.0**-149)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", NUMBER_FORMATS)
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
    with pytest.raises(ValueError, match=r"gradients can be sent as int8, .*, got 'int3'"):
        ErrorFeedback("int3")


def test_gradients_of_a_gpu_are_refused_in_a_format_that_it_does_not_have(monkeypatch):
    """CuPy would say "Unsupported dtype" in the middle of the first step."""
    part = SimpleNamespace(grad=fake_cupy.install(monkeypatch).zeros(8, np.float32), start=0, stop=8)
    with pytest.raises(ValueError, match=r"of a GPU can be sent as int8, int4, .*bfloat16, got 'float8_e4m3fn'"):
        ErrorFeedback("float8_e4m3fn")._new_memory(part, 0, 2)
