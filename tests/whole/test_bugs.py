"""Bugs, one test each: the mechanism in a comment, and where it was reported as project#number.

Those without a number were found here, by review or by a test.
"""

from __future__ import annotations

import io
import math
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from toy_pipeline import X, Y, apply, check_against_one_process, connect, dense, grads_of, mean, scale

import minigrad as mg
from distributed import DistributedDataParallel, GradientBucketManager, LocalWorld
from distributed.run.command_line import warn
from minigrad import kernels
from minigrad.backend import Array
from pipeline import SCHEDULES, PipelineStage
from pipeline.runtime.microbatch import split


def leaf(values: Any, dtype: Any = np.float64) -> mg.Tensor:
    return mg.Tensor(np.array(values, dtype), requires_grad=True)


def grads(loss: mg.Tensor, *leaves: mg.Tensor) -> list[Array | None]:
    mg.backward(loss)
    return [t.grad for t in leaves]


# -- broadcasting -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "of_a", "of_b"),
    [
        (mg.mul, lambda a, b: b, lambda a, b: a),
        (mg.add, lambda a, b: 1 + 0 * b, lambda a, b: 1 + 0 * a),
        (mg.sub, lambda a, b: 1 + 0 * b, lambda a, b: 0 * a - 1),
        (mg.div, lambda a, b: 1 / b, lambda a, b: -a / b**2),
    ],
)
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([3.0], [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
        (2.0, [[1.0, 2.0]]),
        ([[1.0], [2.0], [3.0], [4.0]], [[10.0, 20.0, 30.0]]),
    ],
)
def test_a_broadcast_operand_gets_a_gradient_of_its_own_shape(
    op: Callable[..., mg.Tensor], of_a: Any, of_b: Any, a: Any, b: Any
) -> None:
    # The forward broadcast, the backward did not sum: a gradient in the broadcast shape. pytorch#1787, pytorch#913
    x, y = leaf(a), leaf(b)
    dx, dy = grads(op(x, y).sum(), x, y)
    both = np.ones(np.broadcast_shapes(x.shape, y.shape))

    def summed_to(array: Array, shape: tuple[int, ...]) -> Array:
        """Add up into `shape` element by element: no axis arithmetic that could have the same mistake."""
        total = np.zeros(shape)
        for where in np.ndindex(array.shape):
            tail = where[len(where) - len(shape) :]
            total[tuple(0 if n == 1 else i for i, n in zip(tail, shape, strict=True))] += array[where]
        return total

    np.testing.assert_allclose(dx, summed_to(of_a(x.data, y.data) * both, x.shape), rtol=1e-12)
    np.testing.assert_allclose(dy, summed_to(of_b(x.data, y.data) * both, y.shape), rtol=1e-12)


def test_a_broadcast_product_in_numbers() -> None:
    # pytorch#1787: the numbers of the report's kind, worked out by hand
    a, b = leaf([3.0]), leaf([[1, 2, 3], [4, 5, 6]])
    da, db = grads((a * b).sum(), a, b)
    np.testing.assert_array_equal(da, [21])
    np.testing.assert_array_equal(db, np.full((2, 3), 3.0))
    s = leaf(2.0)
    (ds,) = grads((s * b.detach()).sum(), s)
    assert ds is not None
    assert ds.shape == ()
    assert ds == 21


# -- indices ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_an_index_used_twice_adds(dtype: Any) -> None:
    # dx[index] += g keeps only the last of the contributions to one place. autograd#39, pytorch#1528
    x = leaf([1, 2, 3], dtype)
    (dx,) = grads((np.array([1, 2, 3, 4], dtype) * x[[0, 0, 2, 0]]).sum(), x)
    np.testing.assert_array_equal(dx, [7, 0, 3])  # not [4, 0, 3]
    assert dx is not None
    assert dx.dtype == dtype
    y = leaf([1, 2, 3], dtype)
    np.testing.assert_array_equal(grads(y[[0, -3]].sum(), y)[0], [2, 0, 0])  # two names of one place


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("num_rows", [3, 300])  # the two ways in which embedding adds rows up
def test_a_row_looked_up_twice_adds(dtype: Any, num_rows: int) -> None:
    # The same in a table of embeddings. autograd#39
    table = leaf(np.zeros((num_rows, 2)), dtype)
    (dtable,) = grads(mg.embedding(table, np.array([[1, 1], [2, 1]])).sum(), table)
    assert dtable is not None
    np.testing.assert_array_equal(dtable[:3], [[0, 0], [3, 3], [1, 1]])
    assert not dtable[3:].any()


def test_token_ids_may_be_unsigned() -> None:
    # Sorted ids were compared with "the first one less 1", which wraps for an unsigned 0 and warns.
    table = leaf(np.zeros((300, 2)))
    (dtable,) = grads(mg.embedding(table, np.array([0, 299, 0], np.uint16)).sum(), table)
    assert dtable is not None
    np.testing.assert_array_equal(dtable[[0, 299]], [[2, 2], [1, 1]])


# -- dtypes -------------------------------------------------------------------------------

SCALARS = [np.float64(2), np.float32(2), np.int64(2), np.array(2)]
T = [[1, 2, 4], [8, 16, 32]]


