"""Walking a tape: gradients, hooks at the right moment, and the same bits in two halves as in one.

`watch` writes every vjp of a tape into a list as it runs, and hooks write into the same list: the order of hooks
among themselves would be right even if all of them fired at the very end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import minigrad as mg
from minigrad.autodiff.tape import Node, collect
from minigrad.autodiff.vjps import Vjp
from minigrad.backend import Array

Log = list[tuple[str, Any]]


def leaf(*shape: int, seed: int = 0) -> mg.Tensor:
    return mg.Tensor(np.random.default_rng(seed).standard_normal(shape), requires_grad=True)


def parameter(name: str, *shape: int, requires_grad: bool = True) -> mg.Parameter:
    values = np.random.default_rng(list(name.encode())).standard_normal(shape)
    return mg.Parameter(values, name, requires_grad=requires_grad)


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

    def layer(i: int) -> Log:
        ready = ("ready", f"w{i}")
        if weight_first:  # ready as soon as its own vjp is done, before the op's other one
            return [("tanh", False), (f"layer{i}", True), ready, (f"layer{i}", False)]
        return [("tanh", False), (f"layer{i}", False), (f"layer{i}", True), ready]

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
    # A freed graph gave zeros instead. pytorch#39141
    x = leaf(3)
    hidden = x * x
    mg.backward(hidden.sum())
    before = x.grad.copy() if x.grad is not None else None
    with pytest.raises(RuntimeError, match="this tape was already walked and its residuals are freed"):
        second(hidden.sum())
    np.testing.assert_array_equal(x.grad, before)


# -- two halves ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Net:
    """A loss as a function of its leaves: those called x... are data, those called frozen... need no gradient."""

    loss: Callable[..., mg.Tensor]
    shapes: dict[str, tuple[int, ...]]

    def leaves(self) -> list[mg.Tensor]:
        return [
            leaf(*shape, seed=len(name))
            if name.startswith("x")
            else parameter(name, *shape, requires_grad=not name.startswith("frozen"))
            for name, shape in self.shapes.items()
        ]


NETS: list[Net] = []


def net(**shapes: tuple[int, ...]) -> Callable[[Callable[..., mg.Tensor]], Callable[..., mg.Tensor]]:
    def add(loss: Callable[..., mg.Tensor]) -> Callable[..., mg.Tensor]:
        NETS.append(Net(loss, shapes))
        return loss

    return add


@net(x=(4, 3), w0=(3, 5), w1=(5, 2), b=(2,))
def plain(x: mg.Tensor, w0: mg.Tensor, w1: mg.Tensor, b: mg.Tensor) -> mg.Tensor:
    return (mg.tanh(x @ w0) @ w1 + b).mean()


@net(x=(5, 3), table=(7, 3), w=(3, 3))
def tied(x: mg.Tensor, table: mg.Tensor, w: mg.Tensor) -> mg.Tensor:
    hidden = mg.tanh((mg.embedding(table, np.array([1, 2, 1, 0, 6])) + x) @ w)
    return mg.cross_entropy(hidden @ table.T, np.array([2, 1, 0, 6, 5]))


@net(x=(4, 3), w=(3, 3), v=(3, 3))
def cast(x: mg.Tensor, w: mg.Tensor, v: mg.Tensor) -> mg.Tensor:
    wide = mg.astype(w, dtype=np.float64)
    return (mg.tanh(x @ wide) @ wide.T @ mg.astype(mg.exp(v), dtype=np.float64)).sum()


@net(x=(4, 3), w=(3, 3), b=(3,))
def decayed(x: mg.Tensor, w: mg.Tensor, b: mg.Tensor) -> mg.Tensor:
    """A branch of the loss depends on parameters alone."""
    return (mg.tanh(x @ w) + b).sum() + 0.1 * ((w * w).sum() + (mg.tanh(w) @ b).sum())


@net(x=(3, 3), w=(3, 3), v=(3, 3))
def passed_through(x: mg.Tensor, w: mg.Tensor, v: mg.Tensor) -> mg.Tensor:
    """The cotangent of `add` goes to h and, deferred, to h @ w: adding to h's in place would change both."""
    h = mg.tanh(x)
    return (mg.add(h @ w, h) * (mg.add(h @ v, h) @ w)).sum()


