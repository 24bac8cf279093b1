"""Each GPU kernel against NumPy in float64, at its dtype's tolerance: odd widths, unaligned rows, empty arrays."""

from __future__ import annotations

import itertools
import math
import threading
from typing import Any

import numpy as np
import pytest
from test_kernels import CASES, CODES, sampler

import minigrad as mg
from minigrad.backend import Array, is_half, to_device, to_host, xp_of
from minigrad.kernels import kernels_of, names, reference
from minigrad.kernels.gpu_launch import WIDEST_ROW, new_rows
from minigrad.kernels.products.cublaslt import CublasLt
from minigrad.precision import dtype_of

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy", reason="needs CuPy")
gpu = pytest.importorskip("minigrad.kernels.gpu")

DTYPES = ["float32", "bfloat16", "float16"]
TOLERANCE = {"float32": 2e-5, "bfloat16": 2**-7, "float16": 2**-10}
SHAPES = [(5, 7), (3, 1), (1, 65), (33, 64), (129, 768), (40, 2000), (1000, 257), (0, 5)]
ELSEWHERE = {
    "adamw",
    "add_dequantized",
    "exact_square_sums",
    "gelu_back",
    "layer_norm_back",
    "linear_gelu",
    "linear_gelu_back",
    "quantize",
    "square_sum",
}  # tested apart, or with another kernel
HALF_CASES = [case for case in CASES if case.split()[0] in names(gpu) and case.split()[0] not in ELSEWHERE]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
generator = np.random.default_rng(3)


def draw(dtype: str, *shape: int) -> Array:
    return generator.standard_normal(shape).astype(dtype_of(dtype))


def unaligned(x: Any) -> Any:
    """Return a copy on the GPU that begins one element after a multiple of 16 bytes."""
    memory = cupy.empty(x.size + 1, x.dtype)
    memory[1:] = to_device(x).reshape(-1)
    return memory[1:].reshape(x.shape)


def close(found: Any, expected: Array, dtype: str, grow: float = 1.0) -> None:
    assert found.shape == expected.shape
    scale = max(float(abs(expected).max()), 1.0) if expected.size else 1.0  # where all cancels, inputs are about 1
    wide = to_host(found).astype(np.float64)
    if dtype == "float16":
        expected = np.where(abs(expected) > np.finfo(np.float16).max, np.copysign(np.inf, expected), expected)
        scale = max(float(abs(expected).max(where=np.isfinite(expected), initial=1.0)), 1.0)
    np.testing.assert_allclose(wide, expected, rtol=grow * TOLERANCE[dtype], atol=grow * TOLERANCE[dtype] * scale)


def wide(value: Any) -> Any:
    return value.astype(np.float64) if getattr(value, "dtype", np.dtype(int)).kind in "fV" else value


@pytest.mark.parametrize("case", HALF_CASES)
@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("place", [to_device, unaligned], ids=["aligned", "unaligned"])
def test_it_gives_what_the_reference_gives_in_float64(case: str, dtype: str, shape: Any, place: Any) -> None:
    half, name = dtype_of(dtype), case.split()[0]
    host = [
        a.astype(half) if getattr(a, "dtype", np.dtype(int)).kind == "f" else a
        for a in CASES[case](sampler(np.float64), *shape)
    ]
    if "norm_d" in name:  # mean and inverse are float32
        host[2:] = [a.astype(np.float32) if a.shape[1:] == (1,) else a for a in host[2:]]
    exact = [wide(a) for a in host]
    device = [place(a) if isinstance(a, np.ndarray) else a for a in host]
    if name == "embedding_dtable":
        for add in (False, True):
            expected, out = exact[2].copy(), to_device(exact[2].astype(np.float32))
            reference.embedding_dtable(exact[0], exact[1], expected, add)
            gpu.embedding_dtable(device[0], gpu.checked_ids("ids", device[1], 5), out, add)
            close(out, expected, "float32", 4)
        return
    expected, found = getattr(reference, name)(*exact), getattr(gpu, name)(*device)
    if name in ("gelu", "silu"):  # what is kept is its own; the derivative is what counts
        ones = cupy.ones_like(device[0])
        found = (found[0], getattr(gpu, f"{name}_dx")(ones, found[1], *exact[1:]))
    if name == "layer_norm_dx":  # and the pass that sums on the way
        beside = draw(dtype, *shape)
        close(gpu.layer_norm_back(*device, place(beside))[0], expected + wide(beside), dtype, 4)
        dx, *parts = gpu.layer_norm_back(*device)
        close(dx, expected, dtype, 4)
        sums = (reference.layer_norm_dgain(*exact[:4]), exact[0].sum(axis=0))
        for part, want in zip(parts, sums, strict=True):
            assert (part is None) == (not exact[0].size or shape[1] > 1536)
            if part is not None:
                out = cupy.ones(shape[1], np.float32)
                gpu.sum_parts(part, out, True)
                close(out, want + 1, "float32", 4)
    if not isinstance(expected, tuple):
        expected, found = (expected,), (found,)
    for got, want in zip(found, expected, strict=True):
        close(got, want, "float32" if got.dtype == np.float32 and name.endswith("dgain") else dtype, 4)


