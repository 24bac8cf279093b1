"""The pipeline's benchmark on GPUs: its report, and how it measures layers, with a CuPy that computes nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import fake_cupy
import numpy as np
import pytest

import minigrad as mg
from minigrad.models import gpt
from minigrad.nn import ParamGetter

CONFIG = gpt.GPTConfig(vocab_size=11, context=4, num_layers=3, num_heads=2, width=8)


class Scripts(NamedTuple):
    """What is tested, with a CuPy that computes nothing."""

    stage_times: Any
    gpu_pipeline: Any


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripts]:
    fake_cupy.install(monkeypatch)
    before = set(sys.modules)
    yield Scripts(importlib.import_module("stage_times"), importlib.import_module("gpu_pipeline"))
    for name in set(sys.modules) - before:  # whoever imports them next has another CuPy
        if Path(getattr(sys.modules[name], "__file__", None) or ".").parent.name == "benchmarks":
            del sys.modules[name]


def test_the_report_stands_beside_the_even_simulation_the_layers_times_and_the_formula(scripts: Scripts) -> None:
    Times = scripts.stage_times.Times
    one = [Times(2.0, 3.0, 1.0)]
    two = [Times(1.0, 2.0, 1.0), Times(1.0, 1.0, 0.0001)]
    batch = (np.zeros((16, 100)),)
    trainings = {
        "one card": SimpleNamespace(stage_times=one, optimizer=2.0, batch=batch),
        "1f1b": SimpleNamespace(stage_times=two, optimizer=1.0, batch=batch),
    }
    seconds = {"one card": [0.1, 0.05, 0.01], "1f1b": [0.032]}
    lines = scripts.gpu_pipeline.report("tiny", trainings, seconds, 2)
    found = {line.what.removeprefix("tiny, m = 8, "): line.measured for line in lines}
    assert found["one card: a step"] == pytest.approx(50)
    assert found["one card: thousand tokens/s"] == pytest.approx(1600 / 0.05 / 1e3)
    assert found["one card: a step by its layers' times"] == pytest.approx(8 * 6 + 2)
    assert found["one card: layers' times over measured"] == pytest.approx(1.0)
    assert found["1f1b: times one card"] == pytest.approx(50 / 32)
    assert found["1f1b: times one card, p m / (m + p - 1)"] == pytest.approx(16 / 9)
    assert found["1f1b: that time over measured"] == pytest.approx(50 / 32 * 9 / 16)
    # The first stage has 8 x 4 ms of work, and after two forwards waits for the second's first backward: 1 ms.
    assert found["1f1b: a step by its layers' times"] == pytest.approx(8 * 4 + 1 + 1, rel=1e-4)
    assert found["1f1b: layers' times over measured"] == pytest.approx(34 / 32, rel=1e-4)
    # As much work with F, B and W alike: it waits until 4/3 + 2, and has done 2 x 4/3.
    assert found["1f1b: times one card, simulated"] == pytest.approx(8 * 6 / (8 * 4 + 2 / 3), rel=1e-4)
    assert found["1f1b: ideal time over measured"] == pytest.approx(50 / 32 * (8 * 4 + 2 / 3) / 48, rel=1e-4)
    assert not any("p m" in what or "ideal" in what for what in found if what.startswith("one card"))


def test_each_kind_of_layer_is_measured_by_itself(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    module, made = scripts.stage_times, []

    class Stage:
        def __init__(self, config: gpt.GPTConfig, layers: list[tuple[str, Any]], microbatch_size: int) -> None:
            made.append([name for name, _ in layers])
            self.num_parameters = 10 * len(made)

        def times(self) -> Any:
            return module.Times(3.0, 6.0, float(3 * len(made)))

        def optimizer_milliseconds(self) -> float:
            return 0.5

    monkeypatch.setattr(module, "Stage", Stage)
    found = module.layer_times(CONFIG, 2)
    attention, feed_forward = ([f"block{i}.{half}" for i in range(3)] for half in ("attention", "feed_forward"))
    assert made == [["embed"], attention, feed_forward, ["head"]]
    embed, *halves, head = found.layers
    assert (embed, head) == ((3, 6, 12), (3, 6, 12))
    assert halves == [(1, 2, 4)] * 6
    assert found.optimizer == pytest.approx(4 * 0.5 / 100)


@pytest.mark.parametrize("part", [slice(0, 3), slice(3, 6), slice(6, None)], ids=["first", "middle", "last"])
def test_a_stage_is_trained_by_all_micro_batches(
    part: slice, scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host, without a graph: what it leaves are the gradients of eight backwards."""
    module = scripts.stage_times
    monkeypatch.setattr(module, "CapturedStep", lambda step, optimizer: Called(step))
    monkeypatch.setattr(module, "seconds_a_step", lambda step, num_steps: step() or 0.25)
    monkeypatch.setattr(module, "to_device", lambda array: array)
    monkeypatch.setattr(module, "ParamGetter", lambda seed, dtype, device: ParamGetter(seed, dtype))
    monkeypatch.setattr(module, "use_precision", lambda params, precision: None)
    monkeypatch.setattr(module, "dtype_of", lambda precision: np.float32)
    stage = module.Stage(CONFIG, gpt.layers(CONFIG, half_blocks=True)[part], 2)
    params = stage.optimizer.params
    assert stage.milliseconds(0) == stage.milliseconds(1) == 250
    assert not any(p.has_grad for p in params)
    assert stage.times() == (250 / 8, module.SHORTEST, module.SHORTEST)
    ours = {p.name: p.grad.copy() for p in params}
    for p in params:
        p.grad = None
    h = stage.x if stage.is_first else mg.Tensor(stage.h, requires_grad=True)
    for layer in stage.layers:
        h = layer(h)
    mg.backward_with_grad(*((mg.cross_entropy(h, stage.y), np.float32(1)) if stage.is_last else (h, 8 * stage.g)))
    for p in params:
        np.testing.assert_allclose(ours[p.name], p.grad, rtol=1e-4, atol=1e-6, err_msg=p.name)
    before = [p.data.copy() for p in params]
    assert stage.optimizer_milliseconds() == 250
    assert any((old != p.data).any() for old, p in zip(before, params, strict=True))


class Called:
    """A step that is called, where a captured one would be replayed."""

    def __init__(self, step: Any) -> None:
        self._step = step

    def __call__(self, *inputs: Any) -> None:
        self._step(*inputs)

    def clear(self) -> None:
        pass
