"""Each kernel that is compiled for the CPU against the reference: values, layouts, empty arrays, nan and infinity."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.machinery import ModuleSpec
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cases import case as named
from kernel_modes import use_kernels

import minigrad as mg
from minigrad import kernels
from minigrad.backend import Array
from minigrad.kernels import kernels_of, kernels_of_runs, reference
from minigrad.kernels.attention import cudnn_attention
from minigrad.models import GPT, GPTConfig
from minigrad.ops.attention import attend
from minigrad.optim import AdamW, Optimizer
from minigrad.precision import dtype_of

ROOT = Path(__file__).parents[2]
DTYPES = [np.float32, np.float64]
Sample = Callable[..., Array]  # sample(*shape): an array of the dtype that is tested, maybe with odd values


@pytest.fixture(scope="module")
def cpu() -> Any:
    pytest.importorskip("numba")
    return pytest.importorskip("minigrad.kernels.cpu")


def some_ids(high: int, *shape: int) -> Array:
    return np.random.default_rng(1).integers(high, size=shape)


def some_mask(*shape: int) -> Array:
    return np.random.default_rng(2).random(shape) < 0.7


def softmax_of(x: Array) -> Array:
    return reference.softmax(x)


def norm_args(x: Sample, m: int, n: int) -> list[Array]:
    """g, x, the mean and the inverse of x's rows: x as it was in a forward, whatever the cotangent is."""
    rows = tame(x(m, n))
    _, mean, inverse = reference.layer_norm(rows, rows[0] if m else np.zeros(n, rows.dtype), rows[:1].sum(0), 1e-5)
    return [x(m, n), rows, mean, inverse]


CODES = {"8": (8, False), "4": (4, False), "e2m1": (4, True)}  # bits, and whether they are floats


