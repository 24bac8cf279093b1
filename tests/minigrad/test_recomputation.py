"""Recomputation: the same numbers, hooks and errors as without it, for less memory."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest

import minigrad as mg
from minigrad import rng
from minigrad.backend import Array
from minigrad.models import GPT, GPTConfig, gpt

CONFIG = GPTConfig(vocab_size=17, context=6, num_layers=3, num_heads=2, width=8, dropout=0.1)
IDS = np.random.default_rng(0).integers(0, 17, (4, 7))


def gpt_loss(model: GPT, *, recomputed: bool) -> mg.Tensor:
    run = mg.recompute if recomputed else lambda layer, x: layer(x)
    with rng.scope(seed=1, step=0):
        x = IDS[:, :-1]
        for layer in model.layers:
            x = run(layer, x)
        return mg.cross_entropy(x, IDS[:, 1:])


def trained(*, recomputed: bool, halves: bool) -> tuple[dict[str, Array], list[Any]]:
    """Return all gradients and the log of hooks of one backward, whole or in two halves."""
    model = GPT(CONFIG, dtype=np.float64)
    log: list[Any] = []
    hooks = mg.Hooks(
        on_start=lambda parameters: log.append(sorted(p.name for p in parameters)),
        on_grad_ready=lambda p: log.append((p.name, p.grad.copy().tobytes())),
    )
    loss = gpt_loss(model, recomputed=recomputed)
    if halves:
        mg.backward_weight(mg.backward_input(loss), hooks=hooks)
    else:
        mg.backward_with_hooks(loss, hooks)
    return {p.name: p.grad for p in model.parameters()}, log


@pytest.mark.parametrize("halves", [False, True], ids=["whole", "B then W"])
def test_gradients_and_hooks_are_those_of_a_plain_call_bit_by_bit(halves: bool) -> None:
    plain, plain_log = trained(recomputed=False, halves=False)
    grads, log = trained(recomputed=True, halves=halves)
    assert log == plain_log
    for name, grad in plain.items():
        np.testing.assert_array_equal(grads[name], grad, err_msg=name)


def test_a_gpt_whose_blocks_are_recomputed_trains_the_same_for_less_memory() -> None:
    config, x = GPTConfig(vocab_size=17, context=64, num_layers=6, num_heads=2, width=32), np.zeros((4, 64), np.int64)
    grads, kept = [], []
    for recompute in (False, True):
        param = mg.nn.ParamGetter(0, np.float64)
        model = mg.nn.Sequential([make(param) for _, make in gpt.layers(config, recompute=recompute)])
        tracemalloc.start()
        loss = mg.cross_entropy(model(x), x)
        kept.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        mg.backward(loss)
        grads.append({p.name: p.grad for p in model.parameters()})
    assert kept[1] < kept[0] / 3
    for name, grad in grads[0].items():
        np.testing.assert_array_equal(grads[1][name], grad, err_msg=name)


def test_dropout_draws_its_masks_again() -> None:
    """openai/guided-diffusion#167: a new mask in the replay gives the gradient of another sample."""
    x = mg.Tensor(np.full((4, 1000), 3.0), requires_grad=True)
    layer = mg.nn.Dropout("drop", 0.5)
    with rng.scope(seed=0, step=3, first_sample=8):
        y = mg.recompute(layer, x)
        with rng.offset(100):
            layer(x)  # somebody else draws in between
    mg.backward_with_grad(y, np.ones(y.shape))
    np.testing.assert_array_equal(x.grad * 3, y.data)


def test_an_input_used_twice_an_input_unused_and_a_shared_parameter() -> None:
    w = mg.Parameter(np.array([2.0]), "w")

    def block(x: mg.Tensor, unused: mg.Tensor) -> mg.Tensor:
        return x * x * w + w

    x, unused = (mg.Tensor(np.array([3.0]), requires_grad=True) for _ in range(2))
    ready: list[str] = []
    y = mg.recompute(block, x * 1, unused) + w * x
    mg.backward_with_hooks(mg.sum(y), on_grad_ready=lambda p: ready.append(p.name))
    assert (x.grad, w.grad, unused.grad) == (14, 13, None)
    assert ready == ["w"]


def test_nested() -> None:
    w = mg.Parameter(np.array([2.0]), "w")
    calls: list[int] = []

    def inner(x: mg.Tensor) -> mg.Tensor:
        calls.append(1)
        return mg.tanh(x * w)

    x = mg.Tensor(np.array([0.3]), requires_grad=True)
    plain = mg.sum(mg.tanh(mg.tanh(x * w) * w) * 3)
    mg.backward(plain)
    expected = x.grad.copy(), w.grad.copy()
    x.grad = w.grad = None
    y = mg.recompute(lambda x: mg.recompute(inner, mg.recompute(inner, x)) * 3, x)
    mg.backward(mg.sum(y))
    np.testing.assert_array_equal((x.grad, w.grad), expected)
    assert len(calls) == 6  # twice forward, twice in the outer replay, once more for each inner one


