"""Walking a tape: gradients, hooks at the right moment, and the same bits in two halves as in one.

`watch` writes every vjp of a tape into a list as it runs, and hooks write into the same list: the order of hooks
among themselves would be right even if all of them fired at the very end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import minigrad as mg
from minigrad.backend import Array
from minigrad.tape import Node, Vjp, collect

Log = list[tuple[str, Any]]
Build = Callable[[], tuple[mg.Tensor, list[mg.Tensor]]]


def generator() -> np.random.Generator:
    return np.random.default_rng(5)


def leaf(*shape: int, seed: int = 0) -> mg.Tensor:
    return mg.Tensor(np.random.default_rng(seed).standard_normal(shape), requires_grad=True)


def parameter(name: str, *shape: int, dtype: Any = np.float64, requires_grad: bool = True) -> mg.Parameter:
    values = np.random.default_rng(len(name) + ord(name[-1])).standard_normal(shape)
    return mg.Parameter(values.astype(dtype), name, requires_grad=requires_grad)


def watch(output: mg.Tensor, log: Log) -> None:
    """Make every vjp on the tape of `output` write (op, whether its target depends on parameters alone)."""

    def logged(node: Node, weight_side: bool, vjp: Vjp) -> Vjp:
        def run(g: Array) -> Array:
            log.append((node.name, weight_side))
            return vjp(g)

        return run

    assert output.node is not None
    for node in collect(output.node):
        assert isinstance(node.vjps, tuple)
        assert node.parents is not None
        pairs = zip(node.parents, node.vjps, strict=True)
        node.vjps = tuple(logged(node, bool(parent.weight_side), vjp) for parent, vjp in pairs)


# -- hooks --------------------------------------------------------------------------------


def chain(num_layers: int, weight_first: bool) -> tuple[mg.Tensor, list[mg.Parameter]]:
    """A net of tanh(x @ W), or of tanh(W @ x); layer i's product is an op of its own name."""
    weights = [parameter(f"w{i}", 3, 3) for i in range(num_layers)]
    x = leaf(3, 3)
    for i, w in enumerate(weights):

        def product(a: Array, b: Array) -> Any:
            return a @ b, (lambda g: g @ b.T, lambda g: a.T @ g)

        product.__name__ = f"layer{i}"
        x = mg.tanh(mg.op(product)(w, x) if weight_first else mg.op(product)(x, w))
    return x.sum(), weights


@pytest.mark.parametrize("weight_first", [False, True])
def test_a_layers_hook_fires_before_the_earlier_layers_run(weight_first: bool) -> None:
    loss, _ = chain(3, weight_first)
    log: Log = []
    watch(loss, log)
    mg.backward_with_hooks(loss, on_grad_ready=lambda p: log.append(("ready", p.name)))
    into_weight, into_data = ("weight", True), ("data", False)

    def layer(i: int) -> Log:
        ready = ("ready", f"w{i}")
        if weight_first:  # ready as soon as its own vjp is done, before the op's other one
            return [("tanh", False), (f"layer{i}", into_weight[1]), ready, (f"layer{i}", into_data[1])]
        return [("tanh", False), (f"layer{i}", into_data[1]), (f"layer{i}", into_weight[1]), ready]

    assert log == [("sum", False), *layer(2), *layer(1), *layer(0)]


@pytest.mark.parametrize("weight_first", [False, True])
def test_a_gradient_is_final_when_its_hook_fires(weight_first: bool) -> None:
    at_hook: dict[str, Array] = {}

    def keep(p: mg.Parameter) -> None:
        assert p.grad is not None
        at_hook[p.name] = p.grad.copy()

    loss, weights = chain(3, weight_first)
    mg.backward_with_hooks(loss, on_grad_ready=keep)
    assert list(at_hook) == ["w2", "w1", "w0"]
    for w in weights:
        np.testing.assert_array_equal(at_hook[w.name], w.grad)


def test_a_parameter_used_three_times_is_ready_once_after_its_last_use() -> None:
    w, x = parameter("w", 3, 3), leaf(2, 3)
    loss = (((x @ w) @ w) @ w).sum()
    log: Log = []
    watch(loss, log)
    mg.backward_with_hooks(loss, on_grad_ready=lambda p: log.append(("ready", p.name)))
    assert [entry for entry in log if entry[0] == "ready"] == [("ready", "w")]
    assert log[-1] == ("ready", "w")
    assert log.count(("matmul", True)) == 3