def quantize_args(bits: int, is_float: bool, x: Sample, m: int, n: int) -> list[Any]:
    """Blocks of 4 n numbers, one more than are added to."""
    num_blocks = -(-m // 4) + 1
    kept = tame(x(num_blocks * 4 * n)).copy()
    kept[-4 * n :] = 0
    codes, scales = np.zeros(kept.size * bits // 8, np.uint8), np.zeros(num_blocks, np.float32)
    return [x(m * n).copy(), kept, codes, scales, bits, is_float]


def dequantize_args(bits: int, is_float: bool, x: Sample, m: int, n: int) -> list[Any]:
    codes, scales = some_ids(256, (m + 1) * n * bits).astype(np.uint8), abs(x(m + 1)).astype(np.float32)
    return [codes, scales, bits, tame(x((m + 1) * 8 * n - 3)).copy(), bits == 4, is_float]


def tame(x: Array) -> Array:
    """Return x without nan and large numbers, in the layout that it has."""
    y = np.empty_like(x)
    y[...] = np.where(abs(x) < 10, x, 1)
    return y


# name -> its arguments for rows of shape (m, n), given how to sample arrays.
CASES: dict[str, Callable[[Sample, int, int], list[Any]]] = {
    "relu": lambda x, m, n: [x(m, n)],
    "leaky_relu": lambda x, m, n: [x(m, n), 0.1],
    "select": lambda x, m, n: [x(m, n), some_mask(m, n), 1.25],
    "add_select": lambda x, m, n: [x(m, n), x(m, n), some_mask(m, n), 1.25],
    "sigmoid": lambda x, m, n: [x(m, n)],
    "sigmoid_dx": lambda x, m, n: [x(m, n), tame(x(m, n))],
    "silu": lambda x, m, n: [x(m, n)],
    "gelu": lambda x, m, n: [x(m, n), False],
    "gelu exact": lambda x, m, n: [x(m, n), True],
    "linear_gelu": lambda x, m, n: [x(m, n), tame(x(n, 6)), tame(x(6)), False],
    "linear_gelu exact": lambda x, m, n: [x(m, n), tame(x(n, 6)), tame(x(6)), True],
    "gelu_back": lambda x, m, n: [x(m, n).copy(), x(m, n).copy(), False],
    "gelu_back read-only": lambda x, m, n: [x(m, n), x(m, n), False],
    "gelu_back exact": lambda x, m, n: [x(m, n).copy(), x(m, n).copy(), True],
    "linear_gelu_back": lambda x, m, n: [x(m, 6), tame(x(n, 6)), x(m, n).copy(), False],
    "softmax": lambda x, m, n: [x(m, n)],
    "softmax_dx": lambda x, m, n: [x(m, n), softmax_of(tame(x(m, n)))],
    "log_softmax": lambda x, m, n: [x(m, n)],
    "log_softmax_dx": lambda x, m, n: [x(m, n), np.log(softmax_of(tame(x(m, n))))],
    "cross_entropy": lambda x, m, n: [x(m, n), some_ids(n, m) - 1, 0.0, 0.5],
    "cross_entropy smooth": lambda x, m, n: [x(m, n), some_ids(n, m), 0.1, 0.5],
    "layer_norm": lambda x, m, n: [x(m, n), x(n), x(n), 1e-5],
    "layer_norm_dx": lambda x, m, n: [*norm_args(x, m, n), x(n)],
    "layer_norm_back": lambda x, m, n: [*norm_args(x, m, n), x(n)],
    "layer_norm_back beside": lambda x, m, n: [*norm_args(x, m, n), x(n), x(m, n)],
    "layer_norm_dgain": norm_args,
    "rms_norm": lambda x, m, n: [x(m, n), x(n), 1e-5],
    "rms_norm_dx": lambda x, m, n: [*norm_args(x, m, n)[:2], norm_args(x, m, n)[3], x(n)],
    "rms_norm_dgain": lambda x, m, n: [*norm_args(x, m, n)[:2], norm_args(x, m, n)[3]],
    "attention_weights": lambda x, m, n: [x(2, m, n), 0.5, None, None],
    "attention_weights causal": lambda x, m, n: [x(2, m, m + n), 0.5, n, None],
    "attention_weights large": lambda x, m, n: [x(2, m, m + n).copy() * 100, 1.5, n, some_mask(2, m, m + n)],
    "attention_dscores": lambda x, m, n: [x(2, m, n).copy(), softmax_of(tame(x(2 * m, n))).reshape(2, m, n), 0.5],
    "embedding_dtable": lambda x, m, n: [x(m, n), some_ids(3, m), tame(x(5, n)), False],
    "embedding_dtable added": lambda x, m, n: [x(m, n), some_ids(3, m), tame(x(5, n)), True],
    "sgd": lambda x, m, n: [x(m * n).copy(), x(m * n), None, 0.1, 0.0, 0.0],
    "sgd momentum": lambda x, m, n: [x(m * n).copy(), x(m * n), x(m * n).copy(), 0.1, 0.9, 0.01],
    "adamw": lambda x, m, n: [
        *(x(m * n).copy(), x(m * n), x(m * n).copy(), abs(x(m * n))),
        *(0.9, 0.999, 1e-3, 1e-8, 0.99),
    ],
    "square_sum": lambda x, m, n: [x(m * n)],
    "exact_square_sums": lambda x, m, n: [x(m * n)],
    **{f"quantize {name}": partial(quantize_args, *kind) for name, kind in CODES.items()},
    **{f"add_dequantized {name}": partial(dequantize_args, *kind) for name, kind in CODES.items()},
}
# Kernels with the bits of the reference.
EXACT = {"relu", "leaky_relu", "select", "add_select", "sgd", "adamw", "quantize", "add_dequantized"}
SHAPES = [(5, 7), (3, 1), (1, 65), (33, 64), (4, 129), (0, 5)]
each_case = pytest.mark.parametrize("case", CASES)


def outputs(module: Any, case: str, args: list[Any]) -> list[Array]:
    """Call a kernel; return what it returns and what it wrote into its arguments, as arrays."""
    args = [a.copy() if isinstance(a, np.ndarray) and a.flags.writeable else a for a in args]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        result = getattr(module, case.split()[0])(*args)
    in_place = [a for a in args if isinstance(a, np.ndarray)] if result is None else []
    if case.startswith("layer_norm_back"):  # parts of dgain and dbias come only from where one pass gives them
        g, x, mean, inverse, *_ = args
        dx, dgain, dbias = result
        sums = module.layer_norm_dgain(g, x, mean, inverse), g.sum(axis=0)
        result = (dx, *(sums if dgain is None else (dgain.sum(axis=0), dbias.sum(axis=0))))
    if "gelu_back" in case:
        y, dh, parts = result
        result = y, dh, dh.sum(axis=0) if parts is None else parts.sum(axis=0)
    return [np.asarray(y) for y in (result if isinstance(result, tuple) else (result,)) if y is not None] + in_place


def check(cpu: Any, case: str, args: list[Any], dtype: Any) -> None:
    pairs = zip(outputs(cpu, case, args), outputs(reference, case, args), strict=True)
    for got, expected in pairs:
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        if case.split()[0] in EXACT:
            np.testing.assert_array_equal(got, expected)
        else:
            scale = np.nanmax(abs(expected), initial=1, where=np.isfinite(expected))
            tolerance = (1e-5 if dtype == np.float32 else 1e-13) * scale
            np.testing.assert_allclose(got, expected, rtol=100 * np.finfo(dtype).eps, atol=tolerance)


def sampler(dtype: Any, *, read_only: bool = False, strided: bool = False, odd: float | None = None) -> Sample:
    generator = np.random.default_rng(0)

    def sample(*shape: int) -> Array:
        x = generator.standard_normal(shape).astype(dtype)
        if odd is not None and x.size:
            x.reshape(-1)[generator.integers(x.size)] = odd
        if strided:
            x = np.repeat(x[..., None], 2, axis=-1)[..., 0]
        x.flags.writeable = not read_only
        return x

    return sample


def test_every_kernel_that_is_compiled_has_a_case_and_a_reference(cpu: Any) -> None:
    # Where the reference is ops: see test_generation.py; and what is there only with BLAS: see below.
    others = {"block_step", "causal_attention", "linear", "product"}
    assert {case.split()[0] for case in CASES} == set(kernels.names(cpu)) - others
    assert set(kernels.names(cpu)) <= set(kernels.names(reference))


@each_case
def test_it_gives_what_the_reference_gives(cpu: Any, case: str) -> None:
    for dtype, shape in product(DTYPES, SHAPES):
        with named(dtype.__name__, shape):
            check(cpu, case, CASES[case](sampler(dtype), *shape), dtype)


# Half precision is full of ties, which go either way as a scale is rounded: `quantize` has another test for these.
@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("quantize")])
def test_the_reference_of_half_precision_is_rounded_once(case: str) -> None:
    for name, shape in product(("float16", "bfloat16"), [(5, 7), (33, 64), (0, 5)]):
        with named(name, shape):
            check_half_precision(case, name, shape)