@pytest.mark.parametrize("s", SCALARS, ids=["float64", "float32", "int64", "0-d array"])
def test_a_numpy_number_on_the_left_is_no_detour(s: Any) -> None:
    # NumPy took the operation first and made an object array of tensors, or lost the tape. pytorch#9468, sparse#66
    for left, right in [
        (lambda t: s * t, lambda t: t * s),
        (lambda t: s + t, lambda t: t + s),
        (lambda t: s - t, lambda t: -(t - s)),
    ]:
        t = leaf(T, np.float32)
        y = left(t)
        assert type(y) is mg.Tensor
        assert y.shape == (2, 3)
        assert y.node is not None
        np.testing.assert_array_equal(y.data, right(t).data)
    t = leaf(T, np.float32)
    (dt,) = grads((s / t).sum(), t)
    np.testing.assert_array_equal(dt, [[-2, -0.5, -0.125], [-0.03125, -0.0078125, -0.001953125]])
    assert dt is not None
    assert dt.dtype == np.float32


def test_a_numpy_array_on_the_left_is_no_detour() -> None:
    # The same with an array. pytorch#9468, numpy#17650
    t = leaf(T, np.float32)
    y = np.array([1, 2, 3]) * t
    assert type(y) is mg.Tensor
    (dt,) = grads(y.sum(), t)
    np.testing.assert_array_equal(dt, [[1, 2, 3], [1, 2, 3]])
    assert dt is not None
    assert dt.dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * x).sum(),
        lambda x: x.mean(),
        lambda x: x.mean(axis=0),
        lambda x: x.max(),
        lambda x: x.min(axis=0),
        lambda x: x.var(),
        lambda x: x.std(ddof=1),
        lambda x: x.prod(),
        lambda x: x.cumsum(axis=0),
        lambda x: mg.norm(x),
        lambda x: mg.logsumexp(x),
        lambda x: x**2,
        lambda x: np.int64(2) ** x,
        lambda x: x * np.arange(4),
        lambda x: np.arange(1, 5) @ x,
        lambda x: mg.where(np.arange(4) > 1, x, np.arange(4)),
        lambda x: x / len(x),
        lambda x: x / np.int64(4),
        lambda x: np.float64(0.5) * x,
        lambda x: x * 0.5 + 1,
        lambda x: sum([x, x, x]),  # Python's, which starts at 0
        lambda x: mg.cross_entropy(x.reshape(1, 4), np.array([2])),
        lambda x: mg.mse(x, 2 * x.data),
        lambda x: mg.mse(x, np.array([0, 1, 2, 3])),  # integers beside float32 make float64
        lambda x: mg.softmax(x),
        lambda x: mg.rms_norm(x, np.ones(4, x.dtype)),
        lambda x: mg.gelu(x),
    ],
)
def test_no_helper_widens_float32(function: Callable[[mg.Tensor], mg.Tensor], dtype: Any) -> None:
    # A seed of 1.0, an integer count or a NumPy scalar turned everything after it into float64.
    # autograd#163, autograd#199, dlsyscourse/hw2#11
    x = leaf([1, 2, 2, 4], dtype)
    y = function(x)
    assert y.node is not None
    is_loss = y.node.name in ("cross_entropy", "mse")  # in float16 it would have three digits
    assert y.dtype == (np.float32 if is_loss and dtype == np.float16 else dtype)
    mg.backward_with_grad(y, np.ones(y.shape, y.dtype))
    assert x.grad is not None
    assert x.grad.dtype == dtype


# -- products -----------------------------------------------------------------------------


def test_a_vector_has_no_transpose() -> None:
    # b.T is b for a 1-D b: g @ b.T was an error or, in the square case, a silent scalar. cs249r_book#1781
    a, b = leaf([[1, 2, 3], [4, 5, 6]]), leaf([1, 0, -1])
    mg.backward_with_grad(a @ b, np.array([1.0, 10.0]))
    np.testing.assert_array_equal(a.grad, [[1, 0, -1], [10, 0, -10]])
    np.testing.assert_array_equal(b.grad, [41, 52, 63])
    a, b = leaf([[1, 2], [3, 4]]), leaf([5, 7])
    mg.backward_with_grad(a @ b, np.array([1.0, 10.0]))
    np.testing.assert_array_equal(a.grad, [[5, 7], [50, 70]])
    v, m = leaf([1, 2]), leaf([[1, 2, 3], [4, 5, 6]])
    mg.backward_with_grad(v @ m, np.ones(3))
    np.testing.assert_array_equal(v.grad, [6, 15])
    np.testing.assert_array_equal(m.grad, [[1, 1, 1], [2, 2, 2]])
    u, w = leaf([1, 2]), leaf([3, 4])
    dot = u @ w
    assert dot.shape == ()
    du, dw = grads(dot, u, w)
    np.testing.assert_array_equal(du, w.data)
    np.testing.assert_array_equal(dw, u.data)


def test_a_matrix_beside_a_batch_gets_a_matrix() -> None:
    # The gradient of the operand without a batch kept the batch axis. tfjs#8721
    a, b = leaf(np.arange(1, 9).reshape(2, 2, 2)), leaf([[9, 10], [11, 12]])
    da, db = grads((a @ b).sum(), a, b)
    np.testing.assert_array_equal(db, [[16, 16], [20, 20]])
    np.testing.assert_array_equal(da, np.broadcast_to([19.0, 23.0], (2, 2, 2)))