def two_uses(b: mg.Tensor, c: mg.Tensor) -> mg.Tensor:
    """Both tanh nodes get the same array; the second use of p then adds to its own."""
    p = mg.tanh(c)
    return mg.add(mg.add(mg.tanh(b), p), mg.mul(p, p)).sum()


net(x=(3,), x2=(3,))(two_uses)
net(b=(3,), c=(3,))(two_uses)
net(x=(3,), c=(3,))(two_uses)


@net(x=())
def number(x: mg.Tensor) -> mg.Tensor:
    """A sum of 0-d arrays is a NumPy scalar: adding to that in place would lose the third contribution."""
    h = mg.tanh(x)
    return h * 2 + h * 3 + h * 5


@net(x=(4, 3), frozen=(3, 3), a=(3, 1), b=(1, 3))
def low_rank(x: mg.Tensor, frozen: mg.Tensor, a: mg.Tensor, b: mg.Tensor) -> mg.Tensor:
    return mg.tanh(x @ (mg.astype(frozen, dtype=np.float64) + a @ b)).sum()


@net(x=(2, 5, 4), w0=(4, 12), w1=(4, 12), out0=(4, 4), out1=(4, 4), gain=(4,), bias=(4,))
def blocks(x: mg.Tensor, *params: mg.Tensor) -> mg.Tensor:
    w0, w1, out0, out1, gain, bias = params
    for w, out in ((w0, out0), (w1, out1)):
        x = x + mg.causal_attention(mg.layer_norm(x, gain, bias) @ w, num_heads=2) @ out
    return (x * x).mean()


each_net = pytest.mark.parametrize("net", NETS, ids=lambda net: f"{net.loss.__name__}({','.join(net.shapes)})")


def in_halves(loss: mg.Tensor) -> None:
    mg.backward_weight(mg.backward_input(loss))


def grads_after(net: Net, walk: Callable[[mg.Tensor], None]) -> list[Array | None]:
    leaves = net.leaves()
    walk(net.loss(*leaves))
    assert all((t.grad is not None) == t.requires_grad for t in leaves)
    return [t.grad for t in leaves]


@each_net
def test_gradients_are_right(net: Net) -> None:
    mg.check_vjp(net.loss, *(t.data for t in net.leaves()))


@each_net
@pytest.mark.parametrize("walk", [mg.backward_with_hooks, mg.backward_with_grad, in_halves])
def test_every_way_to_walk_gives_the_same_bits(net: Net, walk: Callable[[mg.Tensor], None]) -> None:
    for got, expected in zip(grads_after(net, walk), grads_after(net, mg.backward), strict=True):
        np.testing.assert_array_equal(got, expected)


@each_net
def test_the_input_half_is_for_data_and_the_weight_half_for_parameters(net: Net) -> None:
    leaves = net.leaves()
    data = [t for t in leaves if not isinstance(t, mg.Parameter)]
    params = [t for t in leaves if isinstance(t, mg.Parameter) and t.requires_grad]
    deferred = mg.backward_input(net.loss(*leaves))
    assert all(t.grad is not None for t in data)
    assert all(p.grad is None for p in params)
    started: list[mg.Parameter] = []
    ready: list[mg.Parameter] = []
    mg.backward_weight(deferred, hooks=mg.Hooks(on_start=started.extend, on_grad_ready=ready.append))
    assert set(started) == set(ready) == set(params)
    assert len(ready) == len(params)


def names(log: Log) -> list[str]:
    return [name for name, _ in log]


FROZEN = parameter("frozen", 3, 3, requires_grad=False)
IDS = np.array([0, 1, 2, 2])