def check_half_precision(case: str, name: str, shape: tuple[int, int]) -> None:
    half, epsilon = dtype_of(name), {"float16": 2**-10, "bfloat16": 2**-7}[name]

    def cast(array: Any, dtype: Any, *, of: str) -> Any:
        return array.astype(dtype) if getattr(array, "dtype", np.dtype(int)).kind in of else array

    narrow = [cast(a, half, of="f") for a in CASES[case](sampler(np.float64), *shape)]
    wide = [cast(a, np.float64, of="fV") for a in narrow]
    if case.split()[0] in {"adamw", "sgd"}:
        narrow[2:] = [cast(a, np.float32, of="fV") for a in narrow[2:]]  # an optimizer's state
    for got, expected in zip(outputs(reference, case, narrow), outputs(reference, case, wide), strict=True):
        scale = max(1.0, float(abs(expected).max(initial=0)))
        np.testing.assert_allclose(got.astype(np.float64), expected, rtol=2 * epsilon, atol=2 * epsilon * scale)


@pytest.mark.parametrize("kind", CODES.values(), ids=CODES)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_what_is_said_of_half_precision_and_what_is_kept_make_up_the_numbers(name: str, kind: tuple[int, bool]) -> None:
    bits, is_float = kind
    x, kept, codes, scales, *_ = (
        a.astype(dtype_of(name)) if getattr(a, "dtype", None) == np.float64 else a
        for a in quantize_args(bits, is_float, sampler(np.float64), 9, 8)
    )
    wanted = kept.astype(np.float64)
    wanted[: x.size] += x.astype(np.float64)
    reference.quantize(x, kept, codes, scales, bits, is_float)
    said = np.empty(kept.size)
    reference.add_dequantized(codes, scales, bits, said, False, is_float)
    np.testing.assert_array_equal(x, said[: x.size].astype(x.dtype))
    np.testing.assert_allclose(said + kept.astype(np.float64), wanted, atol=2**-9 * abs(wanted).max())


