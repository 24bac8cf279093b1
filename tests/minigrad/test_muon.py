"""Muon against its equations: singular values, single matrices, and which parameters it takes."""

import numpy as np
import pytest

import minigrad as mg
from minigrad import FlatBuffer
from minigrad.optim import SGD, AdamW, Optimizer
from minigrad.optim.muon import NEWTON_SCHULZ, Muon, is_hidden_matrix, orthogonalized


def parameters(**shapes):
    generator = np.random.default_rng(0)
    return [mg.Parameter(generator.standard_normal(shape), name) for name, shape in shapes.items()]


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5), (1, 7), (7, 1), (1, 1)])
def test_singular_values_become_about_1_and_their_vectors_stay(shape):
    g = np.random.default_rng(1).standard_normal(shape)
    u, s, vt = np.linalg.svd(g, full_matrices=False)
    found = orthogonalized(g)
    # An odd polynomial of a matrix is that of its singular values, which a NumPy of numbers checks exactly.
    a, b, c = NEWTON_SCHULZ
    values = s / np.sqrt((s**2).sum())
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    np.testing.assert_allclose(found, u * values @ vt, rtol=1e-9, atol=1e-9)
    large = s > 0.05 * s[0]
    assert values[large].min() > 0.5
    assert values.max() < 1.3


def test_a_matrix_of_zeros_stays_zeros():
    np.testing.assert_array_equal(orthogonalized(np.zeros((3, 4))), 0)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
def test_steps_follow_the_equations(shape):
    (w,) = parameters(**{"fc.weight": shape})
    expected, average = w.data.copy(), np.zeros(shape)
    optimizer = Optimizer([w], Muon(lambda step: 0.1 / (1 + step), momentum=0.8, weight_decay=0.5, num_iterations=3))
    for step in range(4):
        g = np.random.default_rng(step).standard_normal(shape)
        w.grad = g
        optimizer.step()
        optimizer.zero_grad()
        average = 0.8 * average + 0.2 * g
        lr = 0.1 / (1 + step)
        change = orthogonalized(0.2 * g + 0.8 * average, num_iterations=3)
        expected = (1 - lr * 0.5) * expected - lr * max(1, shape[1] / shape[0]) ** 0.5 * change
    np.testing.assert_allclose(w.data, expected, rtol=1e-12)


def test_hidden_matrices_are_its_own_and_all_else_is_the_other_rules():
    names = {
        "embed.token.weight": (5, 4),
        "a.weight": (4, 4),
        "a.bias": (4,),
        "b.weight": (4, 2),
        "head.weight": (4, 5),
    }
    params, expected = parameters(**names), parameters(**names)
    assert [p.name for p in params if is_hidden_matrix(p)] == ["a.weight", "b.weight"]
    optimizer = Optimizer(params, Muon(0.1, weight_decay=0.0, others=SGD(0.5)))
    for p, q in zip(params, expected, strict=True):
        p.grad = q.grad = np.random.default_rng(len(p.name)).standard_normal(p.shape)
    optimizer.step()
    Optimizer([p for p in expected if not is_hidden_matrix(p)], SGD(0.5)).step()
    for p, q in zip(params, expected, strict=True):
        assert (p.data.tobytes() == q.data.tobytes()) == (not is_hidden_matrix(p)), p.name
    assert sorted(name for name, _ in optimizer.state_arrays()) == ["momentum/a.weight", "momentum/b.weight"]


def test_matrices_side_by_side_are_not_mixed():
    together, alone = parameters(a=(3, 4), b=(4, 2)), parameters(a=(3, 4), b=(4, 2))
    FlatBuffer.adopt(together)
    for p, q in zip(together, alone, strict=True):
        p.grad = q.grad = np.random.default_rng(p.size).standard_normal(p.shape)
        Optimizer([q], Muon(0.1)).step()
    Optimizer(together, Muon(0.1)).step()
    for p, q in zip(together, alone, strict=True):
        np.testing.assert_array_equal(p.data, q.data)


def test_a_frozen_matrix_stays_and_decay_is_the_optimizers_choice():
    frozen, kept, decayed = params = parameters(frozen=(3, 3), kept=(3, 3), decayed=(3, 3))
    frozen.requires_grad = False
    before = [p.data.copy() for p in params]
    Optimizer(params, Muon(0.1, weight_decay=0.5), decays=lambda p: p is decayed).step()  # gradients are zeros
    np.testing.assert_array_equal(frozen.data, before[0])
    np.testing.assert_array_equal(kept.data, before[1])
    np.testing.assert_allclose(decayed.data, 0.95 * before[2], rtol=1e-12)


def test_half_precision_keeps_its_average_in_float32():
    w = mg.Parameter(np.eye(4, dtype=np.float16), "w")
    optimizer = Optimizer([w], Muon(0.1))
    w.grad = np.eye(4)
    optimizer.step()
    ((_, average),) = optimizer.state_arrays()
    assert (w.data.dtype, average.dtype) == (np.float16, np.float32)


def test_it_learns():
    generator = np.random.default_rng(0)
    w = mg.Parameter(np.zeros((6, 4), np.float32), "w")
    x, target = generator.standard_normal((32, 6), np.float32), generator.standard_normal((6, 4), np.float32)
    optimizer = Optimizer([w], Muon(lambda step: 0.3 * 0.95**step, weight_decay=0.0))
    for _ in range(120):
        optimizer.zero_grad()
        loss = mg.mse(mg.matmul(x, w), x @ target)
        mg.backward(loss)
        optimizer.step()
    assert loss.item() < 0.05


def test_what_it_cannot_train_is_refused():
    with pytest.raises(ValueError, match=r"Muon trains matrices, but 'b' has shape \(3,\): see chooses"):
        Optimizer(parameters(b=(3,)), Muon(0.1, chooses=lambda p: True))
    with pytest.raises(ValueError, match="num_iterations must be at least 1, got 0"):
        Muon(num_iterations=0)
    assert Muon(num_iterations=1, momentum=0.0).num_iterations == 1
    with pytest.raises(ValueError, match=r"momentum must be from 0 to below 1, got 1\.0"):
        Muon(momentum=1.0)
    with pytest.raises(TypeError, match="Muon takes a learning rate"):
        Muon(parameters(w=(2, 2)))
    rule = Muon(0.1, others=AdamW(0.1))
    with pytest.raises(TypeError, match="give it to an Optimizer"):
        rule.init(np.zeros(3))
    with pytest.raises(TypeError, match="give it to an Optimizer"):
        rule.update(np.zeros(3), np.zeros(3), {}, lr=0.1, step=0, decay=True)