@pytest.mark.parametrize(
    ("function", "in_input_half", "in_weight_half"),
    [
        (lambda x, w: x @ w, ["matmul"], ["matmul"]),
        (lambda x, w: w @ x.T, ["matmul", "transpose"], ["matmul"]),
        (lambda x, w: mg.linear(x, w, w[0]), ["linear"], ["linear", "linear", "getitem"]),
        (lambda x, w: x @ w.T, ["matmul"], ["matmul", "transpose"]),
        (lambda x, w: x @ mg.astype(w, dtype=np.float64), ["matmul"], ["matmul", "astype"]),
        (lambda x, w: x @ (2 * w @ w), ["matmul"], ["matmul", "matmul", "matmul", "mul"]),
        (
            lambda x, w: x @ (mg.astype(FROZEN, dtype=np.float64) + w @ w),
            ["matmul"],
            ["matmul", "add"] + 2 * ["matmul"],
        ),
        (lambda x, w: x @ (w * FROZEN.detach()), ["matmul"], ["matmul", "mul"]),
        (
            lambda x, w: mg.tanh(mg.embedding(w, IDS) + x) @ w.T,
            ["matmul", "tanh", "add", "add"],
            ["matmul", "transpose", "embedding"],
        ),
        (lambda x, w: x @ FROZEN, ["matmul"], []),
        (lambda x, w: x.detach() @ w, [], ["matmul"]),
        (lambda x, w: w @ w, [], ["matmul", "matmul"]),
    ],
)
def test_no_product_into_a_weight_runs_in_the_input_half(
    function: Callable[..., mg.Tensor], in_input_half: list[str], in_weight_half: list[str]
) -> None:
    y = function(leaf(4, 3), parameter("w", 3, 3))
    log: Log = []
    watch(y, log)
    deferred = mg.backward_input(y, np.ones(y.shape, y.dtype))
    assert names(log) == in_input_half
    log.clear()
    mg.backward_weight(deferred)
    assert names(log) == in_weight_half


def test_hooks_fire_in_the_weight_half_as_in_a_whole_backward() -> None:
    ready: list[str] = []
    deferred = mg.backward_input(chain(3, False)[0], hooks=mg.Hooks(on_grad_ready=lambda p: ready.append(p.name)))
    assert ready == []
    mg.backward_weight(deferred, hooks=mg.Hooks(on_grad_ready=lambda p: ready.append(p.name)))
    assert ready == ["w2", "w1", "w0"]


def test_the_input_half_lets_messages_progress() -> None:
    calls: list[str] = []
    deferred = mg.backward_input(chain(3, False)[0], hooks=mg.Hooks(between_ops=lambda: calls.append("B")))
    assert calls == ["B"] * 7
    mg.backward_weight(deferred, hooks=mg.Hooks(between_ops=lambda: calls.append("W")))
    assert calls[7:] == ["W"] * 3


def test_weight_halves_may_come_late_and_in_any_order() -> None:
    w, v = parameter("w", 3, 3), parameter("v", 3, 3)
    batches = [leaf(2, 3, seed=i) for i in range(3)]

    def loss(x: mg.Tensor) -> mg.Tensor:
        return mg.tanh(mg.tanh(x @ w) @ v).sum()

    deferred = [mg.backward_input(loss(x)) for x in batches]
    for half in (deferred[1], deferred[2], deferred[0]):
        mg.backward_weight(half)
    late = [w.grad, v.grad]
    late = [g.copy() for g in late if g is not None]
    w.grad = v.grad = None
    for i in (1, 2, 0):
        mg.backward(loss(batches[i]))
    np.testing.assert_array_equal(w.grad, late[0])
    np.testing.assert_array_equal(v.grad, late[1])


def test_a_weight_half_is_done_once() -> None:
    deferred = mg.backward_input(chain(1, False)[0])
    mg.backward_weight(deferred)
    with pytest.raises(RuntimeError, match="backward_weight: these deferred gradients were already computed"):
        mg.backward_weight(deferred)


def test_a_second_input_half_is_refused() -> None:
    loss, _ = chain(1, False)
    mg.backward_input(loss)
    with pytest.raises(RuntimeError, match="this tape was already walked"):
        mg.backward_input(loss)