@each_case
def test_layouts_and_read_only_memory_do_not_matter(cpu: Any, case: str) -> None:
    for dtype in DTYPES:
        plain = CASES[case](sampler(dtype), 5, 7)
        for kind in ({"strided": True}, {"read_only": True}):
            args = CASES[case](sampler(dtype, **kind), 5, 7)  # type: ignore[arg-type]
            for got, expected in zip(outputs(cpu, case, args), outputs(cpu, case, plain), strict=True):
                np.testing.assert_array_equal(got, expected)


@each_case
def test_nan_infinity_and_extremes_come_out_as_from_the_reference(cpu: Any, case: str) -> None:
    for odd, dtype in product([np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-40], DTYPES):
        args = CASES[case](sampler(dtype, odd=odd), 5, 9)
        for got, expected in zip(outputs(cpu, case, args), outputs(reference, case, args), strict=True):
            with named(odd, dtype.__name__):
                np.testing.assert_array_equal(np.isfinite(got), np.isfinite(expected))
                # In a sum where inf meets inf it is the order's doing which is nan.
                if "norm_dx" not in case and "norm_back" not in case:
                    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
                    np.testing.assert_array_equal(got == np.inf, expected == np.inf)


@pytest.mark.parametrize("name", ["gelu", "gelu exact", "sigmoid", "silu", "softmax"])
def test_float32_is_right_to_a_few_units_of_the_last_place(cpu: Any, name: str) -> None:
    x = np.linspace(-20, 20, 40_001, dtype=np.float32)[None]
    more = [name == "gelu exact"] if name.startswith("gelu") else []
    single = outputs(cpu, name, [x, *more])
    for got, expected in zip(single, outputs(reference, name, [x.astype(np.float64), *more]), strict=True):
        np.testing.assert_allclose(got, expected, rtol=4e-7, atol=2e-6 if name.startswith("gelu") else 4e-7)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "layer_norm", "rms_norm", "gelu"])
def test_a_row_has_the_same_bits_whatever_stands_beside_it(cpu: Any, name: str) -> None:
    x, *rest = CASES[name](sampler(np.float32), 7, 65)
    whole = outputs(cpu, name, [x, *rest])
    for i in range(len(x)):
        for part, all_rows in zip(outputs(cpu, name, [x[i : i + 1].copy(), *rest]), whole, strict=True):
            np.testing.assert_array_equal(part[0], all_rows[i])


# What calls BLAS: a linear map, and causal attention whole, which the reference leaves to the op.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 65, 33), (1, 1, 1), (64, 128, 64), (0, 3, 4), (3, 0, 4), (3, 4, 0)], ids=str)
@pytest.mark.parametrize("odd", [0, np.nan, np.inf, -np.inf])
def test_a_linear_map_is_what_its_product_and_sums_give(
    cpu: Any, shape: tuple[int, int, int], dtype: Any, odd: float
) -> None:
    with_blas(cpu)
    m, n, k = shape
    for kind in ({}, {"strided": True}, {"read_only": True}):
        sample = sampler(dtype, **kind)  # type: ignore[arg-type]
        x, w, b, beside = sample(m, n), sample(n, k), sample(k), sample(m, k)
        if odd and x.size and b.size and not kind:
            x[0, 0], b[0], beside[-1, -1] = 1, odd, -odd
        for others in ((b,), (b, beside)):
            with np.errstate(invalid="ignore"):
                got, expected = cpu.linear(x, w, *others), reference.linear(x, w, *others)
            assert got.dtype == dtype
            np.testing.assert_allclose(got, expected, rtol=2e-6 if dtype == np.float32 else 1e-14, atol=1e-5)


