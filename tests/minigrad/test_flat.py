"""FlatBuffer owns parameter memory: who asks first, over which subset, must not matter to anybody else."""

from __future__ import annotations

import copy
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest

import minigrad as mg
from minigrad.flat import check_names, zero_grad


def make(*shapes: tuple[int, ...], dtype: Any = np.float64) -> list[mg.Parameter]:
    """Parameters p0, p1, ... whose values are all different."""
    values = np.arange(1.0, 1000.0)
    params = []
    for i, shape in enumerate(shapes):
        size = int(np.prod(shape))
        params.append(mg.Parameter(values[:size].reshape(shape).astype(dtype), f"p{i}"))
        values = values[size:]
    return params


def names(part: mg.FlatRange) -> list[str]:
    return [p.name for p in part.params]


SHAPES = [(2, 3), (3,), (), (0, 4), (3, 1)]


# -- where the memory is ------------------------------------------------------------------


def test_parameters_lie_side_by_side_in_reverse_order() -> None:
    params = make(*SHAPES)
    before = [p.data.copy() for p in params]
    (part,) = mg.FlatBuffer.adopt(params)
    assert names(part) == ["p4", "p3", "p2", "p1", "p0"]
    assert (part.start, part.stop) == (0, 13)
    np.testing.assert_array_equal(part.data, np.concatenate([a.ravel() for a in reversed(before)]))
    for p, values in zip(params, before, strict=True):
        np.testing.assert_array_equal(p.data, values)
        assert p.shape == values.shape
        assert p.size == 0 or np.shares_memory(p.data, part.flat.data)


def test_gradients_that_exist_move_along() -> None:
    first, second = make((2,), (2,))
    first.grad = np.array([5.0, 6.0])
    (part,) = mg.FlatBuffer.adopt([first, second])
    np.testing.assert_array_equal(first.grad, [5, 6])
    assert second.grad is None
    np.testing.assert_array_equal(part.grad, [0, 0, 5, 6])
    assert np.shares_memory(first.grad, part.flat.grad)


def test_one_flat_for_each_dtype() -> None:
    params = [*make((2,), (3,)), *(mg.Parameter(np.ones(2, np.float32), f"half{i}") for i in range(2))]
    mixed = [params[0], params[2], params[1], params[3]]
    ranges = mg.FlatBuffer.adopt(mixed)
    assert [names(part) for part in ranges] == [["half1", "half0"], ["p1", "p0"]]
    assert [part.data.dtype for part in ranges] == [np.float32, np.float64]


def test_asking_again_moves_nothing() -> None:
    params = make(*SHAPES)
    (part,) = mg.FlatBuffer.adopt(params)
    data, grad = part.flat.data, part.flat.grad
    assert mg.FlatBuffer.ranges_of(params) == [part]
    assert mg.FlatBuffer.ranges_of(reversed(params)) == [part]
    assert part.flat.data is data
    assert part.flat.grad is grad


def test_the_question_where_parameters_lie_moves_nothing() -> None:
    params = make((2,), (3,))
    data = [p.data for p in params]
    with pytest.raises(ValueError, match=r"^'p1' lies in no FlatBuffer; call FlatBuffer\.adopt first$"):
        mg.FlatBuffer.ranges_of(params)
    assert all(p.flat is None and p.data is before for p, before in zip(params, data, strict=True))


def test_a_norm_and_clipping_move_nothing() -> None:
    owned, alone = make((2,), (3,)), make((2, 2), ())
    for i, p in enumerate(alone):
        p.name = f"alone{i}"
    (part,) = mg.FlatBuffer.adopt(owned)
    params = [owned[0], alone[0], owned[1], alone[1], owned[0]]
    for p in {*params} - {alone[1]}:
        p.grad = np.full(p.shape, 2.0)
    grads = [p.grad for p in alone]
    assert mg.optim.clip_by_global_norm((p for p in params), 3.0) == 6  # of nine twos
    assert [p.flat for p in alone] == [None, None]
    assert [p.grad is grad for p, grad in zip(alone, grads, strict=True)] == [True, True]
    for grad in (part.grad, alone[0].grad):
        np.testing.assert_array_equal(grad, 1)
    assert alone[1].grad is None