def test_a_trace_has_a_gradient() -> None:
    # The gradient of "ii->" wants "->ii", which NumPy forbids: forward worked, backward raised. autograd#510, #115
    w, x = leaf(np.arange(16).reshape(4, 4)), leaf(np.arange(8).reshape(4, 2))
    dw, dx = grads(mg.einsum(x, w, subscripts="nd,nn->d").sum(), w, x)
    np.testing.assert_array_equal(dw, np.diag([1, 5, 9, 13]))
    np.testing.assert_array_equal(dx, [[0, 0], [5, 5], [10, 10], [15, 15]])
    (dw,) = grads(5 * mg.einsum(w := leaf(np.ones((3, 3))), subscripts="ii->"), w)
    np.testing.assert_array_equal(dw, 5 * np.eye(3))
    (dw,) = grads(5 * mg.einsum(w := leaf(np.ones((2, 3))), subscripts="ij->"), w)
    np.testing.assert_array_equal(dw, np.full((2, 3), 5))
    x = leaf(np.arange(8).reshape(2, 2, 2))
    y = mg.einsum(x, subscripts="iij->ij")
    np.testing.assert_array_equal(y.data, [[0, 1], [6, 7]])
    mg.backward_with_grad(y, np.array([[1.0, 2.0], [3.0, 4.0]]))
    np.testing.assert_array_equal(x.grad, [[[1, 2], [0, 0]], [[0, 0], [3, 4]]])


def test_a_product_over_nothing_has_empty_gradients() -> None:
    # reshape(-1, n) cannot tell how many rows an empty matrix with n = 0 has.
    a, b = leaf(np.ones((2, 3, 0))), leaf(np.ones((0, 4)))
    da, db = grads((a @ b).sum(), a, b)
    assert da is not None
    assert db is not None
    assert (da.shape, db.shape) == ((2, 3, 0), (0, 4))
    x, w, bias = leaf(np.ones((2, 3))), leaf(np.ones((3, 0))), leaf(np.ones(0))
    dx, *_ = grads(mg.linear(x, w, bias).sum(), x, w, bias)
    np.testing.assert_array_equal(dx, np.zeros((2, 3)))


# -- selecting, and singular points -------------------------------------------------------


def test_where_selects_and_never_multiplies() -> None:
    # A mask times the gradient: 0 times inf is nan, and it came from the branch that was not taken. jax#347, jax#1052
    a, b = leaf([1, 2]), leaf([3, 4])
    mg.backward_with_grad(mg.where(np.array([True, False]), a, b), np.array([np.inf, 5]))
    np.testing.assert_array_equal(a.grad, [np.inf, 0])
    np.testing.assert_array_equal(b.grad, [0, 5])
    x = leaf([4, 0, 9])
    (dx,) = grads(mg.where(x > 1, mg.sqrt(mg.where(x > 1, x, 1)), 1).sum(), x)
    np.testing.assert_allclose(dx, [1 / 4, 0, 1 / 6], rtol=1e-15)
    x = leaf([4, 0, 9])
    with np.errstate(invalid="ignore"):  # 0 / 0: as documented, the argument must be chosen, not the result
        (dx,) = grads(mg.where(x > 1, mg.sqrt(x), 1).sum(), x)
    np.testing.assert_allclose(dx, [1 / 4, np.nan, 1 / 6], rtol=1e-15)


@pytest.mark.parametrize(
    "op",
    [
        lambda x: mg.where(np.array([True, False]), x, 0),
        lambda x: mg.where(np.array([False, True]), 0, x),
        lambda x: mg.maximum(x, [0, 9]),
        lambda x: mg.minimum(x, [9, 0]),
        lambda x: mg.clip(x, low=-9, high=1),
    ],
)
def test_what_is_not_chosen_gets_zero_of_an_infinite_gradient(op: Callable[[mg.Tensor], mg.Tensor]) -> None:
    # The same in the other ops that choose. jax#347
    x = leaf([1, 2])
    mg.backward_with_grad(op(x), np.full(2, np.inf))
    np.testing.assert_array_equal(x.grad, [np.inf, 0])


@pytest.mark.parametrize("op", [mg.max, mg.min])
def test_the_gradient_of_an_extreme_is_shared_by_equals(op: Callable[[mg.Tensor], mg.Tensor]) -> None:
    x = leaf([[3, 3, 3], [np.nan, 2, 2]])
    mg.backward_with_grad(op(x, axis=1), np.array([np.inf, 6]))
    np.testing.assert_array_equal(x.grad, [[np.inf] * 3, [6, 0, 0]])
    x = leaf([1, 2, 2, 1])
    np.testing.assert_array_equal(grads(op(x), x)[0], [[0, 0.5, 0.5, 0], [0.5, 0, 0, 0.5]][op is mg.min])


@pytest.mark.parametrize("op", [mg.maximum, mg.minimum])
def test_the_gradient_of_a_tie_is_halved(op: Callable[..., mg.Tensor]) -> None:
    a, b = leaf([1, np.nan]), leaf([1, 0])
    da, db = grads(op(a, b).sum(), a, b)
    np.testing.assert_array_equal([da, db], np.full((2, 2), 0.5))