def test_the_weight_half_runs_no_replay_for_data_and_the_input_half_none_for_weights() -> None:
    """Where no input needs a gradient, as on a first stage, everything is weight work."""
    w = mg.Parameter(np.ones((3, 2)), "w")
    calls: list[str] = []

    def block(x: Any) -> mg.Tensor:
        calls.append("run")
        return mg.matmul(x, w)

    deferred = mg.backward_input(mg.sum(mg.recompute(block, np.ones((4, 3)))))
    assert calls == ["run"]
    mg.backward_weight(deferred)
    assert calls == ["run", "run"]
    np.testing.assert_array_equal(w.grad, np.full((3, 2), 4.0))

    x = mg.Tensor(np.ones((4, 3)), requires_grad=True)
    deferred = mg.backward_input(mg.sum(mg.recompute(block, x)))
    assert calls == ["run"] * 4
    assert x.grad is not None
    mg.backward_weight(deferred)
    assert calls == ["run"] * 4


def test_residuals_are_gone_after_the_forward_and_peak_memory_is_lower() -> None:
    def block(x: mg.Tensor) -> mg.Tensor:
        for _ in range(8):
            x = mg.tanh(x)
        return x

    def peak(*, recomputed: bool) -> int:
        x = mg.Tensor(np.ones(100_000), requires_grad=True)
        tracemalloc.start()
        y = x
        for _ in range(6):
            y = mg.recompute(block, y) if recomputed else block(y)
        mg.backward_with_grad(y, np.ones(y.shape))
        _, high = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return high

    assert peak(recomputed=True) < 0.5 * peak(recomputed=False)


def test_freed_without_the_collector() -> None:
    seen: list[weakref.ref[Any]] = []

    def block(x: mg.Tensor) -> mg.Tensor:
        h = mg.tanh(x)
        seen.append(weakref.ref(h))
        return h * 2

    gc.disable()
    try:
        x = mg.Tensor(np.ones(3), requires_grad=True)
        y = mg.recompute(block, x)
        assert seen[0]() is None
        mg.backward_with_grad(y, np.ones(3))
        assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()


def test_a_captured_tensor_with_a_gradient_is_refused() -> None:
    x = mg.Tensor(np.ones(2), requires_grad=True)
    h = mg.tanh(x)

    def block(x: mg.Tensor) -> mg.Tensor:
        return x * h

    with pytest.raises(ValueError, match=r"recompute of block: it uses a tensor from outside \(tanh\)"):
        mg.recompute(block, x)
    with pytest.raises(ValueError, match=r"from outside \(tensor\)"):
        mg.recompute(lambda y: y * x, h)


def test_a_parameter_changed_before_the_replay_is_an_error() -> None:
    w = mg.Parameter(np.ones(2), "w")
    x = mg.Tensor(np.ones(2), requires_grad=True)
    y = mg.recompute(lambda x: x + w, x)  # a plain add would not need w again, but a replay reads it
    w.data = np.zeros(2)
    with pytest.raises(RuntimeError, match="recompute needs 'w' as it was in the forward"):
        mg.backward_with_grad(y, np.ones(2))


def test_a_second_backward_is_an_error() -> None:
    x = mg.Tensor(np.ones(2), requires_grad=True)
    y = mg.recompute(mg.tanh, x)
    mg.backward_with_grad(y, np.ones(2))
    with pytest.raises(RuntimeError, match="already walked"):
        mg.backward_with_grad(y, np.ones(2))


def test_progress_is_called_in_the_replay_too() -> None:
    x = mg.Tensor(np.ones(2), requires_grad=True)
    calls: list[int] = []
    y = mg.recompute(lambda x: mg.tanh(mg.tanh(x)), x)
    mg.backward_with_grad(y, np.ones(2), hooks=mg.Hooks(between_ops=lambda: calls.append(1)))
    assert len(calls) == 4  # two ops forward again, two backward


def test_nothing_to_record_is_a_plain_call() -> None:
    x = mg.Tensor(np.ones(2))
    assert mg.recompute(mg.tanh, x).node is None
    with mg.no_grad():
        assert mg.recompute(mg.tanh, mg.Tensor(np.ones(2), requires_grad=True)).node is None
    leaf = mg.Tensor(np.ones(2), requires_grad=True)
    h = mg.tanh(leaf)
    assert mg.recompute(lambda x: x, h) is h