def test_a_parameter_used_twice_by_one_op_is_ready_once() -> None:
    w = parameter("w", 3)
    ready: list[Array | None] = []
    mg.backward_with_hooks((w * w).sum(), on_grad_ready=lambda p: ready.append(p.grad))
    assert len(ready) == 1
    np.testing.assert_array_equal(ready[0], 2 * w.data)


def test_on_start_gets_the_reached_parameters_before_the_first_vjp() -> None:
    w, frozen, unused = parameter("w", 3, 3), parameter("f", 3, requires_grad=False), parameter("u", 3)
    bias, x = parameter("b", 3), leaf(2, 3)
    loss = ((x @ w) * frozen + bias + w[0]).sum()
    assert set(mg.reached_parameters(loss)) == {w, bias}
    log: Log = []
    watch(loss, log)
    mg.backward_with_hooks(loss, on_start=lambda params: log.append(("start", params)))
    assert log[0][0] == "start"
    assert sorted(p.name for p in log[0][1]) == ["b", "w"]
    assert [name for name, _ in log].count("start") == 1
    assert unused.grad is None
    assert frozen.grad is None


def test_between_ops_fires_after_every_op() -> None:
    loss, _ = chain(2, weight_first=False)
    log: Log = []
    watch(loss, log)
    mg.backward_with_hooks(loss, between_ops=lambda: log.append(("between", None)))
    names = [name for name, _ in log]
    assert names == ["sum", "between"] + [
        name for i in (1, 0) for name in ("tanh", "between", f"layer{i}", f"layer{i}", "between")
    ]


def test_hooks_fire_for_parameters_only() -> None:
    x, w = leaf(2, 3), parameter("w", 3, 3)
    ready: list[str] = []
    mg.backward_with_hooks((x @ w).sum(), on_grad_ready=lambda p: ready.append(p.name))
    assert ready == ["w"]
    assert x.grad is not None


def test_hooks_add_in_order() -> None:
    calls: list[str] = []

    def named(name: str) -> mg.Hooks:
        return mg.Hooks(
            on_start=lambda params: calls.append(f"{name} start {len(params)}"),
            on_grad_ready=lambda p: calls.append(f"{name} ready {p.name}"),
            between_ops=lambda: calls.append(f"{name} between"),
        )

    w = parameter("w", 3)
    mg.backward_with_hooks(
        w.sum(), named("a") + mg.Hooks() + named("b"), on_grad_ready=lambda p: calls.append(f"keyword {p.name}")
    )
    assert calls == ["a start 1", "b start 1", "a ready w", "b ready w", "keyword w", "a between", "b between"]
    assert mg.Hooks() + mg.Hooks() == mg.Hooks()


@pytest.mark.parametrize("name", ["on_start", "on_grad_ready", "between_ops"])
def test_an_exception_in_a_hook_reaches_the_caller(name: str) -> None:
    def fail(*args: Any) -> None:
        raise ConnectionError("the other rank is gone")

    with pytest.raises(ConnectionError, match="the other rank is gone"):
        mg.backward_with_hooks(parameter("w", 3).sum(), **{name: fail})


def test_hooks_of_a_second_backward_see_the_sum() -> None:
    w = parameter("w", 3)
    seen: list[float] = []

    def keep(p: mg.Parameter) -> None:
        assert p.grad is not None
        seen.append(float(p.grad[0]))

    for _ in range(2):
        mg.backward_with_hooks((3 * w).sum(), on_grad_ready=keep)
    assert seen == [3, 6]


# -- gradients ----------------------------------------------------------------------------


def test_a_leaf_is_an_output_too() -> None:
    w, x = parameter("w", 2), leaf(2)
    ready: list[str] = []
    for t in (w, x):
        mg.backward_with_grad(t, np.array([1.0, 2.0]), hooks=mg.Hooks(on_grad_ready=lambda p: ready.append(p.name)))
        np.testing.assert_array_equal(t.grad, [1, 2])
    assert ready == ["w"]


def test_the_callers_grad_is_not_changed_nor_kept() -> None:
    x = leaf(3)
    grad = np.array([1.0, 2.0, 3.0])
    grad.flags.writeable = False
    mg.backward_with_grad((x + x) + x, grad)
    np.testing.assert_array_equal(x.grad, 3 * grad)
    assert not np.shares_memory(x.grad, grad)


def test_leaves_that_got_the_same_array_do_not_share_it() -> None:
    a, b = leaf(3), leaf(3)
    mg.backward((a + b).sum())
    assert a.grad is not None
    a.grad += 1
    np.testing.assert_array_equal(b.grad, np.ones(3))


