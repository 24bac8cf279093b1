"""Update rules against their papers' equations, written out again in float64, one number at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import minigrad as mg
from minigrad.backend import Array
from minigrad.kernels.common import BLOCK
from minigrad.optim import SGD, Adam, AdamW, Optimizer, clip_by_global_norm, grad_square_sum, scale_to_norm


def make(*shapes: tuple[int, ...], dtype: Any = np.float64) -> list[mg.Parameter]:
    generator = np.random.default_rng(3)
    return [mg.Parameter(generator.standard_normal(s).astype(dtype), f"p{i}") for i, s in enumerate(shapes)]


def gradients(shape: tuple[int, ...], num_steps: int) -> list[Array]:
    generator = np.random.default_rng(4)
    return [np.asarray(generator.standard_normal(shape)) for _ in range(num_steps)]


def run(rule: mg.optim.Rule, w: mg.Parameter, grads: list[Array]) -> Array:
    optimizer = Optimizer([w], rule)
    for g in grads:
        optimizer.zero_grad()
        w.grad = g
        optimizer.step()
    return w.data


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.9, 0.1)])
def test_sgd_is_its_equations(momentum: float, decay: float) -> None:
    (w,) = make((3, 4))
    expected, velocity = w.data.copy(), np.zeros((3, 4))
    grads = gradients((3, 4), 4)
    for g in grads:
        velocity = momentum * velocity + g + decay * expected
        expected = expected - 0.1 * velocity
    got = run(SGD(lr=0.1, momentum=momentum, weight_decay=decay), w, grads)
    np.testing.assert_allclose(got, expected, rtol=1e-13)


def adamw(w: Array, grads: list[Array], lr: float, b1: float, b2: float, eps: float, decay: float) -> Array:
    """Loshchilov and Hutter 2019, algorithm 2, with the schedule multiplier in lr."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        w = w - lr * (m_hat / (np.sqrt(v_hat) + eps) + decay * w)
    return w


@pytest.mark.parametrize("shape", [(3, 4), (1, BLOCK - 1), (1, BLOCK), (1, BLOCK + 1), (3, BLOCK)])
def test_adamw_is_its_equations_across_blocks_too(shape: tuple[int, ...]) -> None:
    (w,) = make(shape)
    grads = gradients(shape, 3)
    expected = adamw(w.data.copy(), grads, 0.01, 0.8, 0.95, 1e-3, 0.1)
    got = run(AdamW(lr=0.01, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1), w, grads)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-15)


def test_adamw_at_its_defaults_over_many_steps() -> None:
    (w,) = make((2, 2))
    grads = gradients((2, 2), 200)
    expected = adamw(w.data.copy(), grads, 1e-3, 0.9, 0.999, 1e-8, 0.01)
    np.testing.assert_allclose(run(AdamW(lr=1e-3), w, grads), expected, rtol=1e-12)


@pytest.mark.parametrize("rule", [SGD(0.1), SGD(0.1, momentum=0.9, weight_decay=0.1), AdamW(0.1)])
def test_a_rule_is_elementwise(rule: mg.optim.Rule) -> None:
    """Cutting the data anywhere gives the same bits: what a sharded optimizer relies on."""
    data, grad = np.random.default_rng(0).standard_normal((2, 1000))
    whole, parts = data.copy(), data.copy()
    state = rule.init(whole)
    states = [(slice(a, b), rule.init(parts[a:b])) for a, b in [(0, 1), (1, 700), (700, 1000)]]
    for step in range(3):
        rule.update(whole, grad, state, lr=0.1, step=step, decay=True)
        for part, own in states:
            rule.update(parts[part], grad[part], own, lr=0.1, step=step, decay=True)
    np.testing.assert_array_equal(whole, parts)


@pytest.mark.parametrize("rule", [SGD(0.1, momentum=0.9, weight_decay=0.1), AdamW(0.1)])
def test_dtype_is_kept_and_gradients_are_not_changed(rule: mg.optim.Rule) -> None:
    (w,) = make((3, 4), dtype=np.float32)
    g = np.ones((3, 4), np.float32)
    run(rule, w, [g, g])
    assert w.data.dtype == np.float32
    assert all(array.dtype == np.float32 for array in rule.init(w.data).values())
    np.testing.assert_array_equal(w.grad, g)


