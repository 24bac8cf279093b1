"""The op table: one row for each way to call an op, and what must hold for every row.

All samples are read-only, so an op that writes into its inputs or its cotangent fails wherever it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import minigrad as mg
from minigrad import ops
from minigrad.backend import Array, scatter_add_rows, to_device

Sampler = Callable[[np.random.Generator], Array]


def normal(*shape: int) -> Sampler:
    return lambda generator: np.asarray(generator.standard_normal(shape))


def positive(*shape: int) -> Sampler:
    return lambda generator: np.asarray(generator.uniform(0.5, 2.0, shape))


def off_zero(*shape: int) -> Sampler:
    """Both signs, and no value near 0: there are the kink of relu and the pole of a division."""
    return lambda generator: generator.uniform(0.5, 2.0, shape) * generator.choice([-1.0, 1.0], shape)


def ids(high: int, *shape: int) -> Sampler:
    return lambda generator: generator.integers(high, size=shape)


def plain_gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def plain_layer_norm(x: Array, gain: Array, bias: Array, eps: float = 1e-5) -> Array:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * gain + bias


def plain_attention(qkv: Array, num_heads: int) -> Array:
    batch, time, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    head = width // num_heads
    y = np.zeros((batch, time, width), qkv.dtype)
    for b in range(batch):
        for h in range(num_heads):
            q, k, v = (qkv[b, :, i * width + h * head : i * width + (h + 1) * head] for i in range(3))
            for t in range(time):
                scores = np.exp(k[: t + 1] @ q[t] / np.sqrt(head))
                y[b, t, h * head : (h + 1) * head] = scores / scores.sum() @ v[: t + 1]
    return y


def plain_cross_entropy(logits: Array, targets: Array) -> Array:
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return -np.log(np.take_along_axis(p, targets[..., None], -1)).mean()


KEEP = np.array([[True, False, True], [False, True, True]])


@dataclass(frozen=True)
class Row:
    """One way to call an op.

    Attributes:
        name: of the op, in `minigrad.ops`.
        plain: the same function in plain NumPy.
        args: samplers, or Python numbers.
        kwargs: passed to both.
    """

    name: str
    plain: Callable[..., Any]
    args: tuple[Sampler | float, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def op(self) -> Callable[..., mg.Tensor]:
        return getattr(ops, self.name)

    def sample(self, dtype: Any = np.float64) -> list[Any]:
        """Return the arguments: read-only arrays, floats in this dtype, and Python numbers."""
        generator = np.random.default_rng(7)
        arrays = [arg(generator) if callable(arg) else arg for arg in self.args]
        return [read_only(a.astype(dtype if a.dtype.kind == "f" else a.dtype)) if is_array(a) else a for a in arrays]


def is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def is_float(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind == "f"


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def row(name: str, plain: Callable[..., Any], *args: Sampler | float, **kwargs: Any) -> Row:
    return Row(name, plain, args, kwargs)


ROWS = [
    row("add", np.add, normal(2, 3), normal(2, 3)),
    row("add", np.add, normal(2, 3), normal(3)),
    row("add", np.add, normal(2, 1), normal(4, 1, 3)),
    row("add", np.add, normal(), normal(2, 3)),
    row("add", np.add, normal(2, 3), 2),
    row("add", np.add, normal(0, 3), normal(3)),
    row("sub", np.subtract, normal(2, 3), normal(2, 3)),
    row("sub", np.subtract, normal(2, 1), normal(1, 3)),
    row("sub", np.subtract, 2.5, normal(2, 3)),
    row("sub", np.subtract, normal(0, 3), normal(3)),
    row("mul", np.multiply, normal(2, 3), normal(2, 3)),
    row("mul", np.multiply, normal(2, 1), normal(1, 3)),
    row("mul", np.multiply, normal(), normal(2, 3)),
    row("mul", np.multiply, -2, normal(2, 3)),
    row("mul", np.multiply, normal(0, 3), normal(3)),
    row("div", np.divide, normal(2, 3), off_zero(2, 3)),
    row("div", np.divide, normal(2, 1), off_zero(1, 3)),
    row("div", np.divide, normal(2, 3), off_zero()),
    row("div", np.divide, 2, off_zero(2, 3)),
    row("div", np.divide, normal(0, 3), off_zero(3)),
    row("neg", np.negative, normal(2, 3)),
    row("neg", np.negative, normal(0)),
    row("exp", np.exp, normal(2, 3)),
    row("exp", np.exp, normal(0)),
    row("log", np.log, positive(2, 3)),
    row("log", np.log, positive(0)),
    row("tanh", np.tanh, normal(2, 3)),
    row("tanh", np.tanh, normal(0)),
    row("relu", lambda x: np.maximum(x, 0), off_zero(2, 3)),
    row("relu", lambda x: np.maximum(x, 0), off_zero(0)),
    row("gelu", plain_gelu, normal(2, 3)),
    row("gelu", plain_gelu, normal()),
    row("gelu", plain_gelu, normal(0, 3)),
    row("gelu", plain_gelu, normal(300, 250)),  # more than one block
    row("astype", lambda x, dtype: x.astype(dtype), normal(2, 3), dtype=np.float64),
    row("matmul", np.matmul, normal(2, 3), normal(3, 4)),
    row("matmul", np.matmul, normal(3), normal(3)),
    row("matmul", np.matmul, normal(2, 3), normal(3)),
    row("matmul", np.matmul, normal(3), normal(3, 4)),
    row("matmul", np.matmul, normal(2, 4, 3), normal(3, 2)),
    row("matmul", np.matmul, normal(4, 3), normal(2, 3, 5)),
    row("matmul", np.matmul, normal(2, 1, 4, 3), normal(5, 3, 2)),
    row("matmul", np.matmul, normal(2, 4, 3), normal(2, 3, 5)),
    row("matmul", np.matmul, normal(2, 4, 3), normal(3)),
    row("matmul", np.matmul, normal(3), normal(2, 3, 4)),
    row("matmul", np.matmul, normal(0, 3), normal(3, 4)),
    row("matmul", np.matmul, normal(2, 0), normal(0, 4)),
    row("linear", lambda x, w, b: x @ w + b, normal(4, 3), normal(3, 2), normal(2)),
    row("linear", lambda x, w, b: x @ w + b, normal(2, 4, 3), normal(3, 2), normal(2)),
    row("linear", lambda x, w, b: x @ w + b, normal(3), normal(3, 2), normal(2)),
    row("linear", lambda x, w, b: x @ w + b, normal(0, 3), normal(3, 2), normal(2)),
    row("sum", np.sum, normal(2, 3, 4)),
    row("sum", np.sum, normal(2, 3, 4), axis=1),
    row("sum", np.sum, normal(2, 3, 4), axis=(-1, 0)),
    row("sum", np.sum, normal(2, 3, 4), axis=-2, keepdims=True),
    row("sum", np.sum, normal(0, 3), axis=0),
    row("mean", np.mean, normal(2, 3, 4)),
    row("mean", np.mean, normal(2, 3, 4), axis=(0, 2)),
    row("mean", np.mean, normal(2, 3, 4), axis=-1, keepdims=True),
    row("mean", np.mean, normal(0, 3), axis=1),
    row("reshape", lambda x, shape: x.reshape(shape), normal(2, 6), shape=(3, -1)),
    row("reshape", lambda x, shape: x.reshape(shape), normal(0, 3), shape=(3, 0)),
    row("transpose", np.transpose, normal(2, 3, 4)),
    row("transpose", np.transpose, normal(2, 3, 4), axes=(1, 2, 0)),
    row("transpose", np.transpose, normal(2, 3, 4), axes=(-1, 0, 1)),
    row("transpose", np.transpose, normal(0, 3)),
    row("concatenate", lambda *x, axis: np.concatenate(x, axis), normal(2, 3), normal(1, 3), normal(0, 3), axis=0),
    row("concatenate", lambda *x, axis: np.concatenate(x, axis), normal(2, 1, 3), normal(2, 1, 2), axis=-1),
    row("getitem", lambda x, index: x[index], normal(4, 3), index=slice(1, 3)),
    row("getitem", lambda x, index: x[index], normal(4, 3), index=(..., None, -1)),
    row("getitem", lambda x, index: x[index], normal(4, 3), index=np.array([0, -4, 2, 0])),
    row("getitem", lambda x, index: x[index], normal(2, 3), index=KEEP),
    row("getitem", lambda x, index: x[index], normal(4, 3), index=slice(2, 2)),
    row("layer_norm", plain_layer_norm, normal(4, 5), normal(5), normal(5)),
    row("layer_norm", plain_layer_norm, normal(2, 3, 5), normal(5), normal(5), eps=0.1),
    row("layer_norm", plain_layer_norm, normal(0, 5), normal(5), normal(5)),
    row("embedding", lambda table, i: table[i], normal(5, 3), ids(5, 2, 4)),
    row("embedding", lambda table, i: table[i], normal(300, 3), ids(300, 2, 400)),  # many rows: scattered
    row("embedding", lambda table, i: table[i], normal(5, 3), ids(5, 0)),
    row("embedding", lambda table, i: table[i], normal(300, 3), ids(300, 0)),
    row("dropout", lambda x, keep, rate: x * keep / (1 - rate), normal(2, 3), keep=KEEP, rate=0.2),
    row("dropout", lambda x, keep, rate: x, normal(0, 3), keep=np.ones((0, 3), bool), rate=0.2),
    row("causal_attention", plain_attention, normal(2, 5, 12), num_heads=2),
    row("causal_attention", plain_attention, normal(1, 130, 6), num_heads=1),  # three blocks of queries
    row("causal_attention", plain_attention, normal(0, 5, 12), num_heads=2),
    row("cross_entropy", plain_cross_entropy, normal(4, 5), ids(5, 4)),
    row("cross_entropy", plain_cross_entropy, normal(2, 3, 5), ids(5, 2, 3)),
    row("mse", lambda x, t: np.mean((x - t) ** 2), normal(2, 3), normal(2, 3)),
]


def row_id(row: Row) -> str:
    shapes = ["x".join(map(str, x.shape)) if is_array(x) else str(x) for x in row.sample()]
    return f"{row.name}({','.join(shapes)})"


each_row = pytest.mark.parametrize("row", ROWS, ids=row_id)


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
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_dtype_is_kept(row: Row, dtype: Any) -> None:
    kwargs = {**row.kwargs, "dtype": dtype} if row.name == "astype" else row.kwargs
    y, leaves = record(Row(row.name, row.plain, row.args, kwargs), row.sample(dtype))
    assert y.dtype == dtype
    assert y.node is not None
    g = read_only(np.ones(y.shape, dtype))
    contributions = [vjp(g) for vjp in y.node.vjps]
    # What a vjp returns, not leaf.grad: a leaf copies into its own dtype and would hide a wide one.
    assert [(c.shape, c.dtype) for c in contributions] == [(leaf.shape, dtype) for leaf in leaves]


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
    with pytest.raises(ModuleNotFoundError, match="a GPU array needs CuPy: pip install cupy-cuda12x"):
        to_device(np.ones(2))