def test_ranges_are_maximal_contiguous_and_hold_exactly_these() -> None:
    params = make(*[(2,)] * 6)
    mg.FlatBuffer.adopt(params)
    p0, p1, _, p3, p4, p5 = params
    assert [names(part) for part in mg.FlatBuffer.ranges_of([p0, p1, p3, p4, p5])] == [["p5", "p4", "p3"], ["p1", "p0"]]
    assert [names(part) for part in mg.FlatBuffer.ranges_of([p5, p0])] == [
        ["p0"],
        ["p5"],
    ]  # the last one given comes first
    for part in mg.FlatBuffer.ranges_of([p0, p1, p3]):
        np.testing.assert_array_equal(part.data, np.concatenate([p.data for p in part.params]))


def test_a_subset_first_and_the_whole_later() -> None:
    p0, p1, p2, p3 = make(*[(2,)] * 4)
    (subset,) = mg.FlatBuffer.adopt([p1, p2])
    ranges = mg.FlatBuffer.adopt([p0, p1, p2, p3])
    assert [names(part) for part in ranges] == [["p3", "p0"], ["p2", "p1"]]
    assert ranges[1] == subset


def test_a_parameter_given_twice_counts_once() -> None:
    p0, p1 = make((2,), (2,))
    (part,) = mg.FlatBuffer.adopt([p0, p1, p0])
    assert sorted(names(part)) == ["p0", "p1"]
    assert part.data.size == 4


def test_no_parameters_no_ranges() -> None:
    assert mg.FlatBuffer.adopt([]) == mg.FlatBuffer.ranges_of([]) == []


def test_two_parameters_of_one_name_are_refused() -> None:
    message = r"parameter names must be unique, got 'w' twice: shapes \(2,\) and \(3,\)"
    with pytest.raises(ValueError, match=message):
        check_names([mg.Parameter(np.ones(2), "w"), mg.Parameter(np.ones(3), "w")])
    with pytest.raises(ValueError, match="parameter names must be unique"):
        mg.FlatBuffer.adopt([mg.Parameter(np.ones(2), "w"), mg.Parameter(np.ones(3), "w")])
    mg.FlatBuffer.adopt([mg.Parameter(np.ones(2)), mg.Parameter(np.ones(3))])  # nameless ones may


# -- who asks first -----------------------------------------------------------------------