def test_a_power_is_differentiable_at_zero_and_below() -> None:
    # 0^b log 0 is 0 times -inf, and a constant exponent of 0 gave 0 times inf. pytorch#27134
    a, b = leaf([0, 2]), leaf([1, 1])
    da, db = grads((a**b).sum(), a, b)
    np.testing.assert_array_equal(da, [1, 1])
    np.testing.assert_allclose(db, [0, 2 * np.log(2)], rtol=1e-15)
    for exponent in (0, 0.0, np.zeros(2)):
        a = leaf([0, 3])
        np.testing.assert_array_equal(grads((a**exponent).sum(), a)[0], [0, 0])
    for exponent, expected in [(2, -4), (3, 12), (np.array(2.0), -4), (np.array(3), 12)]:
        a = leaf(-2)  # no warning about the logarithm of -2: nobody asked for d/db
        assert grads(a**exponent, a)[0] == expected


@pytest.mark.parametrize("s", SCALARS, ids=["float64", "float32", "int64", "0-d array"])
def test_a_numpy_number_to_the_power_of_a_tensor(s: Any) -> None:
    # pytorch#9468, for the one operator that is not its own mirror image
    t = leaf(T, np.float32)
    y = s**t
    assert type(y) is mg.Tensor
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y.data, 2**t.data)
    (dt,) = grads(y.sum(), t)
    np.testing.assert_allclose(dt, 2**t.data * np.log(np.float32(2)), rtol=1e-6)


def test_a_norm_at_zero_and_a_std_of_constants_have_gradients() -> None:
    # x / |x| is 0 / 0 at 0: one constant input, and every parameter was nan a step later. pytorch#2421, pytorch#4320
    for x in (leaf([0, 0, 0]), leaf([5, 5, 5])):
        np.testing.assert_array_equal(grads(mg.std(x), x)[0], [0, 0, 0])
    x = leaf([[0, 0], [3, 4]])
    np.testing.assert_allclose(grads(mg.norm(x, axis=1).sum(), x)[0], [[0, 0], [0.6, 0.8]], rtol=1e-15)
    x = leaf([1, 2, 3])
    np.testing.assert_allclose(grads(x.std(ddof=1), x)[0], [-0.5, 0, 0.5], rtol=1e-15)
    x = leaf([1, 2, 3])
    np.testing.assert_allclose(grads(x.std(), x)[0], [-0.4082482904638631, 0, 0.4082482904638631], rtol=1e-15)


@pytest.mark.parametrize(
    ("values", "expected"), [([2, 0, 3, 4], [0, 24, 0, 0]), ([2, 0, 0, 4], [0, 0, 0, 0]), ([2, 1, 3], [3, 6, 2])]
)
def test_the_gradient_of_a_product_does_not_divide(values: Any, expected: Any) -> None:
    # prod / x is 0 / 0 at a zero. pytorch#773, burn#5533
    x = leaf(values)
    np.testing.assert_array_equal(grads(x.prod(), x)[0], expected)


def test_corners_have_the_derivative_that_the_documents_say() -> None:
    for op, values, expected in [
        (mg.abs, [-1, 0, 1], [-1, 0, 1]),
        (mg.relu, [-np.inf, -1, 0, 1], [0, 0, 0, 1]),
        (mg.leaky_relu, [-np.inf, 0, 1], [0.01, 0.01, 1]),
        (lambda x: mg.clip(x, low=0, high=1), [-1, 0, 0.5, 1, 2], [0, 1, 1, 1, 0]),
    ]:
        x = leaf(values)
        np.testing.assert_array_equal(grads(op(x).sum(), x)[0], expected)
    np.testing.assert_array_equal(mg.relu(np.array([-np.inf, 1])).data, [0, 1])  # a mask times -inf is nan


def test_a_sum_of_exponentials_may_be_of_nothing() -> None:
    # A row that a mask has emptied: -inf less its maximum -inf is nan.
    x = leaf([[-np.inf, -np.inf], [-np.inf, 1000]])
    y = mg.logsumexp(x, axis=1)
    np.testing.assert_array_equal(y.data, [-np.inf, 1000])
    np.testing.assert_array_equal(grads(y.sum(), x)[0], [[0, 0], [0, 1]])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_functions_with_exponentials_do_not_overflow(dtype: Any) -> None:
    # exp(-x) or x^3 on the way is inf, and inf times 0 nan: in float16 from |x| = 256 on. Warnings are errors here.
    far = np.array([-60_000, -300, -20, 20, 300, 60_000], dtype)
    positive = np.maximum(far, 0)
    for op, expected, tolerance in [
        (mg.sigmoid, far > 0, 1e-8),
        (mg.softplus, positive, 1e-8),
        (mg.silu, positive, 1e-7),
        (mg.gelu, positive, 1e-8),
        (lambda x: mg.gelu(x, exact=True), positive, 1e-8),
    ]:
        x = leaf(far, dtype)
        y = op(x)
        np.testing.assert_allclose(y.data, expected, rtol=1e-3, atol=tolerance)
        (dx,) = grads(y.sum() if dtype != np.float16 else (y * np.zeros(6, dtype)).sum(), x)
        assert np.isfinite(dx).all()


