"""Profile and anomaly: what a hook on ops sees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import minigrad as mg
from minigrad.backend import Array
from minigrad.models import GPT, MLP, GPTConfig
from minigrad.profiling import profiler

CONFIG = GPTConfig(vocab_size=17, context=6, num_layers=2, num_heads=2, width=8)
IDS = np.random.default_rng(0).integers(0, 17, (4, 7))


CLOCK = SimpleNamespace(now=0.0, perf_counter=lambda: CLOCK.now)
"""The profiler's time, which passes in `slow` alone."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "time", CLOCK)


@mg.op
def slow(x: Array) -> tuple[Array, Any]:
    """Take 2 s forward and 4 s backward."""

    def vjp(g: Array) -> Array:
        CLOCK.now += 4.0
        return g

    CLOCK.now += 2.0
    return x * 1, (vjp,)


@mg.op
def poisoned(x: Array, *, forward: float, backward: float) -> tuple[Array, Any]:
    """Pass values on, but the first of them becomes `forward`, and the first of the gradient `backward`."""

    def vjp(g: Array) -> Array:
        g = g.copy()
        g.flat[0] *= backward
        return g

    y = x.copy()
    y.flat[0] *= forward
    return y, (vjp,)


class Poison(mg.nn.Module):
    def __init__(self, forward: float, backward: float) -> None:
        self.values = {"forward": forward, "backward": backward}

    def __call__(self, x: mg.Tensor) -> mg.Tensor:
        return poisoned(x, **self.values)


@pytest.mark.usefixtures("clock")
def test_profile_counts_calls_time_and_bytes() -> None:
    x = mg.Tensor(np.ones((5, 2), np.float32), requires_grad=True)
    with mg.profile() as profile:
        y = slow(slow(x))
        mg.backward(mg.sum(y))
    total = profile.ops["slow"]
    assert total.calls == 2
    assert total.made_bytes == 2 * 5 * 2 * 4
    assert (total.forward_seconds, total.backward_seconds) == (4.0, 8.0)
    assert profile.seconds == pytest.approx(sum(t.forward_seconds + t.backward_seconds for t in profile.ops.values()))
    lines = str(profile).splitlines()
    assert lines[0].split() == ["op", "calls", "forward", "ms", "backward", "ms", "share", "made", "bytes"]
    assert lines[1].split()[:2] == ["slow", "2"]


@pytest.mark.usefixtures("clock")
def test_the_tape_shows_times_only_if_profiled() -> None:
    x = mg.Tensor(np.ones(2), requires_grad=True)
    with mg.profile():
        y = slow(x)
    assert mg.Tape.of(y).entries[0].seconds == 2.0
    z = mg.sum(y)
    assert mg.Tape.of(z).entries[1].seconds is None
    assert "slow" in str(mg.Tape.of(z))


def test_hooks_change_no_number() -> None:
    def grads() -> list[Array]:
        model = GPT(CONFIG)
        mg.backward(mg.cross_entropy(model(IDS[:, :-1]), IDS[:, 1:]))
        return [p.grad for p in model.parameters()]

    plain = grads()
    with mg.profile():
        profiled = grads()
    with mg.detect_anomaly():
        checked = grads()
    for a, b, c in zip(plain, profiled, checked, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


@pytest.mark.parametrize(
    ("forward", "backward", "message"),
    [
        (np.nan, 1.0, r"^the forward of poisoned in Sequential.layers\[1\] made the first NaN, in .* shape \(4, 3\)$"),
        (np.inf, 1.0, r"^the forward of poisoned in Sequential.layers\[1\] made the first infinity"),
        (1.0, np.nan, r"^the backward of poisoned in Sequential.layers\[1\] made the first NaN, in .* shape \(4, 3\)$"),
        (1.0, -np.inf, r"^the backward of poisoned in Sequential.layers\[1\] made the first infinity"),
    ],
)
def test_anomaly_names_op_module_and_direction(forward: float, backward: float, message: str) -> None:
    param = mg.nn.ParamGetter(dtype=np.float64)
    first = mg.nn.Linear(param.at("a"), 2, 3)
    model = mg.nn.Sequential([first, Poison(forward, backward), mg.nn.Linear(param.at("b"), 3, 1)])
    with mg.detect_anomaly(), pytest.raises(FloatingPointError, match=message):
        mg.backward(mg.mean(model(np.ones((4, 2)))))


def test_anomaly_names_nested_modules() -> None:
    model = GPT(CONFIG)
    model.layers[1].attention.heads.qkv.weight.data[0, 0] = np.nan
    message = r"linear in GPT.layers\[1\].attention.heads.qkv made"
    with mg.detect_anomaly(), pytest.raises(FloatingPointError, match=message):
        model(IDS[:, :-1])


def test_anomaly_within_a_recomputed_block() -> None:
    x = mg.Tensor(np.ones((2, 2)), requires_grad=True)
    with mg.detect_anomaly(), pytest.raises(FloatingPointError, match="the backward of poisoned in Poison"):
        mg.backward(mg.sum(mg.recompute(Poison(1.0, np.nan), x)))


def test_nothing_is_raised_without_the_hook_or_without_an_anomaly() -> None:
    x = mg.Tensor(np.ones(2), requires_grad=True)
    mg.backward(mg.sum(poisoned(x, forward=np.nan, backward=1.0)))
    with mg.detect_anomaly():
        mg.backward(mg.sum(poisoned(x, forward=1.0, backward=1.0)))


def test_the_inner_hook_runs_and_the_outer_one_comes_back() -> None:
    model = MLP([2, 3, 1])
    with mg.profile() as outer:
        model(np.ones((1, 2), np.float32))
        with mg.profile() as inner:
            model(np.ones((1, 2), np.float32))
        model(np.ones((1, 2), np.float32))
    assert (outer.ops["linear"].calls, inner.ops["linear"].calls) == (4, 2)


def test_a_module_that_raises_leaves_no_trace_in_the_path() -> None:
    with mg.detect_anomaly():
        with pytest.raises(ValueError, match="do not fit"):
            MLP([2, 3, 1])(np.ones((1, 5), np.float32))
        with pytest.raises(FloatingPointError, match=r"forward of poisoned in Poison made"):
            Poison(np.nan, 1.0)(mg.Tensor(np.ones(2)))
