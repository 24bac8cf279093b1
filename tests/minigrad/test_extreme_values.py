"""Infinite, saturated, very large and very small values: the limit of the formula, never nan made of 0 and inf.

Sources of the cases: theano#3223 (relu), jax#23842, jax#6811, pytorch#31829 (saturated inputs), optax#1754
(Adam in float16), burn#5699 and fairscale#263 (norms in float16).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_modes import MODES, use_kernels

import minigrad as mg
from minigrad.backend import Array
from minigrad.models import GPT, GPTConfig
from minigrad.optim import SGD, AdamW, Optimizer, clip_by_global_norm, grad_square_sum
from minigrad.parameter import Parameter

INF = np.inf
HALVES = [np.float16, ml_dtypes.bfloat16]


@pytest.fixture(autouse=True, params=MODES)
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all of this file with each set of kernels."""
    use_kernels(request.param, monkeypatch)


def value_and_grad(function: Callable[[mg.Tensor], mg.Tensor], x: Any, g: Any = None) -> tuple[Array, Array]:
    leaf = mg.Tensor(np.asarray(x, np.float64), requires_grad=True)
    y = function(leaf)
    mg.backward_with_grad(y, np.ones(y.shape) if g is None else np.broadcast_to(np.asarray(g, np.float64), y.shape))
    assert leaf.grad is not None
    return y.data, leaf.grad


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_relu_selects_what_an_infinite_derivative_meets() -> None:
    _, grad = value_and_grad(lambda x: mg.sqrt(mg.relu(x)).sum(), [-1, 0, 4])
    np.testing.assert_array_equal(grad, [0, 0, 0.25])
    _, grad = value_and_grad(lambda x: mg.log(mg.relu(x)).sum(), [-1, 2])
    np.testing.assert_array_equal(grad, [0, 0.5])


@pytest.mark.parametrize(
    ("function", "x", "expected"),
    [
        (mg.relu, [-1, 4], [0, INF]),
        (mg.leaky_relu, [-1, 4], [INF, INF]),
        (lambda x: mg.dropout(x, keep=np.array([False, True]), rate=0.5), [1, 1], [0, INF]),
        (lambda x: mg.add_dropout(np.ones(2), x, keep=np.array([False, True]), rate=0.5), [1, 1], [0, INF]),
    ],
    ids=["relu", "leaky_relu", "dropout", "add_dropout"],
)
def test_an_infinite_cotangent_reaches_what_was_chosen_alone(
    function: Callable[[mg.Tensor], mg.Tensor], x: list[float], expected: list[float]
) -> None:
    np.testing.assert_array_equal(value_and_grad(function, x, INF)[1], expected)


def test_dropout_drops_nan_and_infinity() -> None:
    keep = np.array([False, False, True, True])
    y, _ = value_and_grad(lambda x: mg.dropout(x, keep=keep, rate=0.5), [np.nan, INF, INF, 3])
    np.testing.assert_array_equal(y, [0, 0, INF, 6])


@pytest.mark.parametrize(
    "function",
    [mg.silu, mg.gelu, lambda x: mg.gelu(x, exact=True)],
    ids=["silu", "gelu", "exact gelu"],
)
def test_smooth_gates_at_infinity(function: Callable[[mg.Tensor], mg.Tensor]) -> None:
    y, grad = value_and_grad(function, [-INF, -1e300, -1e20, 1e20, 1e300, INF, np.nan])
    np.testing.assert_array_equal(y, [0, 0, 0, 1e20, 1e300, INF, np.nan])
    assert np.signbit(y[:3]).all()
    np.testing.assert_array_equal(grad, [0, 0, 0, 1, 1, 1, np.nan])


def test_binary_cross_entropy_of_infinite_logits() -> None:
    loss, grad = value_and_grad(
        lambda x: mg.binary_cross_entropy_with_logits(x, np.array([1.0, 0.0, 0.5])), [INF, -INF, 0.0]
    )
    np.testing.assert_allclose(loss, np.log(2) / 3)
    np.testing.assert_array_equal(grad, [0, 0, 0])
    loss, _ = value_and_grad(lambda x: mg.binary_cross_entropy_with_logits(x, np.array([0.0])), [INF])
    assert loss == INF


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("function", [mg.softmax, mg.log_softmax])
def test_rows_of_minus_infinity_are_nan_and_single_ones_are_not(function: Callable[..., mg.Tensor]) -> None:
    y, _ = value_and_grad(function, [[-INF, -INF], [-INF, 0]])
    np.testing.assert_array_equal(y, [[np.nan, np.nan], np.exp([-INF, 0]) if function is mg.softmax else [-INF, 0]])


# Optimizers and norms in half precision.