@pytest.mark.parametrize("rule", [SGD(0.1, weight_decay=0.5), AdamW(0.1, weight_decay=0.5)])
def test_weights_decay_but_biases_and_norms_do_not(rule: mg.optim.Rule) -> None:
    matrix, bias, gain, table = params = make((2, 2), (2,), (2,), (3, 2))
    before = [p.data.copy() for p in params]
    Optimizer(params, rule).step()  # no gradient counts as zero: what moves is decay
    for p, values in zip(params, before, strict=True):
        np.testing.assert_allclose(p.data, values * (0.95 if p in (matrix, table) else 1), rtol=1e-14)
    assert bias.ndim == gain.ndim == 1


def test_the_caller_may_choose_what_decays() -> None:
    first, second = make((2,), (2, 2))
    before = second.data.copy()
    Optimizer([first, second], SGD(0.1, weight_decay=0.5), decays=lambda p: p is first).step()
    np.testing.assert_array_equal(second.data, before)


def test_what_decays_is_asked_once() -> None:
    # It was asked again whenever a parameter was frozen, and may have said something else by then.
    asked: list[mg.Parameter] = []
    first, second = params = make((2,), (2, 2))
    optimizer = Optimizer(params, SGD(0.1, weight_decay=0.5), decays=lambda p: asked.append(p) is None)
    for frozen in (False, True, False):
        second.requires_grad = not frozen
        optimizer.step()
    assert asked == [first, second]


def test_weight_decay_of_half_precision_is_not_rounded_away() -> None:
    # Adam adds it to the gradient: in float16, where 1e-8 is 0.
    (w,) = make((2, 2), dtype=np.float16)
    w.data = np.full((2, 2), 1e-3)
    optimizer = Optimizer([w], Adam(0.1, weight_decay=1e-5))
    optimizer.step()
    state = dict(optimizer.state_arrays())
    np.testing.assert_allclose(state[f"m/{w.name}"], 1e-9, rtol=1e-2)


def test_the_learning_rate_may_be_a_function_of_the_step() -> None:
    (w,) = make((2,))
    w.data = np.zeros(2)
    optimizer = Optimizer([w], SGD(lr=lambda step: 10.0**-step))
    for step in range(3):
        assert optimizer.lr == 10.0**-step
        w.grad = np.ones(2)
        optimizer.step()
    np.testing.assert_allclose(w.data, -1.11)


def test_frozen_parameters_stay_and_the_others_move() -> None:
    params = make((2,), (2,), (2,))
    frozen = params[1]
    optimizer = Optimizer(params, AdamW(0.1))
    history = []
    for freeze in (False, True, False):
        frozen.requires_grad = not freeze
        optimizer.zero_grad()
        mg.backward(mg.add(params[0] * params[1], params[2]).sum())
        assert (frozen.grad is None) == freeze
        before = [p.data.copy() for p in params]
        optimizer.step()
        history.append([bool((p.data != b).all()) for p, b in zip(params, before, strict=True)])
    assert history == [[True, True, True], [True, False, True], [True, True, True]]


def test_a_stale_gradient_of_a_parameter_that_was_frozen_is_not_used_again() -> None:
    (w,) = make((2,))
    optimizer = Optimizer([w], SGD(1.0))
    mg.backward(w.sum())
    optimizer.zero_grad()
    before = w.data.copy()
    optimizer.step()
    np.testing.assert_array_equal(w.data, before)


def test_two_optimizers_may_share_a_model() -> None:
    shapes = [(2,), (2, 2), (3,), (2, 1)]
    params, alone = make(*shapes), make(*shapes)
    mg.FlatBuffer.adopt(params)
    rules = [AdamW(0.1), SGD(0.1, momentum=0.9, weight_decay=0.1), AdamW(0.2), AdamW(0.1)]
    shared = [
        Optimizer([params[0], params[3]], rules[0]),  # two ranges
        Optimizer([params[1]], rules[1]),  # one that starts in the middle
        Optimizer([params[2]], rules[2]),
    ]
    for optimizer in [*shared, *(Optimizer([p], rule) for p, rule in zip(alone, rules, strict=True))]:
        for step in range(3):
            for p in optimizer.params:
                p.grad = np.full(p.shape, step + 1.0)
            optimizer.step()
    for p, expected in zip(params, alone, strict=True):
        np.testing.assert_array_equal(p.data, expected.data)


