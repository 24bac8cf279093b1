"""What users hand in: NumPy's integers as numbers, dtypes that are taken, turned round or refused, at every door."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import minigrad as mg
import minigrad.models
from minigrad import lr_schedule, nn, optim

X = np.random.default_rng(0).standard_normal((2, 3, 4, 4))
IMAGES = np.random.default_rng(1).standard_normal((1, 1, 4, 4))
KERNEL, BIAS = np.ones((2, 1, 2, 2)), np.zeros(2)
INTEGERS = [np.int64, np.int8, np.uint16, np.array]


# -- one or several -----------------------------------------------------------------------


@pytest.mark.parametrize("integer", INTEGERS)
@pytest.mark.parametrize(
    "call",
    [
        lambda i: mg.sum(X, axis=i(1)),
        lambda i: mg.sum(X, axis=(i(1), i(2))),
        lambda i: mg.mean(X, axis=i(1)),
        lambda i: mg.max(X, axis=i(1)),
        lambda i: mg.logsumexp(X, axis=i(1)),
        lambda i: mg.var(X, axis=i(1)),
        lambda i: mg.prod(X, axis=i(1)),
        lambda i: mg.norm(X, axis=i(1)),
        lambda i: mg.softmax(X, axis=i(1)),
        lambda i: mg.cumsum(X, axis=i(1)),
        lambda i: mg.concatenate(X, X, axis=i(1)),
        lambda i: mg.stack(X, X, axis=i(1)),
        lambda i: mg.squeeze(X[:, :1], axis=i(1)),
        lambda i: mg.expand_dims(X, axis=i(1)),
        lambda i: mg.flip(X, axis=i(1)),
        lambda i: mg.moveaxis(X, source=i(0), destination=i(2)),
        lambda i: mg.swapaxes(X, axis1=i(0), axis2=i(2)),
        lambda i: mg.transpose(X, axes=(i(1), i(0), i(3), i(2))),
        lambda i: mg.Tensor(X).transpose(i(1), i(0), i(3), i(2)),
        lambda i: mg.reshape(X, shape=i(96)),
        lambda i: mg.Tensor(X).reshape(i(96)),
        lambda i: mg.Tensor(X).reshape(i(6), i(16)),
        lambda i: mg.broadcast_to(X[:1], shape=(i(2), 3, 4, 4)),
        lambda i: mg.pad(X, widths=i(2)),
        lambda i: mg.Tensor(X).split(i(2), axis=i(2))[1],
        lambda i: mg.Tensor(X).split([i(1), i(3)], axis=i(2))[1],
        lambda i: mg.getitem(X, index=i(1)),
        lambda i: mg.conv2d(IMAGES, KERNEL, BIAS, stride=i(2), padding=i(1)),
        lambda i: mg.conv2d(IMAGES, KERNEL, BIAS, stride=(i(2), i(1))),
        lambda i: mg.max_pool2d(IMAGES, size=i(2), stride=i(2)),
        lambda i: mg.avg_pool2d(IMAGES, size=i(2)),
        lambda i: nn.Conv2d(nn.ParamGetter(dtype=np.float64), 1, 2, i(2), padding=i(1))(IMAGES),
    ],
)
def test_an_integer_of_numpy_is_a_number(call: Callable[[Any], mg.Tensor], integer: Any) -> None:
    # "Is it one or several" was asked by isinstance(x, int), which an np.int64 is not. jax#5402
    np.testing.assert_array_equal(call(integer).data, call(int).data)


@pytest.mark.parametrize("integer", INTEGERS)
def test_value_and_grad_takes_integers_of_numpy(integer: Any) -> None:
    value, grad = mg.value_and_grad(lambda a, b: mg.sum(a * b), argnums=integer(1))(np.ones(2), np.ones(2))
    assert value == 2
    np.testing.assert_array_equal(grad, [1, 1])


@pytest.mark.parametrize("wrong", [1.5, "1", None])
def test_what_is_neither_one_nor_several_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError):
        mg.Tensor(X).split(wrong)
    if wrong is not None:
        with pytest.raises(TypeError):
            mg.sum(X, axis=wrong)


# -- narrow indices -----------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [100, 128, 256, 300, 40_000, 70_000])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16, np.int32, np.uint64])
def test_an_index_of_a_narrow_type_selects_from_a_long_axis(dtype: Any, num_rows: int) -> None:
    # Positions were counted in the index's own dtype, in which the length of the axis did not fit. jax#16836
    x = mg.Tensor(np.zeros(num_rows), requires_grad=True)
    index = np.array([0, 5, 100 % num_rows, 5, num_rows - 1 if np.iinfo(dtype).max >= num_rows else 7], dtype)
    weights = np.arange(1.0, 6.0)
    mg.backward((x[index] * weights).sum())
    right = np.zeros(num_rows)
    np.add.at(right, index, weights)
    np.testing.assert_array_equal(x.grad, right)


@pytest.mark.parametrize("dtype", [np.int8, np.int16])
def test_a_negative_index_of_a_narrow_type_counts_from_the_end(dtype: Any) -> None:
    x = mg.Tensor(np.zeros((300, 2)), requires_grad=True)
    mg.backward(x[np.array([-1, 1, -1], dtype)].sum())
    np.testing.assert_array_equal(np.flatnonzero(x.grad[:, 0]), [1, 299])
    np.testing.assert_array_equal(x.grad[299], [2, 2])


# -- dtypes -------------------------------------------------------------------------------

DOORS: dict[str, Callable[[Any], Any]] = {
    "Tensor": mg.Tensor,
    "Tensor that requires grad": lambda a: mg.Tensor(a, requires_grad=True),
    "Parameter": lambda a: mg.Parameter(a, "w"),
    "Buffer": lambda a: nn.Buffer(a, "b"),
    "op": lambda a: mg.add(mg.Tensor(np.ones(2)), a),
    "op, from the left": lambda a: a + mg.Tensor(np.ones(2)) if isinstance(a, np.ndarray) else mg.add(a, np.ones(2)),
    "op on arrays alone": mg.sum,
    "data": lambda a: setattr(mg.Parameter(np.ones(2), "w"), "data", a),
    "grad": lambda a: setattr(mg.Parameter(np.ones(2), "w"), "grad", a),
    "load_state_dict": lambda a: nn.Linear(nn.ParamGetter(), 2, 1, bias=False).load_state_dict({"weight": a}),
    "init": lambda a: nn.ParamGetter()("w", (2,), lambda generator, shape: a),
    "value_and_grad": lambda a: mg.value_and_grad(mg.sum)(a),
    "astype": lambda a: mg.astype(mg.Tensor(np.ones(2)), a.dtype),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("dtype", [np.complex64, np.complex128, np.longdouble, "U3", "datetime64[s]", object])
def test_what_nobody_computes_with_or_keeps_is_refused_at_every_door(door: str, dtype: Any) -> None:
    # Formulas for real numbers were used for complex ones: norm([1, i]) = 0, a negative variance. A buffer of text was
    # kept until the first checkpoint failed. autograd#705, Zygote.jl#833, safetensors#75
    values = np.array([[1], [2]] if door == "load_state_dict" else [1, 2]).astype(dtype)
    with pytest.raises(
        TypeError, match=rf"^arrays must be of booleans, integers, or real .* got dtype {re.escape(values.dtype.name)}"
    ):
        DOORS[door](values)


@pytest.mark.parametrize(
    "call",
    [
        lambda: mg.Tensor([1, 1j]),
        lambda: mg.Tensor(np.ones(2)) * 1j,
        lambda: 1j * mg.Tensor(np.ones(2)),
        lambda: mg.Tensor(np.ones(2)) ** (1 + 1j),
        lambda: mg.where(np.array([True, False]), mg.Tensor(np.ones(2)), 1j),
        lambda: mg.maximum(mg.Tensor(np.ones(2)), np.complex64(1j)),
        lambda: mg.astype(mg.Tensor(np.ones(2)), dtype=complex),
        lambda: nn.ParamGetter(dtype=complex)("w", (2,), nn.zeros),
        lambda: mg.pad(mg.Tensor(np.ones(2)), widths=1, value=1j),
        lambda: mg.clip(mg.Tensor(np.ones(2)), low=1j),
        lambda: mg.leaky_relu(mg.Tensor(np.ones(2)), slope=1j),
        lambda: mg.backward_with_grad(mg.Tensor(np.ones(2), requires_grad=True) * 2, np.ones(2, complex)),
    ],
)
def test_a_complex_number_is_refused_wherever_it_comes_in(call: Callable[[], Any]) -> None:
    with pytest.raises((TypeError, ValueError), match="complex"):
        call()


@pytest.mark.parametrize("make", [mg.Tensor, lambda a: mg.Parameter(a, "w"), lambda a: nn.Buffer(a, "b"), mg.abs])
@pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8", "<f4"])
def test_the_other_byte_order_is_turned_round(make: Callable[[Any], mg.Tensor], dtype: str) -> None:
    # What a file in the other byte order gave was kept as it was: saved, and then not to be loaded. safetensors#75
    tensor = make(np.array([3, 4], dtype))
    assert tensor.dtype == np.dtype(dtype).newbyteorder("=")
    assert tensor.dtype.isnative
    np.testing.assert_array_equal(tensor.data, [3, 4])


@pytest.mark.parametrize("dtype", [">i2", ">i4", ">u8", "<i8", np.uint8])
def test_integers_and_booleans_are_taken(dtype: Any) -> None:
    for tensor in (nn.Buffer(np.array([0, 1], dtype), "b"), mg.Tensor(np.array([0, 1], dtype))):
        assert tensor.dtype.isnative
        np.testing.assert_array_equal(tensor.data, [0, 1])
    np.testing.assert_array_equal(mg.embedding(np.eye(2), np.array([1, 0], dtype)).data, np.eye(2)[[1, 0]])


def test_memory_in_this_machines_order_is_not_copied() -> None:
    array = np.ones(2)
    assert mg.Tensor(array).data is array


# -- values that are copied in ------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "values"),
    [(np.int64, [0.5, 1]), (np.uint8, [1, 300]), (np.uint8, [-1, 1]), (np.int8, [1, 128]), (bool, [2, 1])],
)
def test_integers_are_not_cut_when_they_are_assigned(dtype: Any, values: Any) -> None:
    buffer = nn.Buffer(np.zeros(2, dtype), "count")
    with pytest.raises(
        TypeError, match=rf"^'count'\.data is of {np.dtype(dtype)}, which cannot hold these (int|float)64$"
    ):
        buffer.data = values
    np.testing.assert_array_equal(buffer.data, [0, 0])


@pytest.mark.parametrize(
    ("dtype", "values"), [(np.uint8, [1, 255]), (bool, [0, 1]), (np.float32, [1, 2]), (np.float16, [0.1, 2])]
)
def test_what_fits_or_can_be_rounded_is_assigned(dtype: Any, values: Any) -> None:
    buffer = nn.Buffer(np.zeros(2, dtype), "b")
    buffer.data = values
    np.testing.assert_array_equal(buffer.data, np.asarray(values).astype(dtype))


def test_a_load_that_fails_on_the_last_value_changes_none() -> None:
    model = nn.Linear(nn.ParamGetter(), 2, 1)
    before = model.state_dict()
    with pytest.raises(TypeError, match="got dtype complex128"):
        model.load_state_dict({"weight": np.zeros((2, 1)), "bias": np.zeros(1, complex)})
    for name, values in model.state_dict().items():
        np.testing.assert_array_equal(values, before[name])


# -- numbers and integers in place of arrays of floats ------------------------------------

IDS = np.array([[-3, 0, 2], [1, 5, -1]])
MASK = np.array([[True, False, True], [False, True, True]])
ON_INTEGERS: dict[str, Callable[[Any], mg.Tensor]] = {
    "add_dropout": lambda x: mg.add_dropout(x, x, keep=MASK, rate=0.3),
    "avg_pool2d": lambda x: mg.avg_pool2d(x[None, None], size=2),
    "batch_norm": lambda x: mg.batch_norm(x, np.ones(3), np.zeros(3)),
    "causal_attention": lambda x: mg.causal_attention(x[None], num_heads=1),
    "conv2d": lambda x: mg.conv2d(x[None, None], np.full((1, 1, 2, 2), 0.5), np.array([0.5])),
    "dropout": lambda x: mg.dropout(x, keep=MASK, rate=0.3),
    "feed_forward": lambda x: mg.feed_forward(x, x.T, x[:, 0], x, x[0]),
    "layer_norm": lambda x: mg.layer_norm(x, x[0], x[1]),
    "leaky_relu": mg.leaky_relu,
    "gelu": mg.gelu,
    "gelu exact": lambda x: mg.gelu(x, exact=True),
    "log_softmax": mg.log_softmax,
    "logsumexp": mg.logsumexp,
    "pad": lambda x: mg.pad(x, 1, value=0.5),
    "rms_norm": lambda x: mg.rms_norm(x, x[0]),
    "attention": lambda x: mg.scaled_dot_product_attention(x, x, x),
    "attention, queries": lambda x: mg.scaled_dot_product_attention(x, 1.0 * x, 1.0 * x),
    "sigmoid": mg.sigmoid,
    "silu": mg.silu,
    "softmax": lambda x: mg.softmax(x, axis=0),
    "softplus": mg.softplus,
}


@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
@pytest.mark.parametrize("name", ON_INTEGERS)
def test_what_is_no_integer_is_not_cut_to_one(name: str, dtype: Any) -> None:
    # Results were made in the dtype of the input: pixels came out of batch_norm as zeros, and the softmax of bytes,
    # whose differences wrap around, as nan.
    x = np.abs(IDS) if dtype == np.uint8 else IDS
    y = ON_INTEGERS[name](x.astype(dtype))
    np.testing.assert_allclose(y.data, ON_INTEGERS[name](x.astype(np.float64)).data, rtol=1e-12)


def test_integers_beside_floats_take_their_dtype() -> None:
    gain = mg.Tensor(np.ones(3, np.float32), requires_grad=True)
    y = mg.batch_norm(IDS, gain, np.zeros(3, np.float32))
    assert y.dtype == np.float32
    mg.backward((y * y).sum())
    np.testing.assert_allclose(gain.grad, [4, 4, 4], rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda: mg.sum(3.0), 3),
        (lambda: mg.mean(3), 3),
        (lambda: mg.relu(-2), 0),
        (lambda: mg.sigmoid(0), 0.5),
        (lambda: mg.logsumexp(2.0), 2),
        (lambda: mg.mse(3.0, 1.0), 4),
        (lambda: mg.reshape(3.0, (1, 1)), [[3]]),
        (lambda: mg.broadcast_to(3.0, 2), [3, 3]),
        (lambda: mg.einsum("ij,jk->ik", np.ones((1, 2)), np.ones((2, 1))), [[2]]),
    ],
)
def test_a_number_alone_is_an_array_without_axes(call: Callable[[], mg.Tensor], value: Any) -> None:
    np.testing.assert_array_equal(call().data, value)


M = np.ones((2, 3))


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: mg.Tensor(M) @ 3, TypeError, "matmul needs an array as argument 1, got the number 3"),
        (lambda: mg.cross_entropy(M, 1), TypeError, "cross_entropy needs an array as argument 1, got the number 1"),
        (lambda: mg.embedding(M, 1), TypeError, "embedding needs an array as argument 1, got the number 1"),
        (lambda: mg.embedding(np.ones(3), np.array([0])), ValueError, "embedding: the table must be (V, n), got (3,)"),
        (lambda: mg.sum(M, axis=1.5), TypeError, "sum: an axis must be an integer, or several, got 1.5"),
        (lambda: mg.softmax(M, axis=2), ValueError, "softmax: axes must be distinct and exist, got 2"),
        (
            lambda: mg.log_softmax(M[:, :0]),
            ValueError,
            "log_softmax needs one axis with something along it, got axis -1",
        ),
        (lambda: mg.layer_norm(M, M, M), ValueError, "layer_norm: x (..., n), gain (n,) and bias (n,) do not fit"),
        (lambda: mg.layer_norm(M, M[0], M[:, 0]), ValueError, "got (2, 3), (3,) and (2,)"),
        (lambda: mg.layer_norm(1.0, 1.0, 1.0), ValueError, "got (), () and ()"),
        (lambda: mg.rms_norm(M, M), ValueError, "rms_norm: x (..., n) and gain (n,) do not fit, got (2, 3) and (2, 3)"),
        (lambda: mg.batch_norm(M, M[0], M), ValueError, "do not fit, got (2, 3), (3,) and (2, 3)"),
        (lambda: mg.causal_attention(M, num_heads=1), ValueError, "attention: qkv must be (B, T, 3 C), num_heads at"),
        (lambda: mg.causal_attention(M[None], num_heads=0), ValueError, "got (1, 2, 3) and 0"),
        (lambda: mg.scaled_dot_product_attention(M[0], M[0], M[0]), ValueError, "do not fit, got (3,), (3,), (3,)"),
        (
            lambda: mg.dropout(M, keep=MASK, rate=1),
            ValueError,
            "dropout: keep must have x's shape and rate be in [0, 1)",
        ),
        (lambda: mg.dropout(M, keep=MASK[0], rate=0.5), ValueError, "got (3,) for (2, 3) and 0.5"),
        # By bits, as it is kept: 2 would have taken a bit off what stays.
        (lambda: mg.dropout(M, keep=2 * MASK, rate=0.5), TypeError, "keep must be boolean"),
        (lambda: mg.add_dropout(M, M, keep=MASK.astype(np.uint8), rate=0.5), TypeError, "keep must be boolean"),
        (lambda: mg.broadcast_to(M, "ab"), TypeError, "broadcast_to: a shape is an integer, or several, got 'ab'"),
        (lambda: mg.pad(M, [1, 2]), TypeError, "pad: widths must be a pair for each axis, or one number, got [1, 2]"),
        (lambda: mg.einsum(M, M), TypeError, 'einsum is called as einsum("ij,jk->ik", a, b), got None and 2 arrays'),
        (lambda: mg.einsum("ij->i"), TypeError, "got 'ij->i' and 0 arrays"),
        (
            lambda: mg.value_and_grad(mg.sum, argnums=1)(M),
            ValueError,
            "argnums must be places of arguments, got 1 for 1",
        ),
        (lambda: mg.check_vjp(mg.tanh, np.ones(2, np.float32)), TypeError, "at least one, got float32"),
        (lambda: mg.backward(3.0), TypeError, "a backward starts from a Tensor, or from several, got float"),
        (lambda: mg.backward_with_grad([mg.Tensor(1.0), 3], [1, 1]), TypeError, "several, got ['Tensor', 'int']"),
        (lambda: mg.Tape.of(3), TypeError, "a tape is of a Tensor, got int"),
        (
            lambda: mg.backward_with_hooks(mg.Tensor(1.0), print),
            TypeError,
            "hooks must be Hooks, got <built-in function pr",
        ),
        (lambda: mg.Hooks(on_grad_ready=0), TypeError, "on_grad_ready must be a function, got 0"),
    ],
)
def test_what_no_op_can_take_is_named(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    # NumPy's words, or "object has no attribute", came from the middle of an op; norms took what broadcast.
    with pytest.raises(kind, match=re.escape(words)):
        call()


# -- what a layer, a rule and an optimizer are made with ----------------------------------

PARAM = nn.ParamGetter()


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: nn.Linear(PARAM, 0, 3), ValueError, "Linear: num_in must be at least 1, got 0"),
        (lambda: nn.Linear(PARAM, 3, -1), ValueError, "Linear: num_out must be at least 1, got -1"),
        (lambda: nn.Linear(PARAM, 1.5, 3), TypeError, "Linear: num_in must be an integer, got 1.5"),
        (lambda: nn.Conv2d(PARAM, 1, 2, 0), ValueError, "Conv2d: height must be at least 1, got 0"),
        (lambda: nn.Embedding(PARAM, 0, 2), ValueError, "Embedding: num_rows must be at least 1, got 0"),
        (lambda: nn.LayerNorm(PARAM, 0), ValueError, "LayerNorm: width must be at least 1, got 0"),
        (lambda: nn.RMSNorm(PARAM, "2"), TypeError, "RMSNorm: width must be an integer, got '2'"),
        (lambda: nn.BatchNorm(PARAM, -2), ValueError, "BatchNorm: width must be at least 1, got -2"),
        (lambda: nn.GroupNorm(PARAM, 1, 0), ValueError, "GroupNorm: width must be at least 1, got 0"),
        (lambda: mg.models.MLP([4, 0, 2]), ValueError, "Linear: num_out must be at least 1, got 0"),
        (lambda: optim.SGD(-0.1), ValueError, "SGD: lr must be at least 0 and finite, got -0.1"),
        (lambda: optim.SGD(float("nan")), ValueError, "SGD: lr must be at least 0 and finite, got nan"),
        (lambda: optim.SGD(0.1, momentum=1.0), ValueError, "SGD: momentum must be from 0 to below 1, got 1.0"),
        (lambda: optim.AdamW(0.1, betas=(0.9, 1)), ValueError, "AdamW: beta2 must be from 0 to below 1, got 1"),
        (lambda: optim.AdamW(0.1, eps=-1e-8), ValueError, "AdamW: eps must be at least 0 and finite, got -1e-08"),
        (lambda: optim.Adam(0.1, weight_decay=-1), ValueError, "Adam: weight_decay must be at least 0 and finite"),
        (lambda: optim.Muon(float("inf")), ValueError, "Muon: lr must be at least 0 and finite, got inf"),
        (lambda: lr_schedule.scaled(0.1, float("nan")), ValueError, "must be at least 0 and finite, got nan"),
        (lambda: lr_schedule.warmup_cosine(float("inf"), num_steps=2), ValueError, "which is finite, got 0.0 and inf"),
        (
            lambda: optim.Optimizer(nn.Linear(nn.ParamGetter(), 1, 1), optim.SGD(0.1)),
            TypeError,
            "Optimizer takes parameters, got a Linear: give its .parameters()",
        ),
        (
            lambda: optim.Optimizer([mg.Tensor(np.ones(2))], optim.SGD(0.1)),
            TypeError,
            "Optimizer takes parameters, got Tensor: name it, Parameter(array, name)",
        ),
        (
            lambda: optim.Optimizer([], optim.SGD),
            TypeError,
            "Optimizer takes a rule, such as SGD(lr=0.1), got the class SGD",
        ),
    ],
)
def test_what_cannot_train_is_refused_where_it_is_made(
    make: Callable[[], Any], kind: type[Exception], words: str
) -> None:
    # Rates that are negative or nan trained, a width of 0 was a division by zero, a model in place of its parameters
    # an attribute that somebody lacks.
    with pytest.raises(kind, match=re.escape(words)):
        make()


@pytest.mark.parametrize("rate", [float("nan"), -1.0, "fast", None])
def test_a_learning_rate_that_is_none_is_refused_in_its_step(rate: Any) -> None:
    w = mg.Parameter(np.ones(2), "w")
    optimizer = optim.Optimizer([w], optim.SGD(lambda step: rate))
    mg.backward(mg.sum(w * w))
    with pytest.raises(
        ValueError, match=re.escape(f"rate of step 0 must be a number of at least 0 and finite, got {rate!r}")
    ):
        optimizer.step()
    np.testing.assert_array_equal(w.data, [1, 1])