def parameter(values: Any, dtype: Any) -> Parameter:
    p = Parameter(np.asarray(values, dtype))
    p.grad = np.zeros(p.shape, dtype)
    return p


def step(optimizer: Optimizer, p: Parameter, g: Any) -> None:
    optimizer.zero_grad()
    p.grad = np.asarray(g, p.dtype)
    optimizer.step()


@pytest.mark.parametrize("dtype", HALVES)
def test_adamw_leaves_what_has_no_gradient_where_it_is(dtype: Any) -> None:
    p = parameter([[1, 1], [2, 2]], dtype)
    step(Optimizer([p], AdamW(lr=0.01, weight_decay=0)), p, [[1, 1], [0, 0]])
    np.testing.assert_array_equal(p.data[1].astype(float), [2, 2])
    assert (p.data[0] < 1).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_adamw_steps_by_the_learning_rate_at_first_however_small_the_gradient(dtype: Any) -> None:
    p = parameter([1], dtype)
    step(Optimizer([p], AdamW(lr=0.01, weight_decay=0)), p, [1e-4])
    np.testing.assert_allclose(p.data.astype(float), 0.99, atol=4e-3)


@pytest.mark.parametrize("rule", [AdamW(lr=0.1, betas=(0.9, 0.9), weight_decay=0.01), SGD(lr=0.001, momentum=0.9)])
def test_float16_follows_float64_through_large_gradients(rule: Any) -> None:
    ends = []
    for dtype in (np.float16, np.float64):
        p = parameter([1], dtype)
        optimizer = Optimizer([p], rule)
        for g in [300, *[1] * 200]:
            step(optimizer, p, [g])
        ends.append(float(p.data[0]))
    np.testing.assert_allclose(*ends, rtol=0.05)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_gpt_of_half_precision_survives_a_step(dtype: Any) -> None:
    model = GPT(GPTConfig(vocab_size=8, context=4, num_layers=1, num_heads=1, width=8), dtype=dtype)
    optimizer = Optimizer(model.parameters(), AdamW(lr=1e-3))
    x = np.arange(8).reshape(2, 4)
    mg.backward(mg.cross_entropy(model(x), x))
    optimizer.step()
    for p in model.parameters():
        assert np.isfinite(p.data.astype(float)).all(), p.name


@pytest.mark.parametrize(
    ("g", "dtype", "norm"),
    [
        ([300, 400], np.float16, 500),
        ([1] * 70_000, np.float16, 70_000**0.5),
        ([300] * 10, np.float16, 90_000**0.5 * 10**0.5),
        ([1e-4] * 10, np.float16, float(np.float16(1e-4)) * 10**0.5),
        ([300, 400], ml_dtypes.bfloat16, 500),
        ([1e20] * 10, np.float32, 1e20 * 10**0.5),
        ([3e-30, 4e-30], np.float32, 5e-30),
        ([3e200, 4e200], np.float64, 5e200),
        ([3e-200, 4e-200], np.float64, 5e-200),
        ([0, 0], np.float32, 0),
        ([INF, 1], np.float32, INF),
        ([np.nan, INF], np.float64, np.nan),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_norms_of_finite_gradients_are_finite_and_clip(g: list[float], dtype: Any, norm: float) -> None:
    p = parameter(np.zeros(len(g)), dtype)
    p.grad = before = np.asarray(g, dtype)
    max_norm = norm / 100 if 0 < norm < INF else 1.0
    np.testing.assert_allclose(clip_by_global_norm([p], max_norm), norm, rtol=3e-3 if dtype in HALVES else 1e-6)
    assert p.grad is not None
    if np.isfinite(norm):
        np.testing.assert_allclose(p.grad.astype(float), before.astype(float) / 100, rtol=1e-2, atol=1e-7)
    else:  # gradients of 0 would hide it
        np.testing.assert_array_equal(p.grad, before)


def test_the_norms_of_a_flat_and_of_two_are_the_same() -> None:
    wide, narrow = parameter([3e200], np.float64), parameter([4], np.float32)
    wide.grad, narrow.grad = np.array([3e200]), np.array([4], np.float32)
    assert clip_by_global_norm([wide, narrow], INF) == 3e200
    assert grad_square_sum([narrow]) == 16
    narrow.grad = np.array([np.nan], np.float32)
    wide.grad = np.array([0.0])
    assert np.isnan(clip_by_global_norm([wide, narrow], INF))


def test_a_tiny_factor_is_no_zero_in_float16() -> None:
    p = parameter([60000], np.float16)
    p.grad = np.array([60000], np.float16)
    clip_by_global_norm([p], 1e-4)
    np.testing.assert_allclose(p.grad.astype(float), 1e-4, rtol=1e-2)