def test_state_belongs_to_its_parameter_where_decay_begins_and_ends() -> None:
    shapes = [(2, 2), (3,), (1, 2), (2,)]
    params, alone = make(*shapes), make(*shapes)
    rule = AdamW(0.1, weight_decay=0.5)
    for optimizer in [Optimizer(params, rule), *(Optimizer([p], rule) for p in alone)]:
        for step in range(3):
            for p in optimizer.params:
                p.grad = np.full(p.shape, step + p.size)
            optimizer.step()
    for p, expected in zip(params, alone, strict=True):
        np.testing.assert_array_equal(p.data, expected.data)


def test_an_optimizer_takes_a_tied_parameter_once() -> None:
    (w,) = make((2,))
    before = w.data.copy()
    optimizer = Optimizer(iter([w, w]), SGD(1.0))
    w.grad = np.ones(2)
    optimizer.step()
    np.testing.assert_array_equal(w.data, before - 1)


# -- clipping -----------------------------------------------------------------------------


def test_clipping_scales_the_global_norm() -> None:
    params = make((2,), (), (1, 1), dtype=np.float32)
    params.append(mg.Parameter(np.ones(1), "double"))
    for p, g in zip(params, ([1.0, 2.0], 2.0, [[4.0]], None), strict=True):
        p.grad = g
    assert grad_square_sum(params) == 25
    assert clip_by_global_norm(params, 10.0) == 5
    np.testing.assert_array_equal(params[0].grad, [1, 2])
    assert clip_by_global_norm(params, 2.5) == 5
    np.testing.assert_array_equal(params[0].grad, [0.5, 1])
    assert params[2].grad == 2
    assert params[3].grad is None


def test_norms_of_ranks_with_different_parameters_add() -> None:
    params = make((2,), (3,))
    for p in params:
        p.grad = np.full(p.shape, 2.0)
    assert grad_square_sum(params) == sum(grad_square_sum([p]) for p in params) == 20
    scale_to_norm(params[:1], norm=20**0.5, max_norm=5**0.5)
    np.testing.assert_allclose(params[0].grad, [1, 1])
    np.testing.assert_array_equal(params[1].grad, [2, 2, 2])


@pytest.mark.parametrize("max_norm", [0.0, -1.0, np.nan])
def test_a_norm_to_clip_to_must_be_positive(max_norm: float) -> None:
    with pytest.raises(ValueError, match=f"max_norm must be positive, got {max_norm}"):
        clip_by_global_norm(make((2,)), max_norm)


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_an_optimizer_with_max_norm_clips_and_steps(max_norm: float) -> None:
    def params() -> list[mg.Parameter]:
        made = [mg.Parameter(np.linspace(1, 2, n), f"p{n}") for n in (3, 4)]
        for p in made:
            p.grad = p.data * 2
        return made

    expected, found = params(), params()
    norm = clip_by_global_norm(expected, max_norm)
    Optimizer(expected, SGD(0.1)).step()
    optimizer = Optimizer(found, SGD(0.1), max_norm=max_norm)
    assert optimizer.grad_norm == 0
    optimizer.step()
    assert optimizer.grad_norm == norm > 1
    for p, q in zip(expected, found, strict=True):
        np.testing.assert_array_equal(p.data, q.data)
    with pytest.raises(ValueError, match="max_norm must be positive, got 0"):
        Optimizer(found, SGD(0.1), max_norm=0)


def test_with_max_norm_no_step_is_taken_where_the_norm_is_not_finite() -> None:
    w = mg.Parameter(np.ones(3), "w")
    optimizer = Optimizer([w], AdamW(0.1), max_norm=1.0)
    for bad in (np.inf, np.nan):
        w.grad = np.array([1.0, bad, 0.0])
        optimizer.step()
        assert not optimizer.was_taken()
        assert optimizer.num_steps == 0
        np.testing.assert_array_equal(w.data, np.ones(3))
        optimizer.zero_grad()
    w.grad = np.ones(3)
    optimizer.step()
    assert optimizer.was_taken()
    assert optimizer.num_steps == 1
    assert (w.data < 1).all()