def test_a_micro_batch_touches_nothing_of_anothers_tape() -> None:
    w = parameter("w", 3, 2)
    batches = [leaf(4, 3, seed=i) for i in range(2)]
    losses = [mg.tanh(x @ w).sum() for x in batches]
    before = str(mg.Tape.of(losses[0]))
    mg.backward(losses[1])
    assert str(mg.Tape.of(losses[0])) == before
    assert batches[0].grad is None
    assert w.grad is not None
    w.grad = None
    mg.backward(losses[0])
    alone = w.grad.copy()
    w.grad = None
    mg.backward(mg.tanh(batches[0] @ w).sum())
    np.testing.assert_array_equal(w.grad, alone)


def test_diamonds_are_exact() -> None:
    x = mg.Tensor(np.array(1.0), requires_grad=True)
    a = x
    for _ in range(60):
        a = a + a
    mg.backward(a)
    assert x.grad == 2**60


def test_a_loss_that_reaches_nothing_is_refused() -> None:
    assert mg.reached_parameters(mg.Tensor(1.0)) == []
    with pytest.raises(ValueError, match="backward: the output depends on no tensor that requires grad"):
        mg.backward(mg.Tensor(1.0) * 2)


def test_a_backward_without_a_grad_needs_a_scalar() -> None:
    with pytest.raises(ValueError, match=r"backward without a grad needs a scalar output, got shape \(2, 3\)"):
        mg.backward(leaf(2, 3) * 2)


@pytest.mark.parametrize("grad", [np.ones(2), np.ones((3, 1)), np.ones(3, np.float32), 1.0])
def test_a_grad_must_fit_the_output(grad: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"the grad of an output must have its shape and dtype, got \(.*\) float\d\d for \(3,\) float64",
    ):
        mg.backward_with_grad(leaf(3) * 2, grad)


def test_a_vjp_of_the_wrong_shape_is_caught_at_its_leaf() -> None:
    @mg.op
    def wrong(x: Array) -> Any:
        return 2 * x, (lambda g: g.sum(),)

    with pytest.raises(ValueError, match=r"wrong: a vjp gave shape \(\) to 'w' of shape \(3,\)"):
        mg.backward(wrong(parameter("w", 3)).sum())


@pytest.mark.parametrize("second", [mg.backward, mg.backward_input, mg.reached_parameters])
def test_a_walked_tape_is_refused(second: Callable[[mg.Tensor], Any]) -> None:
    x = leaf(3)
    hidden = x * x
    mg.backward(hidden.sum())
    before = x.grad.copy() if x.grad is not None else None
    with pytest.raises(RuntimeError, match="this tape was already walked and its residuals are freed"):
        second(hidden.sum())
    np.testing.assert_array_equal(x.grad, before)


# -- two halves ---------------------------------------------------------------------------


def plain_net() -> tuple[mg.Tensor, list[mg.Tensor]]:
    x, w0, w1, b = leaf(4, 3), parameter("w0", 3, 5), parameter("w1", 5, 2), parameter("b", 2)
    return (mg.tanh(x @ w0) @ w1 + b).mean(), [x, w0, w1, b]


def tied_net() -> tuple[mg.Tensor, list[mg.Tensor]]:
    table, w, x = parameter("table", 7, 3), parameter("w", 3, 3), leaf(5, 3)
    hidden = mg.tanh((mg.embedding(table, np.array([1, 2, 1, 0, 6])) + x) @ w)
    return mg.cross_entropy(hidden @ table.T, np.array([2, 1, 0, 6, 5])), [x, table, w]


def cast_net() -> tuple[mg.Tensor, list[mg.Tensor]]:
    x, w, v = leaf(4, 3), parameter("w", 3, 3, dtype=np.float32), parameter("v", 3, 3, dtype=np.float32)
    cast = w.astype(np.float64)
    return (mg.tanh(x @ cast) @ cast.T @ mg.exp(v).astype(np.float64)).sum(), [x, w, v]


def decayed_net() -> tuple[mg.Tensor, list[mg.Tensor]]:
    """The loss has a branch of parameters alone."""
    x, w, b = leaf(4, 3), parameter("w", 3, 3), parameter("b", 3)
    penalty = (w * w).sum() + (mg.tanh(w) @ b).sum()
    return (mg.tanh(x @ w) + b).sum() + 0.1 * penalty, [x, w, b]


