"""A captured step is the step: same bits, any numbers that change, and what cannot be captured is named."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import minigrad as mg
from minigrad.backend import to_device, to_host
from minigrad.cuda_graph import NUM_WARMUP_CALLS, CapturedStep
from minigrad.lr_schedule import warmup_cosine
from minigrad.models import GPT, MLP, GPTConfig
from minigrad.optim import SGD, AdamW, Optimizer
from minigrad.precision import use_precision

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy", reason="needs CuPy")

CONFIG = GPTConfig(vocab_size=65, context=32, num_layers=2, num_heads=2, width=64)


def batches(count: int, size: int = 4, time: int = 32) -> list[Any]:
    ids = np.random.default_rng(0).integers(0, 65, (count, size, time + 1))
    return [(x[:, :-1].copy(), x[:, 1:].copy()) for x in ids]


class Training:
    def __init__(self, precision: str, *, max_norm: float | None = 0.5) -> None:
        self.model = GPT(CONFIG, device="cuda")
        lr = warmup_cosine(1e-2, num_steps=20, num_warmup_steps=3, floor=1e-3)
        self.optimizer = Optimizer(self.model.parameters(), AdamW(lr, weight_decay=0.1), max_norm=max_norm)
        use_precision(self.model.parameters(), precision)

    def step(self, x: Any, y: Any) -> mg.Tensor:
        self.optimizer.zero_grad()
        loss = mg.cross_entropy(self.model(x), y)
        mg.backward(loss)
        self.optimizer.step()
        return loss

    def values(self) -> dict[str, Any]:
        state = {name: to_host(a) for name, a in self.optimizer.state_arrays()}
        return state | {name: to_host(a) for name, a in self.model.state_dict().items()}


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "float32"])
def test_graph_and_eager_agree_bit_for_bit(precision: str) -> None:
    eager, graph = Training(precision), Training(precision)
    captured = CapturedStep(graph.step, graph.optimizer)
    for x, y in batches(4) + batches(4, size=3, time=17) + batches(2):  # a new shape has a graph of its own
        a, b = eager.step(to_device(x), to_device(y)), captured(x, y)
        assert a.item() == b.item()
        assert eager.optimizer.grad_norm == graph.optimizer.grad_norm > 0
    assert eager.optimizer.num_steps == graph.optimizer.num_steps == 10
    for name, value in eager.values().items():
        np.testing.assert_array_equal(graph.values()[name], value, err_msg=name)
    assert captured.num_launches > 20


def test_memory_returns_when_the_graphs_go() -> None:
    training = Training("bfloat16")
    captured = CapturedStep(training.step, training.optimizer)
    for x, y in batches(4):
        captured(x, y)
    assert captured.pool_bytes > 0
    captured.clear()
    assert captured.pool_bytes == 0
    for x, y in batches(4):  # and it starts anew
        assert np.isfinite(captured(x, y).item())


def test_what_asks_the_device_is_refused_with_its_line() -> None:
    training = Training("bfloat16")

    def step(x: Any, y: Any) -> None:
        loss = training.step(x, y)
        loss.item()  # this line

    captured = CapturedStep(step, training.optimizer)
    ((x, y),) = batches(1)
    for _ in range(NUM_WARMUP_CALLS):
        captured(x, y)
    line = inspect.getsourcelines(step)[1] + 2
    with pytest.raises(RuntimeError, match=r"cannot be captured in a CUDA graph: .*") as error:
        captured(x, y)
    assert "tensor.py" in str(error.value) or f"test_gpu_graph.py:{line}" in str(error.value)
    assert np.isfinite(training.step(to_device(x), to_device(y)).item())  # without the graph it goes on


def test_hooks_that_look_at_ops_are_refused() -> None:
    training = Training("bfloat16")
    captured = CapturedStep(training.step, training.optimizer)
    ((x, y),) = batches(1)
    for _ in range(NUM_WARMUP_CALLS):
        captured(x, y)
    with mg.profile(), pytest.raises(RuntimeError, match="while profile"):
        captured(x, y)


def test_an_optimizer_that_asks_is_refused() -> None:
    optimizer = Optimizer(MLP([3, 2], device="cuda").parameters(), SGD(0.1))
    with pytest.raises(ValueError, match="captured with an AdamW of float32"):
        CapturedStep(lambda: None, optimizer)


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_a_whole_step_on_the_gpu_is_the_cpus(max_norm: float | None) -> None:
    def trained(device: str) -> dict[str, Any]:
        model = MLP([5, 7, 3], device=device)
        model.parameters()[1].requires_grad = False  # frozen parameters stay, in the middle of a flat
        optimizer = Optimizer(
            model.parameters(), AdamW(lambda step: 0.1 / (1 + step), weight_decay=0.1), max_norm=max_norm
        )
        generator = np.random.default_rng(0)
        for _ in range(5):
            x = generator.standard_normal((4, 5)).astype(np.float32)
            optimizer.zero_grad()
            mg.backward(mg.sum(model(to_device(x) if device == "cuda" else x) ** 2))
            optimizer.step()
        return {name: to_host(a) for name, a in model.state_dict().items()} | {"norm": np.float32(optimizer.grad_norm)}

    expected, found = trained("cpu"), trained("cuda")
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-4, atol=2e-5, err_msg=name)