def test_the_exact_gelu_is_exact() -> None:
    # Against the C library's erf, one number at a time; float32 within the error of the formula that it uses.
    x = np.concatenate([np.linspace(-9, 9, 4001), [-30, -1e-300, 0, 1e-9]])
    expected = np.array([0.5 * v * math.erfc(-v * math.sqrt(0.5)) for v in x])
    slopes = np.array(
        [0.5 * math.erfc(-v / math.sqrt(2)) + v * math.exp(-v * v / 2) / math.sqrt(2 * math.pi) for v in x]
    )
    for dtype, tolerance in [(np.float64, 2e-15), (np.float32, 1e-6)]:
        t = leaf(x, dtype)
        y = mg.gelu(t, exact=True)
        np.testing.assert_allclose(y.data, expected, rtol=0, atol=tolerance)
        np.testing.assert_allclose(grads(y.sum(), t)[0], slopes, rtol=0, atol=tolerance)


def test_a_sum_with_an_empty_operand_is_zero() -> None:
    # Broadcasting (4, 1) against (4, 0): the gradient is a sum of nothing, in the operand's shape. pytorch#15223
    a, b = leaf(np.ones((4, 0))), leaf(np.ones((4, 1)))
    da, db = grads((a + b).sum(), a, b)
    assert da is not None
    assert da.shape == (4, 0)
    np.testing.assert_array_equal(db, np.zeros((4, 1)))


def test_masks_can_be_counted() -> None:
    # A sum in its input's own dtype: of booleans it was "any", of int8 it wrapped.
    assert mg.sum(np.ones(300, bool)).item() == 300
    assert mg.sum(np.ones(300, np.int8)).item() == 300


def test_a_number_to_the_power_of_integers_is_not_cut_to_one() -> None:
    # The number was brought to the exponents' dtype, in which 2.5 is 2.
    for exponents in (mg.Tensor([1, 2, 3]), np.array([1, 2, 3]), mg.Tensor(np.array([1, 2, 3], np.int8))):
        np.testing.assert_array_equal(mg.pow(2.5, exponents).data, [2.5, 6.25, 15.625])
    assert (2 ** mg.Tensor(np.array([1, 2], np.int8))).dtype == np.int8
    assert (2.5 ** leaf([1, 2], np.float32)).dtype == np.float32


def test_the_length_of_integers_does_not_overflow() -> None:
    # Squares in the dtype of x: 200 in uint8 had the length 8.
    assert mg.norm(np.array([200], np.uint8)).item() == 200
    assert mg.norm(np.array([[30_000], [40_000]], np.int32)).item() == 50_000


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_integers_beside_weights_take_their_dtype_and_sums_are_wide(dtype: Any) -> None:
    # Of images of integers a convolution was float64; beside float16 it was added up in that, which stops at 2048.
    image, weight = np.ones((1, 1, 60, 60), np.uint8), np.ones((1, 1, 60, 60), dtype)
    for x in (image, image.astype(np.int64)):
        y = mg.conv2d(x, mg.Tensor(weight, requires_grad=True), np.zeros(1, dtype))
        assert (y.dtype, y.item()) == (dtype, 3600)
        y = mg.einsum("bchw,ochw->bo", x, mg.Tensor(weight, requires_grad=True))
        assert (y.dtype, y.item()) == (dtype, 3600)


def test_vectors_of_no_numbers_divide_by_nothing() -> None:
    # By their width: norms warned of 0 / 0 in the backward, and attention of queries without numbers was an error.
    for norm in (lambda x: mg.layer_norm(x, np.ones(0), np.ones(0)), lambda x: mg.rms_norm(x, np.ones(0))):
        x = leaf(np.ones((2, 0)))
        assert grads(mg.sum(norm(x)), x)[0].shape == (2, 0)  # type: ignore[union-attr]
    q, v = leaf(np.ones((1, 2, 0))), leaf([[[1.0], [3.0]]])
    y = mg.scaled_dot_product_attention(q, q, v)
    np.testing.assert_array_equal(y.data, [[[2.0], [2.0]]])  # all keys fit alike
    np.testing.assert_array_equal(grads(mg.sum(y), v)[0], [[[1.0], [1.0]]])


# -- depth, sharing, memory ---------------------------------------------------------------