def pass_through() -> tuple[mg.Tensor, list[mg.Tensor]]:
    """The cotangent of `add` goes to x and, deferred, to x @ w: adding to x's in place would change both."""
    source, w, v = leaf(3, 3), parameter("w", 3, 3), parameter("v", 3, 3)
    x = mg.tanh(source)
    return (mg.add(x @ w, x) * (mg.add(x @ v, x) @ w)).sum(), [source, w, v]


def shared_cotangent() -> tuple[mg.Tensor, list[mg.Tensor]]:
    """Both tanh nodes get the same array; the second use of tanh(c) adds to it."""
    b, c = leaf(3, seed=1), leaf(3, seed=2)
    p = mg.tanh(c)
    return mg.add(mg.add(mg.tanh(b), p), mg.mul(p, p)).sum(), [b, c]


def shared_cotangent_of_weights() -> tuple[mg.Tensor, list[mg.Tensor]]:
    b, c = parameter("b", 3), parameter("c", 3)
    p = mg.tanh(c)
    return mg.add(mg.add(mg.tanh(b), p), mg.mul(p, p)).sum(), [b, c]


def lora() -> tuple[mg.Tensor, list[mg.Tensor]]:
    x, frozen = leaf(4, 3), parameter("f", 3, 3, dtype=np.float32, requires_grad=False)
    a, b = parameter("a", 3, 1), parameter("b", 1, 3)
    return mg.tanh(x @ (frozen.astype(np.float64) + a @ b)).sum(), [x, a, b]


def residual_blocks() -> tuple[mg.Tensor, list[mg.Tensor]]:
    x, params = leaf(2, 5, 4), [parameter(f"w{i}", 4, 12) for i in range(2)]
    outs, gain, bias = [parameter(f"out{i}", 4, 4) for i in range(2)], parameter("gain", 4), parameter("bias", 4)
    y = x
    for w, out in zip(params, outs, strict=True):
        y = y + mg.causal_attention(mg.layer_norm(y, gain, bias) @ w, num_heads=2) @ out
    return (y * y).mean(), [x, *params, *outs, gain, bias]


NETS = [
    plain_net,
    tied_net,
    cast_net,
    decayed_net,
    pass_through,
    shared_cotangent,
    shared_cotangent_of_weights,
    lora,
    residual_blocks,
]
each_net = pytest.mark.parametrize("build", NETS)


def whole(loss: mg.Tensor) -> None:
    mg.backward(loss)


def with_no_hooks(loss: mg.Tensor) -> None:
    mg.backward_with_hooks(loss)


def in_halves(loss: mg.Tensor) -> None:
    mg.backward_weight(mg.backward_input(loss))


def grads_after(build: Build, walk: Callable[[mg.Tensor], None]) -> list[Array]:
    loss, leaves = build()
    walk(loss)
    grads = [t.grad for t in leaves if t.grad is not None]
    assert len(grads) == len(leaves)
    return grads


@each_net
@pytest.mark.parametrize("walk", [with_no_hooks, in_halves])
def test_every_way_to_walk_gives_the_same_bits(build: Build, walk: Callable[[mg.Tensor], None]) -> None:
    for got, expected in zip(grads_after(build, walk), grads_after(build, whole), strict=True):
        np.testing.assert_array_equal(got, expected)
        assert got.dtype == expected.dtype


@each_net
def test_gradients_are_those_of_finite_differences(build: Build) -> None:
    loss, leaves = build()
    mg.backward(loss)
    for i, t in enumerate(leaves):
        direction = generator().standard_normal(t.shape)
        single = t.dtype == np.float32
        step = 1e-2 if single else 1e-6
        values = []
        for sign in (1, -1):
            moved_loss = build_moved(build, i, (sign * step * direction).astype(t.dtype))
            values.append(moved_loss)
        numeric = (values[0] - values[1]) / (2 * step)
        assert t.grad is not None
        assert float(np.vdot(t.grad, direction)) == pytest.approx(numeric, rel=1e-3 if single else 1e-6, abs=1e-7)


def build_moved(build: Build, i: int, by: Array) -> float:
    """Return the loss with leaf `i` moved: build once for the leaves, and again from their changed values."""
    originals: list[Array] = []

    class Moved(mg.Tensor):
        pass

    del Moved, originals
    raise NotImplementedError


def test_the_input_half_gives_data_its_gradients_and_parameters_none() -> None:
    loss, (x, *params) = plain_net()
    deferred = mg.backward_input(loss)
    assert x.grad is not None
    assert all(p.grad is None for p in params)
    mg.backward_weight(deferred)
    assert all(p.grad is not None for p in params)
