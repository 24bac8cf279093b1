"""Recording: what a node keeps, when a tape is freed, and what a Tensor refuses."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import minigrad as mg
from minigrad.autodiff.tape import collect
from minigrad.autodiff.vjps import kept_arrays
from minigrad.backend import Array


def leaf(*shape: int, dtype: Any = np.float64) -> mg.Tensor:
    return mg.Tensor(np.random.default_rng(0).standard_normal(shape).astype(dtype), requires_grad=True)


def parameter(*shape: int, name: str = "w") -> mg.Parameter:
    return mg.Parameter(np.random.default_rng(1).standard_normal(shape), name)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Run without the cycle collector: what is freed is freed by reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# -- what is recorded ---------------------------------------------------------------------


def test_nodes_know_their_parents_in_creation_order() -> None:
    w, x = parameter(3, 2), leaf(4, 3)
    y = mg.tanh(x @ w).sum()
    assert y.node is not None
    assert [node.name for node in collect(y.node)] == ["sum", "tanh", "matmul"]
    assert collect(y.node)[-1].parents == (x, w)


def test_nothing_is_recorded_where_nothing_needs_a_gradient() -> None:
    assert mg.mul(np.ones(2), mg.Tensor(np.ones(2))).node is None
    frozen = mg.Parameter(np.ones(2), requires_grad=False)
    assert not (frozen * 2).requires_grad


def test_no_grad_records_nothing_inside_and_all_after() -> None:
    x = leaf(2)
    with mg.no_grad():
        inside = x * 2
        with mg.no_grad():
            pass
        assert (x * 2).node is None
    assert inside.node is None
    assert not inside.requires_grad
    assert (x * 2).node is not None


def test_no_grad_ends_with_an_exception_and_decorates() -> None:
    x = leaf(2)

    @mg.no_grad()
    def evaluate() -> mg.Tensor:
        return x * 2

    with pytest.raises(ZeroDivisionError), mg.no_grad():
        1 / 0  # noqa: B018
    assert evaluate().node is None
    assert evaluate().node is None
    assert (x * 2).node is not None


def test_no_grad_is_of_one_thread() -> None:
    recorded = []
    with mg.no_grad():
        thread = threading.Thread(target=lambda: recorded.append((leaf(2) * 2).node is not None))
        thread.start()
        thread.join()
    assert recorded == [True]


def test_an_op_returns_one_vjp_for_each_argument() -> None:
    @mg.op
    def short(a: Array, b: Array) -> Any:
        return a + b, (lambda g: g,)

    with pytest.raises(TypeError, match="short: an op returns one vjp per array argument, got 1 for 2"):
        short(leaf(2), leaf(2))


def test_an_argument_without_a_derivative_cannot_require_grad() -> None:
    @mg.op
    def pick(x: Array, where: Array) -> Any:
        return x * where, (lambda g: g * where, None)

    assert pick(leaf(2), np.ones(2)).requires_grad
    with pytest.raises(TypeError, match="pick: argument 1 has no derivative but requires grad"):
        pick(leaf(2), leaf(2))


def test_a_joint_vjp_serves_the_arguments_that_need_it() -> None:
    calls = []

    @mg.op
    def product(a: Array, b: Array, c: Array) -> Any:
        def vjp(g: Array) -> tuple[Array, Array, Array]:
            calls.append("joint")
            return g * b * c, g * a * c, g * a * b

        return a * b * c, mg.Joint(vjp)

    a, b, c = leaf(3), mg.Tensor(np.full(3, 2.0)), leaf(3)
    mg.backward(product(a, b, c).sum())
    assert calls == ["joint"]
    np.testing.assert_array_equal(a.grad, 2 * c.data)
    np.testing.assert_array_equal(c.grad, 2 * a.data)
    mg.check_vjp(product, a.data, b.data, c.data)


def test_a_joint_vjp_is_walked_in_halves_too() -> None:
    @mg.op
    def product(x: Array, w: Array) -> Any:
        return x * w, mg.Joint(lambda g: (g * w, g * x))

    x, w = leaf(3), parameter(3)
    deferred = mg.backward_input(product(x, w).sum())
    assert x.grad is not None
    assert w.grad is None
    mg.backward_weight(deferred)
    np.testing.assert_array_equal(w.grad, x.data)


# -- what depends on parameters alone -----------------------------------------------------


def test_weight_side_is_known_of_every_tensor() -> None:
    w, frozen, x = parameter(2, 2), mg.Parameter(np.ones((2, 2)), requires_grad=False), leaf(2, 2)
    for weight in (w, frozen, w.T, frozen * 2, 2 - w, w.astype(np.float32), w @ frozen, w[0], w / np.pi):
        assert weight.weight_side is True
    for data in (x, x.T, x @ w, w + np.ones(2), np.float64(2) * x, mg.embedding(w, np.array([1])), x.detach()):
        assert data.weight_side is False
    with mg.no_grad():
        assert (w * 2).weight_side is True
        assert (w * x).weight_side is False
    assert mg.add(1, 2).weight_side is None


# -- what a node keeps --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "num_bytes"),
    [
        (lambda x, w: x + x, 0),
        (lambda x, w: x - 1, 0),
        (lambda x, w: -x, 0),
        (lambda x, w: x * 2, 0),
        (lambda x, w: mg.tanh(x), 800),
        (lambda x, w: mg.exp(x), 800),
        (lambda x, w: mg.log(x * x), 800 + 800),
        (lambda x, w: mg.relu(x), 100),
        (lambda x, w: mg.gelu(x), 800),
        (lambda x, w: x.mean(axis=0), 0),
        (lambda x, w: x.T, 0),
        (lambda x, w: x[2:4], 0),
        (lambda x, w: mg.concatenate(x, x), 0),
        (lambda x, w: x.astype(np.float32), 0),
        (lambda x, w: x * np.ones((10, 10)), 800),  # the other factor, not x
        (lambda x, w: x @ w.detach(), 800),
        (lambda x, w: x.detach() @ w, 800),
        (lambda x, w: mg.dropout(x, keep=np.ones((10, 10), bool), rate=0.5), 100),
        (lambda x, w: mg.embedding(w, np.arange(10)), 80),
        (lambda x, w: mg.cross_entropy(x, np.zeros(10, np.int64)), 800),
    ],
)
def test_a_node_keeps_what_its_vjps_need_and_no_more(call: Callable[..., mg.Tensor], num_bytes: int) -> None:
    assert mg.Tape.of(call(leaf(10, 10), parameter(10, 10))).kept_bytes == num_bytes


def test_attention_keeps_no_scores_and_a_feed_forward_one_wide_array() -> None:
    qkv = leaf(2, 129, 24)  # several blocks of queries
    more = mg.Tape.of(mg.causal_attention(qkv, num_heads=2)).kept_bytes - qkv.data.nbytes
    assert 0 <= more <= 2 * 2 * 160 * 2 * 8  # two numbers of each query, in whole blocks of 32
    x, w1, b1, w2, b2 = leaf(5, 3), parameter(3, 50), parameter(50), parameter(50, 2), parameter(2)
    kept = mg.Tape.of(mg.feed_forward(x, w1, b1, w2, b2)).kept_bytes
    weights = w1.data.nbytes + b1.data.nbytes + w2.data.nbytes  # b1 as well: another cotangent computes h again
    assert kept == x.data.nbytes + weights + 5 * 50 * 8


def test_a_frozen_weight_lets_go_of_the_layers_input(no_collector: None) -> None:
    hidden = mg.tanh(leaf(4, 3))
    kept = weakref.ref(hidden.data)
    weight, bias = mg.Parameter(np.ones((3, 2)), requires_grad=False), parameter(2)
    x = mg.exp(hidden)  # keeps its own output, which linear would keep too
    y = mg.linear(x, weight, bias)
    assert y.node is not None
    assert not any(np.shares_memory(array, x.data) for array in kept_arrays(y.node.vjps))
    del hidden, x, y
    assert kept() is None


def test_the_tape_lists_its_ops_for_a_person() -> None:
    w, x = parameter(3, 2), leaf(4, 3)
    tape = mg.Tape.of(mg.tanh(x @ w).sum())
    assert [(e.name, e.shape, e.kept_bytes) for e in tape.entries] == [
        ("matmul", (4, 2), w.data.nbytes + x.data.nbytes),
        ("tanh", (4, 2), 64),
        ("sum", (), 0),
    ]
    assert len(tape) == 3
    assert tape.kept_bytes == 48 + 96 + 64
    lines = [" ".join(line.split()) for line in str(tape).splitlines()]
    listed = [
        "op output kept bytes",
        "matmul float64[4, 2] 144",
        "tanh float64[4, 2] 64",
        "sum float64[] 0",
        "3 ops 208",
    ]
    assert lines == listed
    with mg.profile():
        timed = str(mg.Tape.of(mg.tanh(x @ w).sum())).splitlines()
    assert [" ".join(line.split()[:-1]) for line in timed[1:]] == listed[1:]
    assert timed[0].endswith("kept bytes  forward ms")


def test_a_residual_that_two_ops_keep_counts_once() -> None:
    x = mg.exp(leaf(10))
    assert mg.Tape.of(x * x).kept_bytes == 80


def test_the_tape_of_a_leaf_is_empty() -> None:
    assert len(mg.Tape.of(leaf(2))) == 0


# -- when it is freed ---------------------------------------------------------------------


def test_a_dropped_loss_frees_its_tape(no_collector: None) -> None:
    hidden = mg.tanh(leaf(4, 3) @ parameter(3, 3))
    loss = (hidden @ parameter(3, 2)).sum()
    residual = weakref.ref(hidden.data)
    del hidden
    assert residual() is not None
    del loss
    assert residual() is None


def test_backward_frees_residuals_while_the_loss_is_held(no_collector: None) -> None:
    hidden = mg.tanh(leaf(4, 3) @ parameter(3, 3))
    loss = (hidden @ parameter(3, 2)).sum()
    residual, node = weakref.ref(hidden.data), weakref.ref(hidden.node)
    del hidden
    mg.backward(loss)
    assert residual() is None
    assert node() is None


def test_backward_frees_residuals_one_by_one(no_collector: None) -> None:
    w, x = parameter(3, 3), leaf(4, 3)
    first = mg.tanh(x @ w)
    second = mg.tanh(first @ w)
    residuals = [weakref.ref(first.data), weakref.ref(second.data)]
    loss = second.sum()
    del first, second
    alive = []
    mg.backward_with_hooks(loss, between_ops=lambda: alive.append([r() is not None for r in residuals]))
    # after sum, tanh, matmul, tanh, matmul; what the walk has just used it lets go of in the next op
    assert alive == [[True, True], [True, True], [True, False], [True, False], [False, False]]


def test_200_rounds_do_not_grow(no_collector: None) -> None:
    # Every gradient call left cycles behind, which waited for the collector. autograd#103, pytorch#7343
    w = parameter(20_000)

    def round_trip() -> None:
        hidden = mg.tanh(w)
        residual = weakref.ref(hidden.data)
        loss = (hidden * hidden).mean()
        del hidden
        mg.backward(loss)
        assert residual() is None

    round_trip()
    tracemalloc.start()
    for _ in range(200):
        round_trip()
    grown, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < w.data.nbytes
    assert peak < 10 * w.data.nbytes


def test_a_value_used_100_times_costs_no_100_buffers() -> None:
    # Each use of a variable kept a buffer of its own. autograd#103
    x = leaf(100_000)
    mg.backward((x + x).sum())  # what is compiled at its first use is not counted
    x.grad = None
    tracemalloc.start()
    total = x
    for _ in range(100):
        total = total + x
    mg.backward(total.sum())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * x.data.nbytes
    assert x.grad is not None
    assert (x.grad == 101).all()


# -- changed in place ---------------------------------------------------------------------


def step_on(w: mg.Parameter) -> None:
    w.grad = np.ones(w.shape)
    mg.optim.Optimizer([w], mg.optim.SGD(lr=1.0)).step()


def assign_to(w: mg.Parameter) -> None:
    w.data = w.data + 1


def add_in_place(w: mg.Parameter) -> None:
    w.data += 1


def load_into(w: mg.Parameter) -> None:
    model = mg.nn.Module()
    model.w = w
    model.load_state_dict({"w": np.zeros(w.shape)})


changed_by = pytest.mark.parametrize("change", [step_on, assign_to, add_in_place, load_into])


@changed_by
@pytest.mark.parametrize("name", ["mul", "matmul", "linear"])
def test_a_value_that_backward_needs_must_not_change(change: Callable[[mg.Parameter], None], name: str) -> None:
    w, x = parameter(3, 3), leaf(3, 3)
    mg.optim.Optimizer([w], mg.optim.SGD(lr=1.0))  # the memory moves here, not between forward and backward
    y = mg.linear(x, w, np.zeros(3)) if name == "linear" else getattr(mg, name)(x, w)
    change(w)
    with pytest.raises(RuntimeError, match=f"{name} needs 'w'.* as it was in the forward, but it was changed in place"):
        mg.backward(y.sum())


@changed_by
def test_a_value_that_backward_does_not_need_may_change(change: Callable[[mg.Parameter], None]) -> None:
    w, x = parameter(3), leaf(3)
    y = (x + w).sum()
    change(w)
    w.grad = None
    mg.backward(y)
    np.testing.assert_array_equal(w.grad, np.ones(3))


def test_what_a_joint_vjp_keeps_must_not_change_either() -> None:
    @mg.op
    def product(a: Array, b: Array) -> Any:
        return a * b, mg.Joint(lambda g: (g * b, g * a))

    w, x = parameter(3), leaf(3)
    y = product(x, w).sum()
    assign_to(w)
    with pytest.raises(RuntimeError, match="product needs 'w' as it was"):
        mg.backward(y)


def test_a_changed_view_is_a_changed_value() -> None:
    w, x = parameter(4, 3), leaf(2, 3)
    y = (x @ w.T).sum()
    assign_to(w)
    with pytest.raises(RuntimeError, match="matmul needs 'w' as it was"):
        mg.backward(y)


def test_a_change_of_other_memory_is_none() -> None:
    w, other, x = parameter(3), parameter(3, name="other"), leaf(3)
    mg.optim.Optimizer([w, other], mg.optim.SGD(lr=1.0))
    y = (x * w).sum()
    assign_to(other)
    mg.backward(y)
    np.testing.assert_array_equal(x.grad, w.data)


def test_a_change_before_the_forward_is_none() -> None:
    w, x = parameter(3), leaf(3)
    assign_to(w)
    mg.backward((x * w).sum())


def test_moving_to_a_flat_between_forward_and_backward_changes_nothing() -> None:
    w, x = parameter(3), leaf(3)
    before = w.data.copy()
    y = (x * w).sum()
    step_on(w)  # the tape still holds the memory of before the move
    w.grad = None
    mg.backward(y)
    np.testing.assert_array_equal(x.grad, before)


def test_the_weight_half_needs_no_unchanged_weight() -> None:
    w, x = parameter(3, 2), leaf(4, 3)
    mg.optim.Optimizer([w], mg.optim.SGD(lr=1.0))
    deferred = mg.backward_input((x @ w).sum())
    assign_to(w)
    mg.backward_weight(deferred)
    np.testing.assert_array_equal(w.grad, x.data.T @ np.ones((4, 2)))


def test_the_weight_half_needs_unchanged_data() -> None:
    w, x = parameter(3, 2), leaf(4, 3)
    deferred = mg.backward_input((x @ w).sum())
    x.data = np.zeros((4, 3))
    with pytest.raises(RuntimeError, match="matmul needs tensor as it was in the forward"):
        mg.backward_weight(deferred)


# -- tensors ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_])
@pytest.mark.parametrize("make", [mg.Tensor, mg.Parameter])
def test_only_floating_point_requires_grad(make: Any, dtype: Any) -> None:
    with pytest.raises(TypeError, match=f"only floating point tensors can require grad, got dtype {np.dtype(dtype)}"):
        make(np.ones(2, dtype), requires_grad=True)
    assert make(np.ones(2, dtype), requires_grad=False).dtype == dtype


def test_a_tensor_of_a_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"the data must be an array; use tensor\.detach\(\)"):
        mg.Tensor(leaf(2))


@pytest.mark.parametrize("function", [np.exp, np.sum, np.asarray])
def test_numpy_functions_do_not_leave_the_tape_silently(function: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError):
        function(leaf(2))


def test_asarray_says_what_to_use() -> None:
    with pytest.raises(TypeError, match=r"^a Tensor is not an array, and NumPy would lose its gradient: use"):
        np.asarray(leaf(2))


def test_a_tensor_looks_like_its_array() -> None:
    t = mg.Tensor([[1.0, 2.0], [3.0, 4.0]])
    assert (t.shape, t.ndim, t.size, len(t), t.dtype) == ((2, 2), 2, 4, 2, np.float64)
    assert t[1, 0].item() == 3
    assert repr(mg.Tensor([1.0], requires_grad=True)) == "Tensor(array([1.]), requires_grad)"
    assert repr(mg.Tensor([1.0], requires_grad=True) * 2) == "Tensor(array([2.]), op=mul)"
    assert mg.Parameter(np.ones((2, 3))).label == "parameter of shape (2, 3)"


def test_detach_shares_values_and_no_tape() -> None:
    x = leaf(2)
    cut = (x * 2).detach()
    assert cut.node is None
    assert not cut.requires_grad
    assert np.shares_memory(x.detach().data, x.data)


def test_a_parameter_has_its_own_memory() -> None:
    array = np.asfortranarray(np.ones((2, 3)))
    w = mg.Parameter(array, "w")
    assert not np.shares_memory(w.data, array)
    assert w.data.flags.c_contiguous