def attention_pair(cpu: Any, qkv: Array, num_heads: int, g: Array) -> list[tuple[Array, Array]]:
    """Return the output and the gradient of the compiled kernel, each beside that of the composed op."""
    y, vjp = cpu.causal_attention(qkv, num_heads)
    batch, time, width = y.shape
    expected, dqkv = np.empty(y.shape, y.dtype), np.empty(qkv.shape, y.dtype)

    def heads(x: Array, parts: int) -> list[Array]:
        x = x.reshape(batch, time, parts, num_heads, width // num_heads)
        return [x[:, :, i].swapaxes(1, 2) for i in range(parts)]

    backward = attend(*heads(qkv, 3), *heads(expected, 1), causal=True, mask=None)
    backward(*heads(g, 1), *heads(dqkv, 3))
    return [(y, expected), (vjp(g), dqkv)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "time", "num_heads", "d"),
    # One query; fewer than a block; blocks that are kept, whole and not; those that are not; a head of one number.
    [(1, 1, 1, 3), (2, 5, 3, 2), (2, 64, 2, 8), (3, 47, 2, 4), (2, 130, 3, 5), (1, 65, 1, 1), (0, 7, 2, 4)],
)
def test_causal_attention_is_what_its_products_give(
    cpu: Any, batch: int, time: int, num_heads: int, d: int, dtype: Any
) -> None:
    with_blas(cpu)
    for kind in ({}, {"strided": True}, {"read_only": True}):
        sample = sampler(dtype, **kind)  # type: ignore[arg-type]
        qkv, g = sample(batch, time, 3 * num_heads * d), sample(batch, time, num_heads * d)
        for got, expected in attention_pair(cpu, qkv, num_heads, g):
            tolerance = 2e-6 if dtype == np.float32 else 1e-14
            np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * abs(expected).max(initial=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 65, 33), (1, 1, 1), (64, 128, 64), (0, 3, 4), (3, 0, 4), (3, 4, 0)], ids=str)