def test_weight_halves_that_meet_are_walked_side_by_side_or_not_at_all() -> None:
    # Both products use one w.T, whose residuals the first walk frees.
    w = mg.Parameter(np.eye(3), "w")
    turned = w.T
    first, second = (mg.backward_input((mg.Tensor(np.ones((2, 3))) @ turned).sum()) for _ in range(2))
    mg.backward_weight(first)
    with pytest.raises(RuntimeError, match="this tape was already walked"):
        mg.backward_weight(second)


# -- several outputs ----------------------------------------------------------------------


def test_several_outputs_are_walked_as_one_tape() -> None:
    def outputs() -> tuple[mg.Parameter, mg.Tensor, list[mg.Tensor]]:
        w = mg.Parameter(np.array([2.0, 3.0]), "w")
        x = mg.Tensor(np.array([0.5, -1.0]), requires_grad=True)
        h = mg.tanh(x * w)
        return w, x, [h, mg.sum(h * w), h, x]

    cotangents = [np.array([1.0, 2.0]), 3.0, np.array([-0.5, 4.0]), np.array([7.0, 8.0])]
    w, x, joined = outputs()
    terms = [mg.sum(y * np.asarray(g)) for y, g in zip(joined, cotangents, strict=True)]
    mg.backward(terms[0] + terms[1] + terms[2] + terms[3])
    for halves in (False, True):
        w2, x2, joined = outputs()
        ready: list[str] = []
        hooks = mg.Hooks(on_grad_ready=lambda p, ready=ready: ready.append(p.name))
        assert mg.reached_parameters(joined) == [w2]
        if halves:
            mg.backward_weight(mg.backward_input(joined, cotangents), hooks=hooks)
        else:
            mg.backward_with_grad(joined, cotangents, hooks=hooks)
        np.testing.assert_allclose(w2.grad, w.grad, rtol=1e-12)
        np.testing.assert_allclose(x2.grad, x.grad, rtol=1e-12)
        assert ready == ["w"]


@pytest.mark.parametrize("grads", [None, [], [np.ones(2)], [np.ones(2)] * 3])
def test_several_outputs_need_a_grad_each(grads: list[Array] | None) -> None:
    x = mg.Tensor(np.ones(2), requires_grad=True)
    with pytest.raises(ValueError, match="backward of 2 outputs needs as many grads, got"):
        mg.backward_with_grad([x * 2, x * 3], grads)


def test_an_exception_in_a_hook_says_for_which_parameter() -> None:
    w = mg.Parameter(np.ones(2), "fc.weight")

    def boom(parameter: mg.Parameter) -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom") as caught:
        mg.backward_with_hooks(mg.sum(w), on_grad_ready=boom)
    assert caught.value.__notes__ == ["in on_grad_ready of 'fc.weight'"]


def test_a_norm_adds_its_gradient_to_what_passed_it_by() -> None:
    """In one pass, into new memory: what it adds to may be the cotangent of others too."""
    x, gain, bias = leaf(3, 4), parameter("gain", 4), parameter("bias", 4)

    def gradients(net: Callable[[mg.Tensor], mg.Tensor]) -> list[Any]:
        x.grad = gain.grad = bias.grad = None
        h = mg.tanh(x)
        mg.backward(mg.sum(net(h) ** 2))
        return [x.grad.copy(), gain.grad.copy(), bias.grad.copy()]

    def residual(h: mg.Tensor) -> mg.Tensor:
        return (h + mg.layer_norm(h, gain, bias)) * h

    def apart(h: mg.Tensor) -> mg.Tensor:  # the norm's input is a node of its own, which only the norm uses
        return (h + mg.layer_norm(h * 1.0, gain, bias)) * h

    for found, expected in zip(gradients(residual), gradients(apart), strict=True):
        np.testing.assert_array_equal(found, expected)
    seen: list[Array] = []
    h = mg.tanh(x)
    y = h + mg.layer_norm(h, gain, bias)
    node = y.node
    assert node is not None
    node.vjps = tuple([lambda g, vjp=vjp: seen.append(vjp(g)) or seen[-1] for vjp in node.vjps])  # type: ignore[union-attr]
    mg.backward_with_grad(y, np.ones(y.shape))
    np.testing.assert_array_equal(seen[0], np.ones(y.shape))