def train(params: list[mg.Parameter], optimizer: mg.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        mg.backward(mg.add(*[(p * p * (step + 1)).sum() for p in params]))
        optimizer.step()


@pytest.mark.parametrize("first", ["nobody", "whole", "subset", "other_order"])
@pytest.mark.parametrize("later", ["nobody", "whole", "subset"])
def test_an_optimizer_does_not_care_who_else_owns_ranges(first: str, later: str) -> None:
    def claim(who: str, params: list[mg.Parameter]) -> None:
        parts = {"nobody": [], "whole": params, "subset": params[1:], "other_order": params[::-1]}[who]
        for part in mg.FlatBuffer.adopt(parts):
            part.grad[...] += 0

    rule = mg.optim.AdamW(lr=0.1)
    undisturbed = make((2, 3), (3,))
    train(undisturbed, mg.optim.Optimizer(undisturbed, rule), range(4))

    params = make((2, 3), (3,))
    claim(first, params)
    optimizer = mg.optim.Optimizer(params, rule)
    train(params, optimizer, range(2))
    claim(later, params)
    train(params, optimizer, range(2, 4))
    for p, expected in zip(params, undisturbed, strict=True):
        np.testing.assert_array_equal(p.data, expected.data)


def test_loading_after_both_is_seen_by_the_next_step() -> None:
    (w,) = make((2, 2))
    optimizer = mg.optim.Optimizer([w], mg.optim.SGD(lr=1.0))
    (part,) = mg.FlatBuffer.adopt([w])
    w.data = np.full((2, 2), 10.0)
    w.grad = np.ones((2, 2))
    np.testing.assert_array_equal(part.data, np.full(4, 10.0))
    optimizer.step()
    np.testing.assert_array_equal(w.data, np.full((2, 2), 9.0))


# -- assigning copies in ------------------------------------------------------------------


def test_assigning_data_and_grad_copies_in() -> None:
    (w,) = make((2, 2))
    (part,) = mg.FlatBuffer.adopt([w])
    data, grad = np.ones((2, 2), np.float32), np.full((2, 2), 2.0)
    w.data, w.grad = data, grad
    data += 5
    grad += 5
    np.testing.assert_array_equal(part.data, np.ones(4))
    np.testing.assert_array_equal(part.grad, np.full(4, 2.0))
    assert w.data.dtype == np.float64
    assert w.grad is not None
    w.grad *= 2
    w.data -= 1
    np.testing.assert_array_equal(part.grad, np.full(4, 4.0))
    np.testing.assert_array_equal(part.data, np.zeros(4))


@pytest.mark.parametrize("attribute", ["data", "grad"])
@pytest.mark.parametrize("value", [np.ones(2), 1.0])
def test_assigning_another_shape_is_refused(attribute: str, value: Any) -> None:
    (w,) = make((2, 2))
    message = rf"'p0'\.{attribute} has shape \(2, 2\), got \({'2,' if np.ndim(value) else ''}\)"
    with pytest.raises(ValueError, match=message):
        setattr(w, attribute, value)


@pytest.mark.parametrize("owned", [False, True])
def test_the_first_contribution_overwrites_and_later_ones_add(owned: bool) -> None:
    (w,) = make((2,))
    if owned:
        mg.FlatBuffer.adopt([w])
    for expected in (3.0, 6.0):
        mg.backward((3 * w).sum())
        np.testing.assert_array_equal(w.grad, [expected] * 2)
    w.grad = None
    assert w.grad is None
    mg.backward((3 * w).sum())
    np.testing.assert_array_equal(w.grad, [3, 3])


def test_a_gradient_that_no_backward_reached_reads_as_zeros_in_a_range() -> None:
    params = make((2,), (2,), (2,))
    (part,) = mg.FlatBuffer.adopt(params)
    for _ in range(2):  # the second time stale values lie there
        mg.backward(params[1].sum())
        np.testing.assert_array_equal(part.grad, [0, 0, 1, 1, 0, 0])
        part.flat.grad[...] = 7
        zero_grad(params)


def test_zero_grad_touches_no_memory() -> None:
    (w,) = make((2,))
    (part,) = mg.FlatBuffer.adopt([w])
    w.grad = np.array([1.0, 2.0])
    grad = part.flat.grad
    tracemalloc.start()
    zero_grad([w])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(grad, [1, 2])
    assert part.flat.grad is grad
    assert peak < 1000


# -- held by somebody ---------------------------------------------------------------------

IN_USE = mg.Hold("its grad is being counted; call done() first")
FINAL = mg.Hold("its grad was counted; call zero_grad() first", final=True)


def test_held_gradients_are_not_to_be_stepped_on_or_zeroed() -> None:
    (w,) = make((2,))
    optimizer = mg.optim.Optimizer([w], mg.optim.SGD(lr=1.0))
    w.hold = IN_USE
    before = w.data.copy()
    for what, call in {
        "optimizer.step() with": optimizer.step,
        "zero_grad() of": optimizer.zero_grad,
        "a new grad for": lambda: setattr(w, "grad", np.ones(2)),
        "the norm of": lambda: mg.optim.clip_by_global_norm([w], 1.0),
        "backward into": lambda: mg.backward(w.sum()),
    }.items():
        with pytest.raises(
            RuntimeError, match=rf"^{re.escape(what)} 'p0': its grad is being counted; call done\(\) first$"
        ):
            call()
    np.testing.assert_array_equal(w.data, before)
    assert optimizer.num_steps == 0


def test_a_backward_into_final_gradients_is_refused_until_zero_grad() -> None:
    (w,) = make((2,))
    optimizer = mg.optim.Optimizer([w], mg.optim.SGD(lr=1.0))
    mg.backward(w.sum())
    w.hold = FINAL
    with pytest.raises(RuntimeError, match=r"^backward into 'p0': its grad was counted; call zero_grad\(\) first$"):
        mg.backward(w.sum())
    optimizer.step()
    optimizer.zero_grad()
    assert w.hold is None
    mg.backward(w.sum())
    np.testing.assert_array_equal(w.grad, [1, 1])


def test_a_holder_can_let_go_and_leave_the_gradient_as_it_is() -> None:
    (w,) = make((2,))
    mg.backward(w.sum())
    w.hold = IN_USE
    w.hold = None
    mg.backward(w.sum())
    np.testing.assert_array_equal(w.grad, [2, 2])


def test_a_backward_that_accumulates_is_fine_while_nobody_holds_gradients() -> None:
    (w,) = make((2,))
    mg.FlatBuffer.adopt([w])
    mg.backward(w.sum())
    mg.backward(w.sum())
    np.testing.assert_array_equal(w.grad, [2, 2])


# -- gradients in somebody else's memory ----------------------------------------------------


def test_gradients_move_into_other_memory_with_their_values_and_freshness() -> None:
    params = make(*SHAPES)
    (part,) = mg.FlatBuffer.adopt(params)
    params[0].grad = np.full((2, 3), 7.0)
    storage = np.full(13, np.nan)
    part.flat.move_grad(storage)
    assert part.flat.grad is storage
    np.testing.assert_array_equal(params[0].grad, np.full((2, 3), 7))
    assert [p.grad is None for p in params] == [False, True, True, True, True]
    for p in params:
        p.grad_view()[...] = p.start
        assert p.size == 0 or np.shares_memory(p.grad, storage)
    np.testing.assert_array_equal(
        storage, np.repeat([float(p.start) for p in part.params], [p.size for p in part.params])
    )
    params[1].grad = None
    params[1].accumulate_grad(np.ones(3))
    np.testing.assert_array_equal(storage[params[1].start : params[1].stop], 1)


def test_a_gradient_of_several_contributions_is_a_wide_sum_until_it_is_rounded() -> None:
    (w,) = [mg.Parameter(np.zeros(2, np.float32), "w")]
    (part,) = mg.FlatBuffer.adopt([w])
    part.flat.widen_grad(np.float64)
    for _ in range(2):
        w.accumulate_grad(np.full(2, 2**24, np.float32))
        assert not w.is_sum  # one contribution is what it is
        assert w.grad is not None
        assert w.grad.dtype == np.float32
        for _ in range(3):
            w.accumulate_grad(np.ones(2, np.float32))
        assert w.is_sum
        np.testing.assert_array_equal(w.grad, [2**24 + 3] * 2)
        clone = copy.deepcopy(w)
        np.testing.assert_array_equal(clone.grad, np.full(2, 2**24 + 4, np.float32))  # to even
        np.testing.assert_array_equal(part.grad, np.full(2, 2**24 + 4, np.float32))
        assert not w.is_sum
        w.grad = None
        assert w.sum_view().dtype == np.float64
        assert not w.sum_view().any()
        part.flat.move_sums(np.full(2, np.nan))
        w.grad = None
    with pytest.raises(ValueError, match=r"move_sums needs contiguous memory of float64\[2\], got float32"):
        part.flat.move_sums(np.zeros(2, np.float32))


def test_only_gradients_that_are_widened_have_sums_to_move() -> None:
    (part,) = mg.FlatBuffer.adopt(make(*SHAPES))
    with pytest.raises(ValueError, match="move_sums is for gradients that widen_grad has widened"):
        part.flat.move_sums(np.zeros(13))


@pytest.mark.parametrize("storage", [np.zeros(12), np.zeros(13, np.float32), np.zeros(26)[::2], np.zeros((13, 1))])
def test_memory_for_gradients_must_fit(storage: np.ndarray[Any, Any]) -> None:
    (part,) = mg.FlatBuffer.adopt(make(*SHAPES))
    with pytest.raises(ValueError, match=r"move_grad needs contiguous memory of float64\[13\], got float"):
        part.flat.move_grad(storage)
    with pytest.raises(ValueError, match=r"move_data needs contiguous memory of float64\[13\], got float"):
        part.flat.move_data(storage)


def test_values_move_into_other_memory() -> None:
    params = make(*SHAPES)
    (part,) = mg.FlatBuffer.adopt(params)
    before = [p.data.copy() for p in params]
    storage = np.full(13, np.nan)
    part.flat.move_data(storage)
    assert part.flat.data is storage
    for p, values in zip(params, before, strict=True):
        np.testing.assert_array_equal(p.data, values)
        assert p.size == 0 or np.shares_memory(p.data, storage)


def test_held_gradients_do_not_move() -> None:
    params = make(*SHAPES)
    (part,) = mg.FlatBuffer.adopt(params)
    params[1].hold = IN_USE
    with pytest.raises(RuntimeError, match=r"^move_grad of 'p1': its grad is being counted; call done\(\) first$"):
        part.flat.move_grad(np.zeros(13))
