"""Gradients of plain functions."""

import numpy as np
import pytest

import minigrad as mg


def test_value_and_gradient_of_one_argument() -> None:
    value, grad = mg.value_and_grad(lambda w: mg.sum(w * w))(np.array([1.0, 2.0]))
    assert value == 5
    np.testing.assert_array_equal(grad, [2, 4])


def test_several_arguments_others_are_passed_on() -> None:
    def loss(x, w, *, scale, power):
        return mg.sum(x * w) * scale if power == 1 else None

    value, grads = mg.value_and_grad(loss, argnums=(1, 0))(np.array([1.0, 2.0]), np.array([3.0, 4.0]), scale=2, power=1)
    assert value == 22
    np.testing.assert_array_equal(grads, [[2, 4], [6, 8]])


def test_what_the_value_does_not_depend_on_has_zeros() -> None:
    value, grads = mg.value_and_grad(lambda a, b: mg.sum(a), argnums=(0, 1))(np.ones(2, np.float32), np.ones(3))
    assert value.dtype == np.float32
    np.testing.assert_array_equal(grads[1], np.zeros(3))
    _, grad = mg.value_and_grad(lambda a: mg.Tensor(np.array(1.0)))(np.ones(2))
    np.testing.assert_array_equal(grad, np.zeros(2))


def test_it_records_within_no_grad_and_leaves_arguments_alone() -> None:
    w = mg.Tensor(np.array([3.0]), requires_grad=True)
    with mg.no_grad():
        _, grad = mg.value_and_grad(lambda w: mg.sum(w * w))(w)
    np.testing.assert_array_equal(grad, [6])
    assert w.grad is None


@pytest.mark.parametrize("constant", [True, False])
def test_a_value_that_is_no_scalar_is_refused(constant: bool) -> None:
    with pytest.raises(ValueError, match=r"needs a scalar.*shape \(2,\)"):
        mg.value_and_grad(lambda w: mg.Tensor(np.ones(2)) if constant else w * 1)(np.ones(2))


def test_integers_are_refused() -> None:
    with pytest.raises(TypeError, match="only floating point"):
        mg.value_and_grad(mg.sum)(np.arange(3))
