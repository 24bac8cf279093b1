"""The checker must fail a gradient that is slightly wrong: every other gradient test relies on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import minigrad as mg
from minigrad.backend import Array

A, B = np.random.default_rng(0).standard_normal((2, 3, 4))


def product(factor_a: float = 1.0, factor_b: float = 1.0) -> Any:
    """Return an op a * b whose derivatives are wrong by these factors."""

    @mg.op
    def slightly_wrong(a: Array, b: Array) -> Any:
        return a * b, (lambda g: factor_a * g * b, lambda g: factor_b * g * a)

    return slightly_wrong


def test_a_right_gradient_passes() -> None:
    mg.check_vjp(product(), A, B)


@pytest.mark.parametrize("factor", [1.0005, 0.9995, -1.0, 0.0, np.nan])
@pytest.mark.parametrize("seed", range(5))
def test_a_slightly_wrong_gradient_fails_and_names_the_op(factor: float, seed: int) -> None:
    message = r"slightly_wrong: the gradient of argument 0 is wrong: vjp \S+, finite differences \S+"
    with pytest.raises(AssertionError, match=message):
        mg.check_vjp(product(factor_a=factor), A, B, seed=seed)


def test_one_wrong_argument_is_enough_and_is_named() -> None:
    with pytest.raises(AssertionError, match="the gradient of argument 1 is wrong"):
        mg.check_vjp(product(factor_b=1.0005), A, B)


def test_one_wrong_element_is_enough() -> None:
    @mg.op
    def last_wrong(x: Array) -> Any:
        factors = np.ones(x.shape)
        factors[-1, -1] = 1.01
        return 2 * x, (lambda g: 2 * factors * g,)

    with pytest.raises(AssertionError, match="last_wrong"):
        mg.check_vjp(last_wrong, A)


def test_a_derivative_that_the_tape_lost_fails() -> None:
    with pytest.raises(AssertionError, match="argument 0 is wrong: vjp 0, finite differences"):
        mg.check_vjp(lambda a, b: mg.mul(a.detach(), b), A, B)


def test_compositions_get_tensors_and_other_arguments_are_passed_on() -> None:
    ids = np.array([2, 0, 2])

    def composition(x: mg.Tensor, rows: Array, *, scale: float) -> mg.Tensor:
        assert isinstance(x, mg.Tensor)
        return mg.tanh(x[rows] * scale).sum()

    mg.check_vjp(composition, A, ids, scale=0.5)


def test_the_tolerance_is_the_callers() -> None:
    mg.check_vjp(product(factor_a=1.0005), A, B, tolerance=1e-2)


@pytest.mark.parametrize("args", [(A.astype(np.float32),), (A, B.astype(np.float32)), (np.arange(3),), (2.0,)])
def test_anything_but_float64_is_refused(args: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="check_vjp differentiates float64 arrays, and needs at least one"):
        mg.check_vjp(mg.add, *args)