@each_dtype
@pytest.mark.parametrize("op", [mg.relu, mg.sigmoid, mg.silu, mg.gelu], ids=lambda op: op.__name__)
def test_activations_of_nan_and_infinity_are_the_cpus(dtype: str, op: Any) -> None:
    values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 6e4, -6e4, 1.0, -1.0]).astype(dtype_of(dtype))

    def both(x: Any) -> list[Any]:
        tensor = mg.Tensor(x, requires_grad=True)
        with np.errstate(all="ignore"):
            y = op(tensor)
            mg.backward_with_grad(y, xp_of(x).ones_like(x))
        return [wide(to_host(a)) for a in (y.data, tensor.grad)]

    for found, expected in zip(both(to_device(values)), both(values), strict=True):
        np.testing.assert_allclose(found, expected, rtol=4 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


@each_dtype
@pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 1, 1), (5, 7, 3), (64, 128, 65), (130, 65, 257), (8, 768, 2304), (300, 1, 9)]
)
def test_products_of_all_layouts(dtype: str, m: int, k: int, n: int) -> None:
    a, b, bias, beside = draw(dtype, m, k), draw(dtype, k, n), draw(dtype, n), draw(dtype, m, n)
    expected = wide(a) @ wide(b)
    lefts = [to_device(a), to_device(a.T.copy()).T, unaligned(a), to_device(np.repeat(a, 2, axis=1))[:, ::2]]
    rights = [to_device(b), to_device(b.T.copy()).T, to_device(np.concatenate([b, b], axis=1))[:, :n]]
    tight = {"float32": 5e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
    for left in lefts:
        for right in rights:
            y = gpu.product(left, right)
            assert y.dtype == a.dtype
            np.testing.assert_allclose(wide(to_host(y)), expected, rtol=tight, atol=tight * (1 + k**0.5))
            for add in (False, True):
                out = cupy.ones((m, n), np.float32)
                gpu.product(left, right, out, add)
                np.testing.assert_allclose(to_host(out), expected + add, rtol=1e-5, atol=1e-5 * (1 + k))
    for place in (to_device, unaligned):  # rounded twice where the bias is added to what was rounded
        for passing in (
            [],
            [to_device(beside)],
            [unaligned(beside)],
            [to_device(np.repeat(beside, 2, axis=1))[:, ::2]],
        ):
            y = gpu.linear(lefts[0], rights[0], place(bias), *passing)
            total = expected + wide(bias) + (wide(beside) if passing else 0)
            np.testing.assert_allclose(wide(to_host(y)), total, rtol=2 * tight, atol=2 * tight * (3 + k**0.5))


@each_dtype
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(9, 16, 64), (9, 16, 61), (130, 768, 3072), (1, 8, 8), (0, 8, 8)])
def test_a_linear_map_and_gelu(dtype: str, exact: bool, m: int, n: int, k: int) -> None:
    """One product each way where cuBLASLt has one, the same numbers where not."""
    x, w1, b1, w2, b2, z = (draw(dtype, *shape) for shape in ((m, n), (n, k), (k,), (k, n), (n,), (m, n)))
    w1, w2, g = w1 * w1.dtype.type(n**-0.5), w2 * w2.dtype.type(k**-0.5), draw(dtype, m, n)

    def trained(*arrays: Any) -> list[Any]:
        tensors = [mg.Tensor(a, requires_grad=True) for a in arrays[:-1]]
        y = mg.feed_forward(*tensors, exact=exact)
        mg.backward_with_grad(y, arrays[-1])
        return [y.data, *(t.grad for t in tensors)]

    arrays = [x, w1, b1, w2, b2, z, g]
    expected = trained(*map(wide, arrays))
    for place in (to_device, unaligned):
        for found, want in zip(trained(*map(place, arrays)), expected, strict=True):
            error = np.linalg.norm(wide(to_host(found)) - want) / max(float(np.linalg.norm(want)), 1e-30)
            assert error < 2 * TOLERANCE[dtype], (error, want.shape)


