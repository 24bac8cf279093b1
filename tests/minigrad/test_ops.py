"""The op table: one row for each way to call an op, and what must hold for every row.

All samples are read-only, so an op that writes into its inputs or its cotangent fails wherever it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import op_rows_math
import op_rows_nn
import pytest
from cases import case
from kernel_modes import MODES, use_kernels
from op_table import Row, is_array, is_float, read_only

import minigrad as mg
from minigrad import ops
from minigrad.backend import Array, scatter_add_rows, to_device

ROWS = op_rows_math.ROWS + op_rows_nn.ROWS
LOSSES = ("binary_cross_entropy_with_logits", "cross_entropy", "mse")


@pytest.fixture(autouse=True, params=MODES)
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all of this file with each set of kernels."""
    use_kernels(request.param, monkeypatch)


def row_id(row: Row) -> str:
    shapes = ["x".join(map(str, x.shape)) if is_array(x) else str(x) for x in row.sample()]
    return f"{row.name}({','.join(shapes)})"


def each_row(test: Callable[[Row], None]) -> Callable[[str], None]:
    """Make a test of each op out of one of a row, which runs on all rows of its op."""

    @pytest.mark.parametrize("name", ops.__all__)
    def on_all_rows(name: str) -> None:
        for row in ROWS:
            if row.name == name:
                with case(row_id(row)):
                    test(row)

    return on_all_rows


def record(row: Row, args: list[Any]) -> tuple[mg.Tensor, list[mg.Tensor]]:
    """Call the op with every floating point array as a leaf; return the output and the leaves."""
    tensors = [mg.Tensor(x, requires_grad=True) if is_float(x) else x for x in args]
    return row.op(*tensors, **row.kwargs), [t for t in tensors if isinstance(t, mg.Tensor)]


def grads(row: Row, args: list[Any]) -> list[Array]:
    y, leaves = record(row, args)
    cotangent = read_only(np.asarray(np.random.default_rng(8).standard_normal(y.shape)).astype(y.dtype))
    mg.backward_with_grad(y, cotangent)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def test_every_op_has_a_row() -> None:
    assert {row.name for row in ROWS} == set(ops.__all__)


@each_row
def test_value_is_plain_numpys(row: Row) -> None:
    args = row.sample()
    y, expected = row.op(*args, **row.kwargs), row.plain(*args, **row.kwargs)
    assert y.shape == np.shape(expected)
    np.testing.assert_allclose(y.data, expected, rtol=1e-12, atol=1e-14)


@each_row
def test_vjp_is_the_derivative(row: Row) -> None:
    mg.check_vjp(row.op, *row.sample(), **row.kwargs)


@each_row
def test_dtype_is_kept(row: Row) -> None:
    for dtype in (np.float32, np.float16):
        kwargs = {**row.kwargs, "dtype": dtype} if row.name == "astype" else row.kwargs
        y, leaves = record(Row(row.name, row.plain, row.args, kwargs), row.sample(dtype))
        assert y.dtype == (np.float32 if row.name in LOSSES else dtype)  # a loss in half precision has three digits
        assert y.node is not None
        g = read_only(np.ones(y.shape, y.dtype))
        vjps = y.node.vjps
        contributions = vjps(g) if isinstance(vjps, mg.Joint) else [vjp(g) for vjp in vjps]
        # What a vjp returns, not leaf.grad: a leaf copies into its own dtype and would hide a wide one.
        assert [(c.shape, c.dtype) for c in contributions] == [(leaf.shape, dtype) for leaf in leaves]


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "concatenate"])
def test_operands_of_two_dtypes_get_gradients_of_their_own(name: str) -> None:
    narrow, wide = (mg.Tensor(np.ones((2, 3), dtype), requires_grad=True) for dtype in (np.float32, np.float64))
    y = getattr(mg, name)(narrow, wide)
    assert y.dtype == np.float64
    assert [vjp(np.ones(y.shape)).dtype for vjp in y.node.vjps] == [np.float32, np.float64]