def test_a_deep_graph_is_walked_and_dropped_in_a_fresh_process() -> None:
    # Backward recursed, or the graph was freed recursively and the process died. micrograd#90, pytorch#5534
    code = (
        "import gc, numpy as np, minigrad as mg\n"
        "gc.disable()\n"
        "x = mg.Tensor(np.array(1.0), requires_grad=True)\n"
        "for walk in (mg.backward, lambda y: None):\n"
        "    y = x\n"
        "    for _ in range(20_000): y = y + x\n"
        "    walk(y)\n"
        "    del y\n"
        "print(x.grad)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "20001.0\n"


def test_a_node_waits_for_all_its_uses() -> None:
    # A stack without ordering walked a reused node before its gradient was complete. micrograd#64
    a = leaf(1.0)
    b = a + a
    (da,) = grads(b + b, a)
    assert da == 4
    x = leaf(1.0)
    y = x
    for _ in range(60):
        y = y + y
    (dx,) = grads(y, x)
    assert dx == 1152921504606846976


# -- values changed in place --------------------------------------------------------------


def test_a_step_between_forward_and_backward_is_not_silent() -> None:
    # The vjp read the weight as it was after the step: [5, 6, 7] for [4, 5, 6]. pytorch#39141
    w, a = mg.Parameter([4.0, 5.0, 6.0], "w"), leaf([1, 2, 3])
    optimizer = mg.optim.Optimizer([w], mg.optim.SGD(lr=1.0))
    product, total = (w * a).sum(), (w + a).sum()
    w.grad = -np.ones(3)
    optimizer.step()
    np.testing.assert_array_equal(w.data, [5, 6, 7])
    with pytest.raises(RuntimeError, match=r"mul needs 'w'.*changed in place"):
        mg.backward(product)
    a.grad = None
    (da,) = grads(total, a)  # a sum needs no values
    np.testing.assert_array_equal(da, [1, 1, 1])


# -- hooks --------------------------------------------------------------------------------


def test_a_hook_fires_once_and_after_the_sum() -> None:
    # A parameter used in three places called its hook three times, with partial sums. pytorch#8023, pytorch#76464
    w, unused = mg.Parameter(2.0, "w"), mg.Parameter(1.0, "unused")
    seen: list[Any] = []

    def loss() -> mg.Tensor:
        return 3 * w + w * w + w * w * w

    def see(label: str) -> mg.Hooks:
        return mg.Hooks(on_grad_ready=lambda p: seen.append((label, p.name, float(p.grad))))

    mg.backward_with_hooks(loss(), see("first") + see("second"))
    assert seen == [("first", "w", 19), ("second", "w", 19)]
    mg.backward_with_hooks(loss(), see("third"))
    assert seen[2:] == [("third", "w", 38)]
    assert unused.grad is None


# -- found here ---------------------------------------------------------------------------


def test_a_node_shared_by_two_weight_halves_loses_no_gradient_silently() -> None:
    # One w.T for two micro-batches: the second weight half met a walked node, took it for one without parents,
    # and the parameter got half of its gradient.
    w = mg.Parameter(np.ones((2, 2)), "w")
    transposed = w.T
    halves = [mg.backward_input((leaf([[1.0, 2.0]]) @ transposed).sum()) for _ in range(2)]
    mg.backward_weight(halves[0])
    with pytest.raises(RuntimeError, match="this tape was already walked"):
        mg.backward_weight(halves[1])


def test_the_checker_gives_the_function_tensors() -> None:
    # Finite differences called it with plain arrays, so a composition that uses methods took NumPy's; what it then
    # returned had a `.data` too, a memoryview, and the check went through without looking at our forward.
    @mg.op
    def wrong_forward(x: Array) -> Any:
        return 3 * x, (lambda g: 2 * g,)

    def composition(x: mg.Tensor) -> mg.Tensor:
        return wrong_forward(x).sum() if isinstance(x, mg.Tensor) else 2 * np.sum(x)

    with pytest.raises(AssertionError, match="composition: the gradient of argument 0 is wrong"):
        mg.check_vjp(composition, np.ones(3))


def test_a_detached_weight_is_still_a_weight() -> None:
    # detach() forgot that the value depends on parameters alone, and in a pipeline a product into a weight moved
    # from the weight half to the input half.
    w = mg.Parameter(np.ones((2, 2)), "w")
    assert (w * w.detach()).weight_side is True


def test_nameless_parameters_are_not_dropped_from_the_state() -> None:
    # All of them had the same key, "", and the last one won.
    module = mg.nn.Module()
    module.a, module.b = mg.Parameter(np.ones(2)), mg.Parameter(np.ones(3))
    with pytest.raises(ValueError, match=r"one of shape \(2,\) has none"):
        module.state_dict()


def test_the_tape_lists_data_that_lies_in_bytes() -> None:
    # An array over bytes or a mapped file has a base that is no array, and no nbytes.
    x = np.frombuffer(bytes(16))
    assert mg.Tape.of(leaf([1.0, 2.0]) * x).kept_bytes == 16


def test_a_query_that_sees_no_key_does_not_poison_the_weights() -> None:
    # Its softmax was 0 / 0. Leaving its output out of the loss did not help: 0 times NaN reached the projection that
    # all queries share. pytorch#41508
    x, mask = np.random.default_rng(0).standard_normal((3, 2)), np.array([True, True, False])[:, None]
    w, expected = leaf(np.eye(2)), leaf(np.eye(2))
    mg.backward(mg.scaled_dot_product_attention(x @ w, x @ w, x @ w, mask=mask)[:2].sum())
    mg.backward(mg.scaled_dot_product_attention(x[:2] @ expected, x @ expected, x @ expected).sum())
    np.testing.assert_allclose(w.grad, expected.grad, rtol=1e-12)


# -- data parallel ------------------------------------------------------------------------


class Weights(mg.nn.Module):
    """Named parameters and no layers, for losses written by hand."""

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, mg.Parameter(value, name))