@each_dtype
@pytest.mark.parametrize("how", ["plain", "added", "bias and beside", "gelu", "through gelu", "stacks"])
def test_an_algorithm_that_was_chosen_by_time_gives_the_bits_of_the_first(dtype: str, how: str) -> None:
    if "gelu" in how and dtype == "float32":
        pytest.skip("there GELU is no part of a product")
    half = dtype_of(dtype)
    m, k, n = 2048, 768, 1024
    if how == "stacks":
        a, b = (to_device(draw(dtype, 8, *shape)) for shape in ((1024, 256), (256, 640)))
        out = cupy.empty((8, 1024, 640), half)
    else:
        a, b, out = to_device(draw(dtype, m, k)), to_device(draw(dtype, k, n)), cupy.empty((m, n), half)
    beside, bias, h = (to_device(draw(dtype, *shape)) for shape in ((m, n), (n,), (m, n)))
    given = {
        "added": {"add": True},
        "bias and beside": {"bias": bias, "beside": beside},
        "gelu": {"bias": bias, "before_gelu": h},
        "through gelu": {"before_gelu": h},
    }.get(how, {})
    if how == "added":
        a, out = a[:, :512].T, cupy.empty((512, n), np.float32)
        b = to_device(draw(dtype, m, n))
    results = []
    for num_candidates in (1, 8):
        out.fill(1)
        CublasLt(num_candidates=num_candidates)(a, b, out, **given)
        results.append(out.copy())
    assert bool((results[0] == results[1]).all())


@each_dtype
def test_threads_that_share_a_gpu_do_not_share_a_bias(dtype: str) -> None:
    """A product's plan holds the address of its bias, set before the launch: another thread could come between."""
    x, w = cupy.zeros((64, 32), dtype_of(dtype)), cupy.zeros((32, 48), dtype_of(dtype))
    biases, num_wrong = [cupy.full(48, i, dtype_of(dtype)) for i in range(4)], [cupy.zeros((), int) for _ in range(4)]

    def run(i: int) -> None:
        for _ in range(500):
            num_wrong[i] += (gpu.linear(x, w, biases[i]) != biases[i]).sum()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [int(wrong) for wrong in num_wrong] == [0] * 4