@each_row
def test_float32_is_close_to_float64(row: Row) -> None:
    single, double = row.sample(np.float32), row.sample()
    np.testing.assert_allclose(
        row.op(*single, **row.kwargs).data, row.op(*double, **row.kwargs).data, rtol=1e-4, atol=1e-5
    )
    for g32, g64 in zip(grads(row, single), grads(row, double), strict=True):
        np.testing.assert_allclose(g32, g64, rtol=1e-3, atol=1e-4)


@each_row
def test_layout_of_the_input_does_not_matter(row: Row) -> None:
    args = row.sample()
    strided = [read_only(np.repeat(x[..., None], 2, axis=-1)[..., 0]) if is_array(x) else x for x in args]
    fortran = [np.asfortranarray(x) if is_array(x) else x for x in args]
    expected, expected_grads = row.op(*args, **row.kwargs).data, grads(row, args)
    for other in (strided, fortran):
        np.testing.assert_allclose(row.op(*other, **row.kwargs).data, expected, rtol=1e-12, atol=1e-13)
        for g, expected_g in zip(grads(row, other), expected_grads, strict=True):
            np.testing.assert_allclose(g, expected_g, rtol=1e-12, atol=1e-13)


def test_operators_and_methods_are_the_ops() -> None:
    x, w = mg.Tensor(np.arange(6.0).reshape(2, 3)), mg.Tensor(np.arange(1.0, 7.0).reshape(2, 3))
    array = w.data
    for got, expected in [
        (x + w, x.data + array),
        (x - w, x.data - array),
        (x * w, x.data * array),
        (x / w, x.data / array),
        (-x, -x.data),
        (x @ w.T, x.data @ array.T),
        (array + x, array + x.data),
        (array - x, array - x.data),
        (array * x, array * x.data),
        (1 / w, 1 / array),
        (array.T @ x, array.T @ x.data),
        (x[1], x.data[1]),
        (x.sum(axis=0), x.data.sum(0)),
        (x.mean(axis=0), x.data.mean(0)),
        (x.reshape(3, -1), x.data.reshape(3, 2)),
        (x.transpose(1, 0), x.data.T),
        (x.transpose(), x.data.T),
        (x.astype(np.float32), x.data.astype(np.float32)),
    ]:
        assert isinstance(got, mg.Tensor)
        np.testing.assert_array_equal(got.data, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gelu_is_finite_far_from_zero(dtype: Any) -> None:
    x = mg.Tensor(np.array([-1e4, -50, 50, 1e4], dtype), requires_grad=True)
    y = mg.gelu(x)
    mg.backward_with_grad(y, np.ones(4, dtype))
    np.testing.assert_array_equal(y.data, [0, 0, 50, 1e4])
    np.testing.assert_array_equal(x.grad, [0, 0, 1, 1])


def test_cross_entropy_is_stable() -> None:
    logits = mg.Tensor(np.array([[1000.0, 0.0], [-1000.0, 0.0]]), requires_grad=True)
    loss = mg.cross_entropy(logits, np.array([1, 1]))
    mg.backward(loss)
    assert loss.item() == 500
    np.testing.assert_array_equal(logits.grad, [[0.5, -0.5], [0, 0]])


def test_attention_sees_no_later_position() -> None:
    qkv = np.random.default_rng(0).standard_normal((1, 130, 12))
    later = qkv.copy()
    later[:, 100:] += 1
    before, after = (mg.causal_attention(x, num_heads=2).data for x in (qkv, later))
    np.testing.assert_array_equal(before[:, :100], after[:, :100])
    assert np.all(before[:, 100:] != after[:, 100:])


def test_attention_is_stable() -> None:
    qkv = mg.Tensor(1e3 * np.random.default_rng(0).standard_normal((1, 5, 6)), requires_grad=True)
    y = mg.causal_attention(qkv, num_heads=1)
    mg.backward(y.sum())
    assert np.isfinite(y.data).all()
    assert np.isfinite(qkv.grad).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: mg.astype(np.ones(2), dtype=np.int64),
            TypeError,
            "astype keeps a tensor differentiable: the dtype must be floating point, got int64",
        ),
        (lambda: mg.mean(np.ones((0, 3))), ValueError, r"mean needs at least one element, got shape \(0, 3\)"),
        (lambda: mg.mean(np.ones((0, 3)), axis=0), ValueError, r"got shape \(0, 3\) over axis 0"),
        (
            lambda: mg.linear(np.ones((2, 3)), np.ones((4, 5)), np.ones(5)),
            ValueError,
            r"linear: .* do not fit, got \(2, 3\), \(4, 5\) and \(5,\)",
        ),
        (
            lambda: mg.linear(np.ones((2, 3)), np.ones((3, 5)), np.ones(1)),
            ValueError,
            r"linear: .* do not fit, got \(2, 3\), \(3, 5\) and \(1,\)",
        ),
        (
            lambda: mg.linear(np.ones((2, 3)), np.ones((3, 5)), np.ones(5), np.ones(5)),
            ValueError,
            r"linear: what is added must have the shape of the result, \(2, 5\), got \(5,\)",
        ),
        (
            lambda: mg.embedding(np.ones((3, 2)), np.array([0.0])),
            TypeError,
            "embedding: ids must be integers, got float64",
        ),
        (
            lambda: mg.embedding(np.ones((3, 2)), np.array([0, 3])),
            IndexError,
            r"embedding: ids must be in \[0, 3\), got 0 to 3",
        ),
        (
            lambda: mg.embedding(np.ones((3, 2)), np.array([-1, 2])),
            IndexError,
            r"embedding: ids must be in \[0, 3\), got -1 to 2",
        ),
        (
            lambda: mg.causal_attention(np.ones((1, 2, 12)), num_heads=3),
            ValueError,
            "attention: the width must be divisible by num_heads, got 4 and 3",
        ),
        (
            lambda: mg.cross_entropy(np.ones((2, 3)), np.array([0])),
            ValueError,
            r"cross_entropy: targets must have shape \(2,\), got \(1,\)",
        ),
        (
            lambda: mg.cross_entropy(np.ones((2, 3)), np.array([0.0, 1.0])),
            TypeError,
            "cross_entropy: targets must be integers, got float64",
        ),
        (
            lambda: mg.cross_entropy(np.ones((0, 3)), np.array([], np.int64)),
            ValueError,
            r"cross_entropy: needs at least one prediction, got logits of shape \(0, 3\)",
        ),
        (
            lambda: mg.cross_entropy(np.ones((2, 3)), np.array([0, 3])),
            IndexError,
            r"cross_entropy: targets must be in \[0, 3\), got 0 to 3",
        ),
        (
            lambda: mg.cross_entropy(np.ones((2, 3)), np.array([-1, 0])),
            IndexError,
            r"cross_entropy: targets must be in \[0, 3\), got -1 to 0",
        ),
        (
            lambda: mg.mse(np.ones((2, 3)), np.ones(3)),
            ValueError,
            r"mse: x and target must have the same non-empty shape, got \(2, 3\) and \(3,\)",
        ),
        (lambda: mg.mse(np.ones(0), np.ones(0)), ValueError, r"non-empty shape, got \(0,\) and \(0,\)"),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[], mg.Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_scatter_add_rows_adds_repeated_rows() -> None:
    target = np.ones((4, 2))
    scatter_add_rows(target, np.array([3, 0, 3]), np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    np.testing.assert_array_equal(target, [[4, 5], [1, 1], [1, 1], [7, 9]])


def test_a_gpu_array_without_cupy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ModuleNotFoundError, match="GPU arrays need CuPy: pip install cupy-cuda12x"):
        to_device(np.ones(2))