def test_a_product_is_added_to_what_is_there(cpu: Any, shape: tuple[int, int, int], dtype: Any) -> None:
    with_blas(cpu)
    m, n, k = shape
    for kind in ({}, {"strided": True}, {"read_only": True}):
        sample = sampler(dtype, **kind)  # type: ignore[arg-type]
        for a, b in ((sample(m, n), sample(n, k)), (sample(n, m).T, sample(n, k)), (sample(m, n), sample(k, n).T)):
            there = sampler(dtype)(m, k)
            for out in (there.copy(), there.copy(order="F"), np.repeat(there, 2, axis=1)[:, ::2]):
                assert cpu.product(a, b, out, True) is out
                np.testing.assert_allclose(out, there + a @ b, rtol=0, atol=1e-4 if dtype == np.float32 else 1e-13)
            wide = there.astype(np.float64)
            cpu.product(a, b, wide, True)  # a gradient that is added up in a wider dtype than that of its parts
            np.testing.assert_array_equal(wide, there + reference.product(a, b).astype(np.float64))
    stack = sampler(dtype)(2, 3, 4)
    out = np.ones((2, 3, 3), dtype)
    np.testing.assert_allclose(cpu.product(stack, stack.swapaxes(1, 2), out, True), 1 + stack @ stack.swapaxes(1, 2))


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("time", [9, 70])
def test_causal_attention_gives_nan_where_the_composed_op_does(cpu: Any, odd: float, time: int) -> None:
    with_blas(cpu)
    for place in (0, 7, 13):  # among the queries, the keys, the values; of the last position, which only it sees
        qkv, g = sampler(np.float32)(1, time, 18), sampler(np.float32)(1, time, 6)
        qkv[0, -1, place] = odd
        with np.errstate(all="ignore"):
            pairs = attention_pair(cpu, qkv, 3, g)
        for got, expected in pairs[:1]:
            np.testing.assert_array_equal(np.isnan(got[0, -1]), np.isnan(expected[0, -1]))
            assert np.isfinite(got[0, : (time - 1) // 32 * 32]).all()


def test_causal_attention_of_scores_that_are_all_minus_infinity_is_0(cpu: Any) -> None:
    with_blas(cpu)
    qkv = np.ones((1, 1, 3), np.float64)
    qkv[0, 0, :2] = 1e200, -1e200
    with np.errstate(over="ignore"):
        (y, expected), (dqkv, _) = attention_pair(cpu, qkv, 1, np.ones((1, 1, 1)))
    np.testing.assert_array_equal(y, expected)
    assert dqkv[0, 0, 2] == 0


def test_ranks_that_are_threads_have_room_of_their_own(cpu: Any) -> None:
    with_blas(cpu)
    qkv, g = sampler(np.float32)(2, 150, 36), sampler(np.float32)(2, 150, 12)

    def train(_: int) -> list[Array]:
        y, vjp = cpu.causal_attention(qkv, 3)
        return [y, vjp(g)]

    first = train(0)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(train, range(40)):
            for got, expected in zip(result, first, strict=True):
                np.testing.assert_array_equal(got, expected)


def with_blas(cpu: Any) -> None:
    """Skip the test where NumPy's BLAS is one that is not known."""
    if not hasattr(cpu, "causal_attention"):
        pytest.skip("no product of BLAS was found")


def test_where_blas_is_not_found_attention_is_composed() -> None:
    pytest.importorskip("numba")
    program = """
import numpy as np
from unittest import mock
from minigrad.kernels import compiling
with mock.patch("ctypes.CDLL", lambda *args: object()):
    from minigrad.kernels import blas
assert not blas.is_available
import minigrad as mg
y = mg.causal_attention(np.ones((2, 64, 96), np.float32), num_heads=4)
np.testing.assert_allclose(y.data, 1, rtol=1e-6)
from minigrad.kernels import cpu
assert not {"causal_attention", "linear", "product"} & set(vars(cpu))
"""
    result = run(program)
    assert result.returncode == 0, result.stderr


# Which kernels an op gets.


def test_large_arrays_of_one_dtype_get_the_compiled_ones(cpu: Any) -> None:
    large, small = np.zeros(kernels._LARGE, np.float32), np.zeros(kernels._LARGE - 1, np.float32)
    assert kernels_of(large).gelu is cpu.gelu
    assert kernels_of(large, small).gelu is cpu.gelu
    assert kernels_of(large).softplus is reference.softplus  # which numba would not make faster
    for arrays in [(small, large), (large.astype(np.float16),), (large, small.astype(float)), (large.astype(">f4"),)]:
        assert kernels_of(*arrays).gelu is reference.gelu


def test_a_short_run_of_a_large_array_gets_the_compiled_ones(cpu: Any) -> None:
    large, small = np.zeros(16 * kernels._LARGE, np.float32), np.zeros(16 * kernels._LARGE - 1, np.float32)
    assert kernels_of_runs(large[3:9], small[:6]).adamw is cpu.adamw
    assert kernels_of_runs(small[3:9], large[:6]).adamw is reference.adamw
    assert kernels_of_runs(large[3:9], small[:6].astype(float)).adamw is reference.adamw
    assert kernels_of_runs(np.zeros(5, np.float32)).adamw is reference.adamw
    assert kernels_of_runs(large).adamw is cpu.adamw
    shared = np.zeros(large.nbytes, np.uint8).view(np.float32)  # as memory that ranks share
    assert kernels_of_runs(shared[3:9], small[:6]).adamw is cpu.adamw


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpt_trains_alike_with_both(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for mode in ("numpy", "numba"):
        use_kernels(mode, monkeypatch)
        model = GPT(GPTConfig(vocab_size=11, context=9, num_layers=2, num_heads=2, width=12), dtype=dtype)
        optimizer = Optimizer(model.parameters(), AdamW(lr=1e-2))
        x = some_ids(11, 3, 9)
        for _ in range(4):
            optimizer.zero_grad()
            loss = mg.cross_entropy(model(x), x)
            mg.backward(loss)
            optimizer.step()
        ends.append(loss.item())
    np.testing.assert_allclose(*ends, rtol=1e-4 if dtype == np.float32 else 1e-11)


PROGRAM = """
import numpy as np, sys
import minigrad as mg
assert "numba" not in sys.modules
mg.gelu(np.ones(10, np.float32))
assert "numba" not in sys.modules
y = mg.gelu(np.ones((8, 1024), np.float32))
np.testing.assert_allclose(y.data, 0.8411920, rtol=1e-6)
print("numba" in sys.modules, "minigrad.kernels.cpu" in sys.modules)
"""


def run(program: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True
    )


def test_numba_is_imported_when_a_large_array_first_comes(cpu: Any) -> None:
    result = run(PROGRAM)
    assert (result.stdout, result.stderr) == ("True True\n", "")


def test_the_environment_keeps_to_numpy() -> None:
    result = run(PROGRAM, MINIGRAD_KERNELS="numpy")
    assert (result.stdout, result.stderr) == ("False False\n", "")
    result = run(PROGRAM, MINIGRAD_KERNELS="fortran")
    assert "ValueError: MINIGRAD_KERNELS must be numba or numpy, got 'fortran'" in result.stderr


def test_without_numba_or_with_one_that_does_not_work_numpy_computes(cpu: Any) -> None:
    result = run(
        "import sys; sys.modules['numba'] = None\nimport importlib.util\n"
        + PROGRAM.replace('"numba" in sys.modules,', "").replace('assert "numba" not in sys.modules', "")
    )
    assert result.returncode == 0, result.stderr


def test_the_start_line_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINIGRAD_KERNELS", raising=False)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    assert kernels.describe() == "NumPy kernels (numba is not installed)"
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: object())
    assert kernels.describe() == "numba kernels"
    monkeypatch.setenv("MINIGRAD_KERNELS", "numpy")
    assert kernels.describe() == "NumPy kernels (MINIGRAD_KERNELS=numpy)"


# What is kept on disk.


def test_processes_that_start_together_compile_in_turn(cpu: Any, tmp_path: Path) -> None:
    program = """
import numpy as np
from minigrad.kernels.activations import cpu
for dtype in (np.float32, np.float64):
    x = np.ones(5000, dtype)
    np.testing.assert_array_equal(cpu.select(x, x > 0, 2.0), 2)
stats = cpu._select.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""
    environ = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    ranks = [
        subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    hits, misses = zip(*[map(int, rank.communicate(timeout=120)[0].split()) for rank in ranks], strict=True)
    assert (sum(hits), sum(misses)) == (2, 2)  # two dtypes, each compiled once and fetched once


@pytest.mark.long
def test_a_kernel_is_compiled_again_when_a_function_that_it_inlines_has_changed(cpu: Any, tmp_path: Path) -> None:
    """numba looks at the file of the loop alone, and functions of one number lie in another."""
    shutil.copytree(ROOT / "minigrad", tmp_path / "minigrad", ignore=shutil.ignore_patterns("__pycache__"))
    program = """
import numpy as np
from minigrad.kernels.activations import cpu
cpu.sigmoid(np.ones(5, np.float32))
print(sum(cpu._sigmoid.stats.cache_hits.values()))
"""
    hits = []
    for change in (False, False, True):
        if change:
            os.utime(tmp_path / "minigrad" / "kernels" / "scalars.py", (0, 0))
        result = run(program, PYTHONPATH=str(tmp_path), NUMBA_CACHE_DIR=str(tmp_path / "cache"), PYTHONSAFEPATH="1")
        hits.append(result.stdout.strip())
    assert hits == ["0", "1", "0"], result.stderr


def test_a_machine_without_a_folder_to_write_to_compiles_anyway(cpu: Any) -> None:
    refuse = """
import numba.core.caching
def refuse(self): raise PermissionError
numba.core.caching._CacheLocator.ensure_cache_path = refuse
from minigrad.kernels.activations import cpu
print(cpu._gelu_tanh.stats.cache_path)
"""
    result = run(refuse + PROGRAM.replace('assert "numba" not in sys.modules', ""))
    assert (result.returncode, result.stdout) == (0, "None\nTrue True\n"), result.stderr
    assert result.stderr.count("numba finds no folder to keep compiled kernels in") == 1


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (91900, "by cuDNN"),
        (91400, "by products (cuDNN 91400 is older than 91900)"),
        (None, "by products (nvidia-cudnn-frontend finds no cuDNN: Unable to find symbol cudnnGetVersion)"),
    ],
)
def test_attention_of_an_old_cudnn_or_none_is_made_of_products(
    monkeypatch: pytest.MonkeyPatch, version: int | None, said: str
) -> None:
    def backend_version() -> int:
        if version is None:  # the package is installed without the library
            raise RuntimeError("Unable to find symbol cudnnGetVersion")
        return version

    cudnn: Any = ModuleType("cudnn")
    cudnn.__spec__, cudnn.backend_version = ModuleSpec("cudnn", None), backend_version
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    monkeypatch.setattr(cudnn_attention, "why_not", cudnn_attention.why_not.__wrapped__)
    assert said in kernels.describe_gpu()
    assert cudnn_attention.takes((2, 64, 3 * 128), 4) == (version == 91900)


@pytest.mark.parametrize("mode", ["numpy", "numba"])
def test_exact_square_sums_do_not_show_how_numbers_are_cut(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    use_kernels(mode, monkeypatch)
    generator = np.random.default_rng(0)
    x = (generator.standard_normal(40_000) * 2.0 ** generator.integers(-30, 30, 40_000)).astype(np.float32)
    exact = math.fsum((x.astype(np.float64) ** 2).tolist())
    for cuts in ([], [5000], [1, 17_000, 30_011]):
        pieces = np.split(x, cuts)
        assert math.fsum(part for piece in pieces for part in kernels_of(piece).exact_square_sums(piece)) == exact
