"""A captured step is the step: same bits, any numbers that change, and what cannot be captured is named."""

from __future__ import annotations

import gc
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import needs_mpirun, run_job

import minigrad as mg
from distributed import DistributedDataParallel, SoloCommunicator
from minigrad.backend import address, place, to_device, to_host
from minigrad.cuda_graph import NUM_WARMUP_CALLS, CapturedStep
from minigrad.kernels.gpu_launch import workspace
from minigrad.kernels.products import gpu as product_kernels
from minigrad.lr_schedule import warmup_cosine
from minigrad.models import GPT, MLP, GPTConfig, gpt
from minigrad.optim import SGD, AdamW, Optimizer
from minigrad.precision import LossScale, dtype_of, use_precision
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy", reason="needs CuPy")

ROOT = Path(__file__).parents[2]
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


def test_a_step_whose_gradients_are_not_finite_changes_nothing() -> None:
    """The GPU decides; whoever asks hears of it, and it is not counted."""
    training = Training("float32")
    captured = CapturedStep(training.step, training.optimizer)
    for x, y in batches(4):
        captured(x, y)
    assert training.optimizer.was_taken()
    before = training.values()
    (gain,) = [p for p in training.model.parameters() if p.name == "block0.norm1.gain"]
    good = gain.data.copy()
    gain.data = cupy.full_like(good, np.inf)
    captured(x, y)
    assert not training.optimizer.was_taken()
    assert not training.optimizer.was_taken()
    assert training.optimizer.num_steps == 4
    gain.data = good
    for name, value in training.values().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    captured(x, y)
    assert training.optimizer.was_taken()
    assert training.optimizer.num_steps == 5


def test_a_loss_scale_lives_on_the_gpu_and_is_the_cpus() -> None:
    """Factor, counts and the number of the step follow there, whether somebody asks after each step or at the end."""

    def trained(device: str, *, asks: bool) -> Any:
        w = mg.Parameter(place(np.linspace(-1, 1, 1000, dtype=np.float32), device), "w")
        scale = LossScale(value=2.0**10, growth_steps=3)
        optimizer = Optimizer([w], AdamW(1e-2), max_norm=1.0, loss_scale=scale)
        generator = np.random.default_rng(0)
        for step in range(12):
            grad = generator.standard_normal(1000).astype(np.float32) * np.float32(scale.value)
            grad[7] = np.inf if step in (1, 2, 9) else grad[7]
            w.grad = place(grad, device)
            optimizer.step()
            assert not asks or optimizer.was_taken() == (step not in (1, 2, 9))
            optimizer.zero_grad()
        assert optimizer.was_taken()
        assert optimizer.num_steps == 9
        return scale.state_dict(), to_host(w.data)

    state, values = trained("cpu", asks=True)
    assert state == {"value": 2.0**9, "num_skipped": 3, "num_good": 2, "num_in_a_row": 0}
    for asks in (True, False):
        found, on_gpu = trained("cuda", asks=asks)
        assert found == state
        np.testing.assert_allclose(on_gpu, values, rtol=1e-4, atol=1e-6)


def test_a_loss_scale_goes_with_any_rule() -> None:
    """Also one that asks the GPU."""
    model, scale = GPT(CONFIG, device="cuda"), LossScale(value=2.0**24)
    optimizer = Optimizer(model.parameters(), SGD(0.1), max_norm=1.0, loss_scale=scale)
    use_precision(model.parameters(), "float16")
    losses = []
    for x, y in batches(1) * 24:
        optimizer.zero_grad()
        loss = mg.cross_entropy(model(to_device(x)), to_device(y))
        mg.backward(loss * scale.factor)
        optimizer.step()
        losses.append(loss.item())
    assert scale.num_skipped > 0
    assert losses[-1] < losses[0]