def test_a_frozen_body_does_not_need_zero_grad(ranks: Any) -> None:
    # An optimizer of the head alone, made before the wrapper, leaves the frozen body in a flat of its own. Its
    # zero_grad never touched that flat, whose state stayed "reduced", and the second step was refused.
    def program(comm: Any) -> None:
        model = Weights(body=1.0, head=1.0)
        model.body.requires_grad = False
        optimizer = mg.optim.Optimizer([model.head], mg.optim.SGD(0.0))
        ddp = DistributedDataParallel(model, comm)
        for _ in range(2):
            optimizer.zero_grad()
            mg.backward_with_hooks(model.body * model.head * (comm.rank + 1.0), ddp.hooks(num_samples=1))
            ddp.wait()
            assert model.head.grad == pytest.approx((comm.size + 1) / 2)

    ranks.run(program)


def test_a_refused_backward_leaves_every_flat_as_it_was(ranks: Any) -> None:
    # Flats were marked "reducing" one by one until the first that had to be refused. Those before it stayed marked:
    # zero_grad asked for wait(), and wait() for a backward.
    def program(comm: Any) -> None:
        model = Weights(w=1.0, v=np.ones((), np.float32))
        ddp = DistributedDataParallel(model, comm)

        def hooked_backward() -> None:
            loss = model.w * 2.0 + model.v.astype(dtype=np.float64) * 3.0
            mg.backward_with_hooks(loss, ddp.hooks(num_samples=1))

        for refused, zeroed in [("v", [model.w]), ("w", [model.v])]:
            hooked_backward()
            ddp.wait()
            mg.flat.zero_grad(zeroed)
            with pytest.raises(RuntimeError, match=f"backward into '{refused}': its grad is already reduced"):
                hooked_backward()
            mg.flat.zero_grad(ddp.params)
        hooked_backward()
        ddp.wait()
        assert (model.w.grad, model.v.grad) == pytest.approx((2, 3))

    ranks.run(program)


@pytest.mark.ranks(2, 3, 4)
def test_memory_in_another_order_on_one_rank_is_an_error_on_all(ranks: Any) -> None:
    # Names, shapes and dtypes agreed, but an optimizer made earlier on one rank had placed the parameters otherwise:
    # a bucket of the same size averaged one parameter with another.
    def program(comm: Any) -> str:
        model = Weights(a=np.zeros(2), b=np.zeros(2))
        if comm.rank == comm.size - 1:
            mg.optim.Optimizer([model.b, model.a], mg.optim.SGD(1.0))
        with pytest.raises(ValueError, match="all ranks need the same buckets") as caught:
            DistributedDataParallel(model, comm)
        return str(caught.value)

    difference = f"bucket 0 is ['b', 'a'] at 0 of 4 on rank 0 and ['a', 'b'] at 0 of 4 on rank {ranks.size - 1}"
    rule = "all ranks need the same buckets in the same order, but"
    assert ranks.run(program) == [f"{rule} {difference}"] * ranks.size


def test_the_same_bucket_elsewhere_in_memory_on_one_rank_is_an_error_on_all(ranks: Any) -> None:
    # A bucket at another place of a rank's flat would be reduced with other gradients where ranks share memory.
    def program(comm: Any) -> str:
        model, other = Weights(a=np.zeros(2)), mg.Parameter(np.zeros(3), "other")
        if comm.rank == comm.size - 1:
            mg.optim.Optimizer([model.a, other], mg.optim.SGD(1.0))
        with pytest.raises(ValueError, match="all ranks need the same buckets") as caught:
            DistributedDataParallel(model, comm)
        return str(caught.value)

    if ranks.size > 1:
        difference = f"bucket 0 is ['a'] at 0 of 2 on rank 0 and ['a'] at 3 of 5 on rank {ranks.size - 1}"
        assert ranks.run(program)[0].endswith(difference)


def test_gradients_that_are_overwritten_need_no_zero_grad(ranks: Any) -> None:
    # A manager used alone refused its second reset(): only an optimizer could have called zero_grad, and there is none.
    def program(comm: Any) -> None:
        manager = GradientBucketManager([("w", 1, np.float64)], comm)
        for step in range(2):
            manager.reset()
            manager.grad("w")[:] = comm.rank + step
            manager.mark_ready("w")
            manager.wait()
            assert manager.grad("w") == pytest.approx((comm.size - 1) / 2 + step)

    ranks.run(program)


# -- pipelines ----------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.point_to_point
def test_a_scalar_between_stages_stays_one(ranks: Any) -> None:
    # np.ascontiguousarray, called before each send, gives a 0-d array an axis: the stage's own output and the gradient
    # that came back for it differed in shape.
    layers = [scale("v", 3.0), apply("energy", lambda x: (x * x).sum()), scale("w")]
    check_against_one_process(ranks, layers, split(X, 3), split(Y, 3), loss_fn=mean, num_steps=2)


@pytest.mark.point_to_point
def test_one_cotangent_may_serve_every_micro_batch(ranks: Any) -> None:
    # The check that no micro-batch is used twice went by the identity of the array, for cotangents and targets too,
    # where one array for all is natural.
    def program(comm: Any) -> Any:
        pipe = connect(comm, [scale(str(i), 1.0) for i in range(comm.size)], num_microbatches=2, loss_fn=None)
        pipe.forward(np.array([[1.0], [2.0]]))
        pipe.backward([np.ones((1, 1))] * 2)
        return [float(grad) for grad in grads_of(pipe).values()]

    assert ranks.run(program) == [[3.0]] * ranks.size


