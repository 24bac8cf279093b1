"""Where Python, NumPy or PyTorch would mean something else: the right thing, or an error that says what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import minigrad as mg
from minigrad import nn, optim


def leaf(*shape: int) -> mg.Tensor:
    return mg.Tensor(np.arange(1.0, 1.0 + np.prod(shape)).reshape(shape), requires_grad=True)


# -- NumPy's functions --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (
            lambda x: np.concatenate([x, x]),
            "numpy.concatenate of a Tensor would .* use minigrad.concatenate",
        ),
        (lambda x: np.stack([x, x.data]), "numpy.stack of a Tensor would lose its gradient: use minigrad.stack"),
        (lambda x: np.sum(x), "numpy.sum of a Tensor would lose its gradient: use minigrad.sum"),
        (lambda x: np.where(x > 1, x, 0), "numpy.where of a Tensor would lose its gradient: use minigrad.where"),
        (lambda x: np.split(x, 2), r"numpy.split of a Tensor would lose its gradient: use x\.split"),
        (
            lambda x: np.argmax(x),
            r"numpy.argmax of a Tensor would .* use x\.data where no gradient",
        ),
        (lambda x: np.asarray(x), r"use minigrad's ops \(minigrad.stack for a list of tensors\), or x\.data"),
        (lambda x: np.array([x, x]), r"use minigrad's ops \(minigrad.stack for a list of tensors\), or x\.data"),
        (lambda x: mg.sum([x, x]), r"use minigrad's ops \(minigrad.stack for a list of tensors\), or x\.data"),
        (lambda x: mg.Tensor([x, x]), r"use minigrad's ops \(minigrad.stack for a list of tensors\), or x\.data"),
    ],
)
def test_a_function_of_numpy_says_which_op_to_use(call: Callable[[mg.Tensor], Any], advice: str) -> None:
    # The advice was to use tensor.data: that drops the gradient where somebody meant an op of ours.
    with pytest.raises(TypeError, match=advice):
        call(leaf(4))


def test_numpy_may_ask_for_the_shape() -> None:
    assert (np.shape(leaf(2, 3)), np.ndim(leaf(2, 3)), np.size(leaf(2, 3))) == ((2, 3), 2, 6)
    with pytest.raises(TypeError, match=r"numpy.size of a Tensor .* use x\.data"):
        np.size(leaf(2, 3), 0)


@pytest.mark.parametrize("many", [lambda *x: x, lambda *x: (list(x),), lambda *x: (tuple(x),)])
@pytest.mark.parametrize("axis", [0, 1])
def test_concatenate_and_stack_take_a_list_too(many: Callable[..., Any], axis: int) -> None:
    x, y = leaf(2, 2), np.full((2, 2), 7.0)
    weights = np.arange(12.0).reshape((6, 2) if axis == 0 else (2, 6))
    joined = mg.concatenate(*many(x, y, x), axis=axis)
    np.testing.assert_array_equal(joined.data, np.concatenate([x.data, y, x.data], axis=axis))
    mg.backward((joined * weights).sum())
    first, _, last = np.split(weights, 3, axis=axis)
    np.testing.assert_array_equal(x.grad, first + last)
    np.testing.assert_array_equal(mg.stack(*many(x, y), axis=axis).data, np.stack([x.data, y], axis=axis))


def test_numbers_are_stacked_as_in_numpy() -> None:
    np.testing.assert_array_equal(mg.stack([1.0, 2.0]).data, [1, 2])
    np.testing.assert_array_equal(mg.concatenate([[1.0], [2.0, 3.0]]).data, [1, 2, 3])
    for join in (mg.stack, mg.concatenate):
        with pytest.raises(ValueError, match="must"):
            join([])


# -- operators ----------------------------------------------------------------------------


@pytest.mark.parametrize("other", [np.ones(2), 1, 1.0, True, np.float32(1), [1, 2], (1.0, 2.0)])
def test_equality_with_values_is_refused(other: Any) -> None:
    # It was False, whatever the values.
    x = mg.Tensor(np.ones(2))
    for compare in (lambda: x == other, lambda: other == x, lambda: x != other, lambda: other != x):
        with pytest.raises(TypeError, match=r"== of tensors is identity; to compare values take x\.data == y"):
            compare()


def test_equality_with_tensors_and_other_things_is_identity() -> None:
    x, y = mg.Tensor(np.ones(2)), mg.Tensor(np.ones(2))
    assert x == x
    assert x != y
    assert x is not None
    assert x != "x"
    assert y in [x, y]
    assert {x: 1, y: 2}[y] == 2


@pytest.mark.parametrize("axes", [(0, 1), (-2, -1), (0, -1), (np.int64(0), np.int64(1))])
def test_a_transpose_of_a_matrix_by_two_numbers_that_change_nothing_is_refused(axes: Any) -> None:
    # In PyTorch these are two axes to exchange; here they were an order of axes, and so x came back as it was.
    with pytest.raises(ValueError, match=r"of a matrix changes nothing as an order.*write x\.T or x\.swapaxes"):
        leaf(2, 3).transpose(*axes)


def test_a_transpose_that_means_one_thing_is_done() -> None:
    x = leaf(2, 3)
    for y in (x.transpose(), x.transpose(1, 0), x.transpose((1, 0)), x.transpose(-1, -2), x.swapaxes(0, 1), x.T):
        np.testing.assert_array_equal(y.data, x.data.T)
    np.testing.assert_array_equal(x.transpose([0, 1]).data, x.data)
    np.testing.assert_array_equal(leaf(2, 3, 1).transpose(0, 1, 2).data, leaf(2, 3, 1).data)
    with pytest.raises(ValueError, match=r"axes must name each axis once, got \(0, 1\).*; swapaxes exchanges two"):
        leaf(2, 3, 1).transpose(0, 1)


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "prod", "var", "std"])
@pytest.mark.parametrize("axis", [0, -1, (0, 1), None])
def test_a_method_takes_its_axis_by_position(name: str, axis: Any) -> None:
    x = leaf(2, 3)
    np.testing.assert_allclose(getattr(x, name)(axis).data, getattr(x.data, name)(axis))
    np.testing.assert_array_equal(getattr(x, name)(axis).data, getattr(x, name)(axis=axis).data)
    kept = getattr(x, name)(axis, keepdims=True)
    np.testing.assert_allclose(kept.data, getattr(x.data, name)(axis, keepdims=True))


def test_other_methods_take_arguments_by_position_too() -> None:
    x = leaf(2, 1, 3)
    np.testing.assert_array_equal(x.cumsum(0).data, x.data.cumsum(0))
    np.testing.assert_array_equal(x.squeeze(1).data, x.data.squeeze(1))
    np.testing.assert_array_equal(x.clip(2, 3).data, x.data.clip(2, 3))


def test_truth_numbers_and_rows_are_those_of_the_array() -> None:
    # A tensor of zeros was true, since it had a length, and a 0-d one was an empty sequence.
    assert not mg.Tensor(0.0)
    assert mg.Tensor([2.0])
    assert float(mg.Tensor([[2.5]]) * 2) == 5
    assert [row.data.tolist() for row in leaf(2, 2)] == [[1, 2], [3, 4]]
    for wrong in (lambda: bool(mg.Tensor(np.zeros(2))), lambda: bool(mg.Tensor(np.zeros(0))), lambda: float(leaf(2))):
        with pytest.raises(ValueError, match=r"truth value|size 1"):
            wrong()
    with pytest.raises(TypeError, match="unsized"):
        list(mg.Tensor(1.0))
    rows = list(leaf(2, 2))
    assert rows[0].node is not None


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "+=": lambda x, y: x.__iadd__(y),
    "-=": lambda x, y: x.__isub__(y),
    "*=": lambda x, y: x.__imul__(y),
    "/=": lambda x, y: x.__itruediv__(y),
    "**=": lambda x, y: x.__ipow__(y),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("owned", [False, True])
def test_a_leaf_changes_in_place_where_nothing_is_recorded(change: str, owned: bool) -> None:
    # `p -= lr * p.grad` gave the name p to a new tensor, and the parameter stayed as it was.
    p, x = mg.Parameter(np.array([2.0, 3.0]), "p"), leaf(2)
    if owned:
        mg.FlatBuffer.adopt([p])
    for t in (p, x):
        memory, before = t.data, t.data.copy()
        with mg.no_grad():
            same = CHANGES[change](t, np.array([0.5, 2.0]))
        assert same is t
        assert t.data is memory
        np.testing.assert_array_equal(t.data, CHANGES[change](before, np.array([0.5, 2.0])))


def test_a_step_by_hand() -> None:
    model = nn.Linear(nn.ParamGetter(dtype=np.float64), 2, 2)
    before = model.state_dict()
    mg.backward(mg.sum(model(np.ones((3, 2)))))
    with mg.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    for name, p in model.named_parameters():
        np.testing.assert_array_equal(p.data, before[name] - 0.1 * 3)


@pytest.mark.parametrize("change", CHANGES)
def test_a_leaf_does_not_change_in_the_middle_of_a_tape(change: str) -> None:
    for t, label in ((mg.Parameter(np.ones(2), "p"), "'p'"), (leaf(2), "tensor")):
        with pytest.raises(RuntimeError, match=rf"^{label} is a leaf, which \+= .* within minigrad\.no_grad\(\)"):
            CHANGES[change](t, 1.0)


def test_a_change_in_place_is_seen_by_a_backward_that_needs_the_values() -> None:
    w = mg.Parameter(np.ones(2), "w")
    y = (w * leaf(2)).sum()
    with mg.no_grad():
        w *= 2.0
    with pytest.raises(RuntimeError, match="mul needs 'w' as it was in the forward"):
        mg.backward(y)


@pytest.mark.parametrize("change", CHANGES)
def test_any_other_name_gets_a_new_tensor(change: str) -> None:
    x = leaf(2)
    y = before = x * 1.0
    y = CHANGES[change](y, 2.0)
    assert y is not before
    np.testing.assert_array_equal(before.data, [1, 2])
    mg.backward(y.sum())
    assert x.grad is not None
    with mg.no_grad():
        view = before = mg.Parameter(np.ones((2, 2)), "w").T
        view = CHANGES[change](view, 2.0)
    assert view is not before
    np.testing.assert_array_equal(before.data, np.ones((2, 2)))


@pytest.mark.parametrize(
    "t", [nn.Buffer(np.array([2.0]), "b"), mg.Parameter(np.array([2.0]), "w", requires_grad=False)]
)
def test_what_is_not_trained_changes_in_place_at_any_time(t: mg.Tensor) -> None:
    memory = t.data
    t *= 3.0
    t += 1.0
    assert memory == 7
    with pytest.raises(ValueError, match=r"\.data has shape \(1,\), got \(2,\)"):
        t += np.ones(2)


# -- attributes of modules ----------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self) -> None:
        self.running = nn.Buffer(np.zeros(2), "running")
        self.weight = mg.Parameter(np.ones(2), "weight")
        self.count = nn.Buffer(np.array(0), "count")


@pytest.mark.parametrize(
    "value",
    [
        np.array([1.0, 2.0]),
        [1, 2],
        mg.Tensor(np.array([1.0, 2.0])),
        mg.Parameter(np.array([0.5, 1.0]), "w") * 2.0,
        nn.Buffer(np.array([1.0, 2.0]), "running"),
        np.array([1.0, 2.0], np.float32),
    ],
)
def test_assigning_to_a_buffer_copies_values_into_it(value: Any) -> None:
    # The attribute became something else, and the buffer fell out of what DDP broadcasts and a checkpoint saves, or one
    # of another name took its place that they did not know. pytorch#63916
    model = Counting()
    buffer, memory = model.running, model.running.data
    model.running = value
    assert model.running is buffer
    assert buffer.data is memory
    np.testing.assert_array_equal(model.state_dict()["running"], [1, 2])
    assert buffer.node is None


def test_a_running_mean_and_a_count() -> None:
    model = Counting()
    for batch in (10.0, 20.0):
        model.running = 0.9 * model.running + 0.1 * np.full(2, batch)
        model.count += 1
    np.testing.assert_allclose(model.running.data, 2.9, rtol=1e-15)
    assert model.count.item() == 2
    assert {b.name for b in model.buffers()} == {"running", "count"}


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (np.ones(3), ValueError, r"'running'\.data has shape \(2,\), got \(3,\)"),
        (
            nn.Buffer(np.ones(2), "other"),
            ValueError,
            "'running' cannot become 'other': del the attribute first",
        ),
        (None, TypeError, "arrays must be of booleans, integers, or real numbers"),
        ("text", TypeError, "arrays must be of booleans, integers, or real numbers"),
        (np.ones(2, complex), TypeError, "got dtype complex128"),
    ],
)
def test_what_a_buffer_cannot_hold_is_not_assigned(value: Any, error: type[Exception], message: str) -> None:
    model = Counting()
    with pytest.raises(error, match=message):
        model.running = value
    np.testing.assert_array_equal(model.running.data, [0, 0])


@pytest.mark.parametrize("value", [np.zeros(2), [0.0, 0.0], mg.Tensor(np.zeros(2)), 0.0, nn.Buffer(np.zeros(2), "b")])
def test_a_parameter_does_not_turn_into_a_constant(value: Any) -> None:
    model = Counting()
    with pytest.raises(TypeError, match=r"^'weight' is a parameter: assign another Parameter, or .* \.weight\.data = "):
        model.weight = value
    assert [p.name for p in model.parameters()] == ["weight"]


def test_a_parameter_may_be_tied_taken_away_or_made_anew() -> None:
    model, other = Counting(), Counting()
    model.weight = other.weight
    assert model.parameters() == other.parameters()
    model.weight = None
    assert model.parameters() == []
    del other.running
    other.running = nn.Buffer(np.ones(3), "another")
    assert {b.name for b in other.buffers()} == {"another", "count"}


# -- optimizers ---------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [optim.SGD, optim.AdamW])
@pytest.mark.parametrize("lr", [[mg.Parameter(np.ones(2), "w")], None, "0.1", mg.Parameter(np.ones(()), "w")])
def test_parameters_are_no_learning_rate(rule: Any, lr: Any) -> None:
    # SGD(model.parameters(), 0.1) was a rule with parameters as its learning rate and a momentum of 0.1.
    message = rf"^{rule.__name__} takes a learning rate, .* Optimizer\(parameters, {rule.__name__}\(lr=\.\.\.\)\)$"
    with pytest.raises(TypeError, match=message):
        rule(lr, 0.1)
    for number in (0.1, 1, np.float32(0.1), lambda step: 0.1):
        rule(number)


def test_a_learning_rate_is_no_rule() -> None:
    with pytest.raises(TypeError, match=r"^Optimizer takes a rule, such as SGD\(lr=0\.1\), got float$"):
        optim.Optimizer([mg.Parameter(np.ones(2), "w")], 0.1)  # type: ignore[arg-type]