def test_a_float16_step_with_its_loss_scale_is_captured() -> None:
    def trained(graph: bool) -> Any:
        training, scale = Training("float16"), LossScale(value=2.0**24, growth_steps=4)
        optimizer = Optimizer(training.model.parameters(), AdamW(1e-2), max_norm=1.0, loss_scale=scale)

        def step(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = mg.cross_entropy(training.model(x), y)
            mg.backward(loss * scale.factor)
            optimizer.step()
            return loss

        run = CapturedStep(step, optimizer) if graph else lambda x, y: step(to_device(x), to_device(y))
        losses = [run(x, y).item() for x, y in batches(24)]
        assert not optimizer.was_taken() or optimizer.num_steps == 24 - scale.num_skipped
        return losses, scale.state_dict(), [to_host(p.data) for p in training.model.parameters()]

    (losses, state, values), (graph_losses, graph_state, graph_values) = trained(False), trained(True)
    assert losses == graph_losses
    assert state == graph_state
    assert state["num_skipped"] > 0
    for value, graph_value in zip(values, graph_values, strict=True):
        np.testing.assert_array_equal(value, graph_value)


def test_the_executors_step_is_captured() -> None:
    """Micro-batches, and the loss without a question; the same bits as not captured."""

    def trained(graph: bool) -> Any:
        comm, schedule = SoloCommunicator(), SCHEDULES["1f1b"]
        stages = PipelineStage.of(gpt.layers(CONFIG), comm, schedule, seed=0, dtype=np.float32, device="cuda")
        pipe = PipelineExecutor(stages, comm, schedule, num_microbatches=2, loss_fn=mg.cross_entropy)
        ddp = DistributedDataParallel(stages, comm)
        use_precision(stages.parameters(), "bfloat16")
        optimizer = Optimizer(ddp.params, AdamW(1e-2), max_norm=1.0)

        def step(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = pipe.step_on_device(x, y, hooks=ddp.hooks(num_samples=len(x)))
            ddp.wait()
            optimizer.step()
            return loss

        run = CapturedStep(step, optimizer) if graph else lambda x, y: step(to_device(x), to_device(y))
        losses = [float(run(x, y)) for x, y in batches(5)]
        return losses, [to_host(p.data) for p in stages.parameters()]

    (losses, values), (graph_losses, graph_values) = trained(False), trained(True)
    assert losses == graph_losses
    for value, graph_value in zip(values, graph_values, strict=True):
        np.testing.assert_array_equal(value, graph_value)


def test_train_gpt_on_a_gpu(tmp_path: Path) -> None:
    """bfloat16 in a graph by default, float16 with its loss scale too, float32 without: nearly the same losses."""
    losses = {}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    for name, flags in {
        "auto": [],
        "float16": ["--precision", "float16"],
        "float32": ["--precision", "float32", "--graph", "off"],
    }.items():
        command = ["examples/train_gpt.py", "--device", "cuda", "--steps", "8", "--run", str(tmp_path / name), *flags]
        ran = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr
        assert ("one CUDA graph of" in ran.stdout) == (name != "float32")
        assert "attention by" in ran.stdout.splitlines()[0]
        losses[name] = float(re.search(r"validation loss ([\d.]+)", ran.stdout)[1])
    assert max(losses.values()) - min(losses.values()) < 0.02, losses


@needs_mpirun
def test_one_rank_under_mpirun_is_captured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what `make train RANKS=1 DEVICE=cuda` runs: reductions of one rank do not go through the host."""
    flags = ["--device", "cuda", "--graph", "on", "--steps", "8", "--run", str(tmp_path / "run")]
    monkeypatch.setenv("MINIGRAD_KERNELS", "numba")  # jobs take NumPy's, of a GPU's optimizer too
    ran = run_job(["-m", "mpi4py", "examples/train_gpt.py", *flags], ranks=1)
    assert ran.returncode == 0, ran.stderr
    assert "one CUDA graph of" in ran.stdout


def test_a_graph_of_several_ranks_is_one_of_the_shapes_on_all() -> None:
    """When another rank's batch has another size this one's graph is no longer right: it weighs more in the mean."""
    training, calls, others = Training("bfloat16"), [], ["(4, 32)"]

    def step(x: Any, y: Any) -> mg.Tensor:
        calls.append(others[0])
        return training.step(x, y)

    captured = CapturedStep(step, training.optimizer, gather=lambda key: [key, others[0]])
    for other, (x, y) in zip(["even"] * 5 + ["uneven"] * 5 + ["even"] * 2, batches(12), strict=True):
        others[0] = other
        assert np.isfinite(captured(x, y).item())
    assert calls == ["even"] * (NUM_WARMUP_CALLS + 1) + ["uneven"] * (NUM_WARMUP_CALLS + 1)


def test_a_frozen_parameter_stays_and_one_that_is_thawed_goes_on() -> None:
    """A graph trains what required a gradient when it was captured, so another set has another graph."""

    def trained(graph: bool) -> list[Any]:
        training = Training("bfloat16")
        captured = CapturedStep(training.step, training.optimizer)
        frozen = training.model.parameters()[3]
        for i, (x, y) in enumerate(batches(12)):
            frozen.requires_grad = not 4 <= i < 8
            before = frozen.data.copy()
            captured(x, y) if graph else training.step(to_device(x), to_device(y))
            assert bool((frozen.data == before).all()) == (4 <= i < 8)
        return [to_host(p.data) for p in training.model.parameters()]

    for value, graph_value in zip(trained(False), trained(True), strict=True):
        np.testing.assert_array_equal(value, graph_value)


def test_what_is_no_array_is_no_input() -> None:
    training = Training("bfloat16")
    captured = CapturedStep(training.step, training.optimizer)
    ((x, y),) = batches(1)
    for wrong, word in (([1, 2], "a list"), (mg.Tensor(to_device(x.astype(np.float32))), "a Tensor"), (3, "an int")):
        with pytest.raises(TypeError, match=f"inputs of a captured step are arrays, got {word}"):
            captured(wrong, y)


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


@pytest.mark.parametrize("how", ["asks", "multiplies"])
def test_what_cannot_be_captured_is_refused_with_its_line(how: str) -> None:
    training, does, a = Training("bfloat16"), how, cupy.ones((2, 2))

    def step(x: Any, y: Any) -> Any:
        loss = training.step(x, y)
        if does == "asks":
            loss.item()
        elif does == "multiplies":
            a @ a  # cuBLAS, which CuPy does not let into a graph
        return loss

    captured = CapturedStep(step, training.optimizer)
    ((x, y),) = batches(1)
    for _ in range(NUM_WARMUP_CALLS):
        captured(x, y)
    offset, calls = {
        "asks": (3, r"loss\.item\(\), which calls \S*tensor\.py:\d+, in item"),
        "multiplies": (5, "a @ a"),
    }[how]
    line = rf"test_gpu_graph\.py:{inspect.getsourcelines(step)[1] + offset}, in step: {calls}"
    with pytest.raises(RuntimeError, match=rf"cannot be captured in a CUDA graph: \S*{line}"):
        captured(x, y)
    assert np.isfinite(training.step(to_device(x), to_device(y)).item())  # without the graph it goes on
    does = ""
    assert np.isfinite(captured(x, y).item())  # and with one, once there is no such line
    assert captured.num_launches > 20


def test_work_that_nobody_waits_for_is_refused() -> None:
    """Beside the step's stream something still runs where it ends: a bucket, say, of which nobody has waited."""
    training, waits = Training("bfloat16"), False
    beside, counts = cupy.cuda.Stream(non_blocking=True), cupy.zeros(1)

    def step(x: Any, y: Any) -> Any:
        loss = training.step(x, y)
        current = cupy.cuda.get_current_stream()
        beside.wait_event(current.record())
        with beside:
            counts.fill(1)
        if waits:
            current.wait_event(beside.record())
        return loss

    captured = CapturedStep(step, training.optimizer)
    ((x, y),) = batches(1)
    for _ in range(NUM_WARMUP_CALLS):
        captured(x, y)
    with pytest.raises(RuntimeError, match=r"captured in a CUDA graph: \S*cuda_graph\.py.*end_capture.*unjoined work"):
        captured(x, y)
    waits = True
    assert np.isfinite(captured(x, y).item())


def test_a_graph_keeps_the_memory_in_which_libraries_scribble() -> None:
    """A product that is summed up in parts keeps them in memory whose address the graph has, whoever else lets go."""
    a, b = (to_device(np.ones((1 << 15, 64), np.float32).astype(dtype_of("bfloat16"))) for _ in range(2))
    out, stream, pool = cupy.zeros((64, 64), np.float32), cupy.cuda.Stream(), cupy.cuda.MemoryPool()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        first = workspace(1000)
        assert address(workspace(500)) == address(first)
        assert workspace(1 << 26).nbytes == 1 << 26  # and the first one is still there
        assert address(workspace(1000)) == address(first)
        assert pool.total_bytes() == 0
        product_kernels.product(a.T, b, out)
        stream.begin_capture()
        product_kernels.product(a.T, b, out)
        graph = stream.end_capture()
    assert address(workspace(1000)) != address(first)  # another stream's
    product_kernels._products.cache_clear()
    gc.collect()
    pool.free_all_blocks()
    out.fill(0)
    graph.launch(stream)
    stream.synchronize()
    assert bool((out == 1 << 15).all())


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