@pytest.mark.ranks(2, 3, 4)
def test_a_tied_parameter_frozen_on_one_rank_only_is_refused(ranks: Any) -> None:
    # The ranks that still trained the table summed its gradient with a rank that did not come: a hang at the end of the
    # step, after the first layers were frozen by their own rank.
    def program(comm: Any) -> None:
        middle = [dense(f"fc{i}", 4, 4) for i in range(comm.size)]
        pipe = connect(comm, [("embed", scale("w")[1]), *middle, ("head", scale("head", shared="w")[1])], loss_fn=mean)
        if comm.rank == 0:
            for p in pipe.stages.parameters():
                p.requires_grad = False
        message = f"'w' is frozen on rank 0 and not on rank {comm.size - 1}"
        with pytest.raises(ValueError, match=message):
            pipe.step(X, Y)
        for p in pipe.stages.tied:
            p.requires_grad = False
        pipe.step(X, Y)
        assert all(p.grad is None for p in pipe.stages.tied)

    ranks.run(program)


@pytest.mark.ranks(2, 3, 4)
def test_tied_copies_start_with_the_values_of_the_first_rank(ranks: Any) -> None:
    # One process gives a tied parameter the initial values of whoever asks first; each rank gave its copy its own.
    def program(comm: Any) -> None:
        stages = PipelineStage.of(
            [scale(str(i), float(i), shared="w") for i in range(comm.size)], comm, SCHEDULES["1f1b"], dtype=np.float32
        )
        assert [p.data for p in stages.tied] == [0.0]

    ranks.run(program)


@pytest.mark.ranks(2)
def test_a_recomputed_block_replays_from_what_it_was_given_though_the_stage_has_sent_that(ranks: Any) -> None:
    # A stage lets go of its outputs once they are sent. One that gave a recomputed block's input away, too,
    # replayed the block from zeros, and nobody said so.
    class Both(mg.nn.Module):
        def __init__(self, param: Any) -> None:
            self.first = mg.nn.Linear(param.at("first"), 4, 4)
            self.block = mg.nn.Recomputed(mg.nn.Sequential([mg.nn.Linear(param.at("second"), 4, 4), mg.tanh]))

        def __call__(self, x: Any) -> Any:
            h = self.first(x)
            return h, self.block(h)

    layers = [("both", Both), ("join", lambda param: lambda both: both[0] * both[1])]
    check_against_one_process(ranks, layers, split(X, 3), split(np.ones((7, 4)), 3))


@pytest.mark.ranks(2)
def test_parameters_without_a_name_are_never_tied(ranks: Any) -> None:
    # Ties are found by name, and the empty name was one: any two parameters without a name were summed.
    def program(comm: Any) -> None:
        def factory(param: Any) -> Any:
            layer = mg.nn.Module()
            layer.weight = mg.Parameter(np.ones(2 + comm.rank))
            return layer

        stages = PipelineStage.of([("a", factory), ("b", factory)], comm, SCHEDULES["1f1b"])
        assert stages.tied == []
        assert len(stages.parameters()) == 1

    ranks.run(program)


def test_what_passes_a_norm_by_is_added_in_its_pass_at_a_cut_too() -> None:
    # Between nodes a GPU's kernel adds it before it rounds to half precision. Into a leaf, such as the input of a
    # stage, it was added after: gradients of half precision showed where a model is cut.
    besides = []

    def watched(kernel: Any) -> Any:
        def run(*args: Any) -> Any:
            besides.append(args[5] is not None)
            return kernel(*args)

        return run

    x, ones = mg.Tensor(np.eye(3), requires_grad=True), np.ones(3)
    with kernels.replaced("layer_norm_back", watched):
        for h in (x * 1, x):
            mg.backward(mg.sum(h + mg.layer_norm(h, ones, ones)))
    assert besides == [True, True]
    np.testing.assert_allclose(x.grad, 2, atol=1e-12)


def test_lines_of_ranks_that_are_threads_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    # print gives a stream the line and its end in two calls, and another thread's line came between them.
    class Slow(io.StringIO):
        def write(self, words: str) -> int:
            done = super().write(words)
            time.sleep(0.01)  # the other threads' turn
            return done

    stream = Slow()
    monkeypatch.setattr(sys, "stderr", stream)
    LocalWorld(3).run(lambda comm: warn(f"rank {comm.rank} has no disk"))
    assert sorted(stream.getvalue().splitlines()) == [f"rank {rank} has no disk" for rank in range(3)]


def test_a_first_power_keeps_the_values_of_now() -> None:
    # It was the same memory: after the next step of an optimizer, the power was another.
    p = mg.Parameter(np.array([1.0, 2.0]), "p")
    before = p**1
    p.data = np.zeros(2)
    np.testing.assert_array_equal(before.data, [1, 2])


def test_the_derivative_by_an_exponent_is_0_at_base_0_of_a_negative_one_too() -> None:
    # 0^-1 is infinite, and infinity times 0 was nan.
    base, exponents = np.array([[0.0], [2.0]]), mg.Tensor(np.array([-1.0, 0.0, 2.0]), requires_grad=True)
    with np.errstate(divide="ignore"):
        power = base**exponents
    mg.backward(mg.sum(mg.where(np.isinf(power.data), 0.0, power)))
    np.testing.assert_allclose(exponents.grad, 2.0 ** np.array([-1, 0, 2]) * np.log(2))