@each_dtype
def test_products_of_stacks(dtype: str) -> None:
    a, b = draw(dtype, 2, 3, 5, 16), draw(dtype, 2, 3, 16, 24)
    expected, tight = wide(a) @ wide(b), {"float32": 5e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
    lefts = [to_device(a), to_device(a.swapaxes(1, 2).copy()).swapaxes(1, 2), to_device(a.swapaxes(2, 3).copy())]
    lefts[2] = lefts[2].swapaxes(2, 3)
    rights = [to_device(b), unaligned(b), to_device(np.concatenate([b, b], axis=2))[:, :, :16]]
    for left in lefts:
        for right in rights:
            y = gpu.product(left, right)
            assert y.dtype == a.dtype
            np.testing.assert_allclose(wide(to_host(y)), expected, rtol=tight, atol=8 * tight)
            for out in (cupy.ones((2, 3, 5, 24), np.float32), cupy.ones((2, 5, 3, 24), np.float32).swapaxes(1, 2)):
                for add in (True, False):
                    gpu.product(left, right, out, add)
                    np.testing.assert_allclose(to_host(out), expected + add, rtol=1e-5, atol=1e-4)
    broadcast = gpu.product(to_device(a), to_device(b[0, 0]))
    np.testing.assert_allclose(wide(to_host(broadcast)), wide(a) @ wide(b[0, 0]), rtol=tight, atol=8 * tight)
    assert gpu.product(to_device(a[:0]), to_device(b[:0])).shape == (0, 3, 5, 24)


@each_dtype
@pytest.mark.parametrize(("m", "n"), [(1, 1), (7, 65), (1000, 257), (8192, 768), (8, 100_000), (2, 1_100_000), (0, 5)])
def test_sums_over_columns(dtype: str, m: int, n: int) -> None:
    g = draw(dtype, m, n)
    for x in (to_device(g), unaligned(g), to_device(g.T.copy()).T):
        for add in (False, True):
            out = cupy.ones(n, np.float32)
            gpu.column_sum(x, out, add)
            np.testing.assert_allclose(to_host(out), wide(g).sum(0) + add, rtol=1e-5, atol=1e-5 * (1 + m))
    if m > 1:  # as many as there are, whoever is the last to be done
        again = [gpu.column_sum(to_device(g)) for _ in range(20)]
        assert all(bool((x == again[0]).all()) for x in again)


@each_dtype
@pytest.mark.parametrize("place", [to_device, unaligned], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(
    "shapes", [((3, 5, 16), (5, 16)), ((40, 7), (7,)), ((6, 3), (6, 3)), ((4, 3), (4, 1)), ((0, 3), (3,))]
)
def test_a_sum_of_two_that_broadcast(dtype: str, place: Any, shapes: Any) -> None:
    x, y = (draw(dtype, *shape) for shape in shapes)

    def both(x: Any, y: Any) -> list[Any]:
        tensors = [mg.Tensor(a, requires_grad=True) for a in (y, x)]
        z = tensors[0] + tensors[1]
        mg.backward_with_grad(z, x)
        return [wide(to_host(a)) for a in (z.data, *(t.grad for t in tensors))]

    for found, expected in zip(both(place(x), place(y)), both(wide(x), wide(y)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE[dtype], atol=8 * TOLERANCE[dtype])


@each_dtype
@pytest.mark.parametrize("num_rows", [5, 300, 50_000])
def test_embeddings_and_ids_out_of_range(dtype: str, num_rows: int) -> None:
    for n in (1, 65, 768, 5000):
        table, ids = (
            draw(dtype, num_rows, n) if n < 100 or num_rows < 1000 else None,
            generator.integers(0, num_rows, 600),
        )
        if table is None:
            continue
        checked = gpu.checked_ids("ids", to_device(ids), num_rows)
        np.testing.assert_array_equal(wide(to_host(gpu.embedding(to_device(table), checked))), wide(table[ids]))
        g, expected = draw(dtype, 600, n), np.zeros((num_rows, n))
        np.add.at(expected, ids, wide(g))
        out = cupy.zeros((num_rows, n), np.float32)
        gpu.embedding_dtable(to_device(g), checked, out, True)
        np.testing.assert_allclose(to_host(out), expected, rtol=1e-5, atol=1e-4)
        if n <= WIDEST_ROW:
            bad = gpu.checked_ids("ids", to_device(np.array([0, -1, num_rows])), num_rows)
            assert np.isnan(wide(to_host(gpu.embedding(to_device(table), bad)))).all(axis=1).tolist() == [
                False,
                True,
                True,
            ]


@each_dtype
@pytest.mark.parametrize(("m", "n"), [(1, 2), (7, 65), (33, 600), (9, 5001), (4, 50_304)])
def test_cross_entropy(dtype: str, m: int, n: int) -> None:
    logits, targets = 3 * draw(dtype, m, n), generator.integers(0, n, m)
    targets[0] = -1  # does not count
    for smoothing in (0.0, 0.1):
        losses, dlogits = reference.cross_entropy(wide(logits), targets, smoothing, 0.25)
        padded = new_rows(m, n, logits.dtype)
        padded[...] = to_device(logits)
        for x in (to_device(logits), unaligned(logits), padded):
            found, dfound = gpu.cross_entropy(x, to_device(targets), smoothing, 0.25)
            np.testing.assert_allclose(to_host(found), losses, rtol=1e-4, atol=1e-4)
            tight = {"float32": 1e-5, "bfloat16": 2**-8, "float16": 2**-10}[dtype]
            np.testing.assert_allclose(wide(to_host(dfound)), dlogits, rtol=tight, atol=1e-6)
            scaled = gpu.cross_entropy_dlogits(dfound, cupy.asarray(2, np.float32), logits.dtype)
            np.testing.assert_allclose(wide(to_host(scaled)), 2 * dlogits, rtol=2 * tight, atol=2e-6)
    odd = 3 * draw(dtype, m, n)
    odd[-1, -8:] = np.nan  # all that one thread reads
    assert m == 1 or bool(cupy.isnan(gpu.cross_entropy(to_device(odd), to_device(targets), 0.0, 1.0)[0][-1]))
    bad = gpu.checked_ids("targets", to_device(np.full(m, n)), n)
    losses, dlogits = gpu.cross_entropy(to_device(logits), bad, 0.0, 1.0)
    assert bool(cupy.isnan(losses).all())
    assert np.isnan(wide(to_host(dlogits))).all()


@pytest.mark.parametrize("n", [1, 7, 1024, 100_003])
def test_adamw_and_the_sum_of_squares(n: int) -> None:
    arrays = [generator.standard_normal(n).astype(np.float32) for _ in range(3)] + [
        generator.random(n).astype(np.float32)
    ]
    exact = [wide(a) for a in arrays]
    reference.adamw(*exact, 0.9, 0.99, 1e-2, 1e-8, 0.999)
    for place in (to_device, unaligned):
        found = [place(a) for a in arrays]
        gpu.adamw(*found, 0.9, 0.99, 1e-2, 1e-8, 0.999)
        for got, want in zip(found, exact, strict=True):
            np.testing.assert_allclose(to_host(got), want, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(gpu.square_sum(place(arrays[1])), (wide(arrays[1]) ** 2).sum(), rtol=1e-12)
    assert gpu.square_sum(to_device(np.full(3, 1e30, np.float32))) > 1e60


@pytest.mark.parametrize("n", [1, 7, 1024, 100_003])
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_adamw_takes_over_what_was_assigned_to_the_copy(n: int, half: str) -> None:
    """Where the copy has its master's bits the master stays as it is, which has more of them; a nan is assigned too."""
    w, g, m = (generator.standard_normal(n).astype(np.float32) for _ in range(3))
    v, chosen = generator.random(n).astype(np.float32), generator.random(n) < 0.3
    copy = w.astype(dtype_of(half))
    copy[chosen] = generator.standard_normal(n).astype(copy.dtype)[chosen]
    copy[0] = np.nan
    followed = np.where(copy == w.astype(copy.dtype), w, copy.astype(np.float32))
    expected = [wide(a) for a in (followed, g, m, v)]
    kinds = ((n - n // 2, 1), (n // 2, 2)) if n > 1 else ((n, 1),)  # the second half is frozen
    reference.adamw(*(a[: n - n // 2] for a in expected), 0.9, 0.99, 1e-2, 1e-8, 1 - 1e-2 * 0.1)
    for place in (to_device, unaligned):
        found, found_copy = [place(a) for a in (w, g, m, v)], place(copy)
        step = gpu.adamw_step((0.9, 0.99), 1e-8, 0.1, None, None)
        step._scalars[:] = to_device(np.array([0, 0, 1e-2, 1e-8, 1e-2 * 0.1, 1, 0, 1, 0], np.float32))
        step.update(*found, found_copy, kinds, follows=True)
        for got, want in zip(found, expected, strict=True):
            np.testing.assert_allclose(to_host(got), want, rtol=2e-6, atol=2e-6)
        step.update(*(a[:0] for a in found), found_copy[:0], (), follows=True)
        np.testing.assert_array_equal(wide(to_host(found_copy)), wide(to_host(found[0]).astype(copy.dtype)))


@pytest.mark.parametrize("place", [to_device, unaligned], ids=["aligned", "unaligned"])
def test_exact_square_sums_are_exact_wherever_numbers_are_cut(place: Any) -> None:
    x = (generator.standard_normal(100_003) * 2.0 ** generator.integers(-30, 30, 100_003)).astype(np.float32)
    exact = math.fsum((x.astype(np.float64) ** 2).tolist())
    for cuts in ([], [1, 40_000, 40_000, 80_011]):
        pieces = [gpu.exact_square_sums(place(piece)) for piece in np.split(x, cuts)]
        assert math.fsum(itertools.chain(*pieces)) == exact
    for odd in (0.0, 2e-38, 3e38, np.inf, np.nan):  # what is smaller, CuPy's compiler takes for 0
        few = np.array([0, odd, 0], np.float32)
        np.testing.assert_array_equal(math.fsum(gpu.exact_square_sums(place(few))), float(np.float64(few[1]) ** 2))


@pytest.mark.parametrize("kind", CODES.values(), ids=CODES)
@pytest.mark.parametrize("length", [4, 16, 112, 128, 256, 272])  # of a block: kernels take multiples of 16, to 256
@pytest.mark.parametrize("place", [to_device, unaligned], ids=["aligned", "unaligned"])
def test_few_bits_are_those_of_the_reference(kind: tuple[int, bool], length: int, place: Any) -> None:
    bits, is_float = kind
    num_blocks = 23
    x = draw("float32", num_blocks * length - 3) * np.float32(1e-3)
    kept = draw("float32", num_blocks * length)
    first = iter(range(0, num_blocks * length, length))
    for odd in (np.nan, np.inf, -np.inf, 3e38, 1e-30, 0.0):  # a block each
        start = next(first)
        x[start : start + length] = kept[start : start + length] = odd if abs(odd) < 1 else 1
        x[start + length // 2] = kept[start + length // 2] = odd
    sizes = np.arange(length)
    x[next(first) :][:length], kept[-length:-1] = sizes / 2 - length / 4, sizes[1:]  # ties
    host = [x, kept, np.full(kept.size * bits // 8, 7, np.uint8), np.full(num_blocks, 7, np.float32)]
    device = [place(x), place(kept), *map(to_device, host[2:])]
    with np.errstate(all="ignore"):
        reference.quantize(*host, bits, is_float)
    gpu.quantize(*device, bits, is_float)
    for found, expected in zip(device, host, strict=True):
        np.testing.assert_array_equal(to_host(found), expected)
    for add in (False, True):
        out = draw("float32", x.size)
        found = place(out)
        gpu.add_dequantized(*device[2:], bits, found, add, is_float)
        reference.add_dequantized(*host[2:], bits, out, add, is_float)
        np.testing.assert_array_equal(to_host(found), out)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("time", "heads", "head"), [(64, 2, 32), (256, 3, 64), (100, 2, 64), (7, 1, 8), (1024, 2, 128)]
)
def test_attention_of_cudnn_is_the_composed_one(dtype: str, time: int, heads: int, head: int) -> None:
    pytest.importorskip("cudnn")
    qkv, g = draw(dtype, 2, time, 3 * heads * head), draw(dtype, 2, time, heads * head)
    exact = mg.Tensor(wide(qkv), requires_grad=True)
    y = mg.causal_attention(exact, num_heads=heads)
    mg.backward_with_grad(y, wide(g))
    found, vjp = gpu.causal_attention(to_device(qkv), heads)
    dqkv = vjp(to_device(g))
    for got, want in ((found, y.data), (dqkv, exact.grad)):
        error = np.linalg.norm(wide(to_host(got)) - want) / np.linalg.norm(want)
        assert error < 2 * TOLERANCE[dtype], error
    again = gpu.causal_attention(to_device(qkv), heads)[1](to_device(g))
    np.testing.assert_array_equal(to_host(again).view(np.uint16), to_host(dqkv).view(np.uint16))


@pytest.mark.parametrize("size", [1.0, 1e-12, 1e12, 0.0])
@pytest.mark.parametrize("place", [to_device, unaligned], ids=["aligned", "unaligned"])
def test_attention_in_tf32_has_its_precision_and_float32s_range_of_gradients(
    monkeypatch: pytest.MonkeyPatch, size: float, place: Any
) -> None:
    """It goes through float16, which ends at 6e-8 and 65504."""
    pytest.importorskip("cudnn")
    qkv, g = draw("float32", 2, 100, 3 * 2 * 32), draw("float32", 2, 100, 2 * 32) * np.float32(size)
    assert gpu.causal_attention(to_device(qkv), 2) is None
    monkeypatch.setenv("CUPY_TF32", "1")
    exact = mg.Tensor(wide(qkv), requires_grad=True)
    y = mg.causal_attention(exact, num_heads=2)
    mg.backward_with_grad(y, wide(g))
    found, vjp = gpu.causal_attention(place(qkv), 2)
    dqkv = vjp(place(g))
    assert found.dtype == dqkv.dtype == np.float32
    for got, want in ((found, y.data), (dqkv, exact.grad)):
        error = np.linalg.norm(wide(to_host(got)) - want)
        assert error <= 2 * TOLERANCE["float16"] * np.linalg.norm(want), error


def test_the_table_takes_gpu_kernels_by_dtype() -> None:
    for name in DTYPES:
        x = to_device(draw(name, 2, 3))
        assert kernels_of(x).gelu is gpu.gelu
        assert is_half(x.dtype) == (name != "float32")
    assert kernels_of(to_device(np.ones(3))).gelu is reference.gelu
    assert kernels_of(to_device(draw("float32", 3)), to_device(draw("bfloat16", 3))).gelu is reference.gelu
