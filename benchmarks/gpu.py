"""A training step on one GPU beside PyTorch's, in the same process on the same card.

    make bench-gpu
    python benchmarks/gpu.py --sizes nano baby --rounds 5

minigrad trains its own GPT class through its tape, in bfloat16 with float32 masters, captured in a CUDA graph; PyTorch
the same model in bfloat16 autocast with fused AdamW, as it is and through torch.compile. Variants take turns, because a
hot card slows down over minutes: a ratio is the median over neighbouring turns, with the 10% and 90% quantiles in
brackets. Nobody clips. Loss curves are of the same model on the same text, in bfloat16 and in float32, for five seeds.

With CUPY_TF32=1 both compute in float32 with products in TF32, and there are no loss curves.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import cupy as cp
import numpy as np
from engine import Line, ratio

import minigrad as mg
from minigrad.backend import gpu_name, to_device, uses_tf32
from minigrad.cuda_graph import CapturedStep
from minigrad.models import GPT, GPTConfig
from minigrad.optim import AdamW, Optimizer
from minigrad.precision import use_precision

RESULTS = Path(__file__).parent / "results"
LEARNING_RATE = 3e-4
SIZES: dict[str, tuple[int, dict[str, int]]] = {  # batch, and the model
    "gpt2": (8, {"vocab_size": 50304, "context": 1024, "num_layers": 12, "num_heads": 12, "width": 768}),
    "baby": (64, {"vocab_size": 65, "context": 256, "num_layers": 6, "num_heads": 6, "width": 384}),
    "nano-cpu": (12, {"vocab_size": 65, "context": 64, "num_layers": 4, "num_heads": 4, "width": 128}),
}
SPEED_TARGETS = {"gpt2": 1.25, "baby": 2.0, "nano-cpu": 10.0}  # times the tokens/s of PyTorch's best
TF32_SPEED_TARGET = 1.0
MEMORY_TARGET_GIB = 7.0  # of gpt2
LOSS_TARGET_NATS = 0.01
NUM_SEEDS = 5
TURN_SECONDS = 0.5
Step = Callable[[], Any]


def random_tokens(size: str) -> tuple[Any, Any]:
    batch, model = SIZES[size]
    ids = np.random.default_rng(0).integers(0, model["vocab_size"], (batch, model["context"] + 1))
    return ids[:, :-1].copy(), ids[:, 1:].copy()


class Ours:
    """minigrad's step, as it is and captured."""

    def __init__(self, size: str, precision: str = "bfloat16") -> None:
        model = GPT(GPTConfig(**SIZES[size][1]), device="cuda")
        self.optimizer = Optimizer(model.parameters(), AdamW(LEARNING_RATE))
        use_precision(model.parameters(), precision)
        self.model = model
        self.graph = CapturedStep(self.step, self.optimizer)

    def step(self, x: Any, y: Any) -> Any:
        self.optimizer.zero_grad()
        loss = mg.cross_entropy(self.model(x), y)
        mg.backward(loss)
        self.optimizer.step()
        return loss


def torch_steps(size: str) -> dict[str, Step]:
    """Return PyTorch's steps: as it is, and compiled."""
    import torch
    from torch_gpt import TorchGPT

    torch.set_float32_matmul_precision("high")
    x, y = (torch.from_numpy(ids).cuda() for ids in random_tokens(size))

    def new_step(compiled: bool) -> Step:
        torch.manual_seed(0)
        net = TorchGPT(**SIZES[size][1]).cuda()
        optimizer = net.adamw(lr=LEARNING_RATE, fused=True)
        loss_of = torch.compile(net.loss) if compiled else net.loss

        def step() -> Any:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=not uses_tf32()):
                loss = loss_of(x, y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    return {"PyTorch, eager": new_step(False), "PyTorch, torch.compile": new_step(True)}


def seconds_a_step(step: Step, num_steps: int) -> float:
    cp.cuda.Device().synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    cp.cuda.Device().synchronize()
    return (time.perf_counter() - start) / num_steps


def speed(size: str, num_rounds: int, *, peers: bool) -> Iterator[Line]:
    """Time a training step of each variant, in turn."""
    ours = Ours(size, "float32" if uses_tf32() else "bfloat16")
    host = random_tokens(size)
    x, y = map(to_device, host)
    steps: dict[str, Step] = {"minigrad, graph": lambda: ours.graph(x, y), "minigrad, eager": lambda: ours.step(x, y)}
    seconds: dict[str, list[float]] = {}
    for _ in range(4):
        steps["minigrad, graph"]()
    peak_gib = (cp.get_default_memory_pool().total_bytes() + ours.graph.pool_bytes) / 2**30
    if peers:
        steps |= torch_steps(size)
    num_steps = {}
    for name, step in steps.items():  # warm, compiled, and timed once
        seconds_a_step(step, 3)
        num_steps[name] = max(2, int(TURN_SECONDS / seconds_a_step(step, 3)))
    for _ in range(num_rounds):
        for name, step in steps.items():
            seconds.setdefault(name, []).append(seconds_a_step(step, num_steps[name]))
    tokens = SIZES[size][0] * SIZES[size][1]["context"]
    for name, values in seconds.items():
        yield Line(f"{size}, a step: {name}", 1e3 * median(values), "ms")
        yield Line(f"{size}, thousand tokens/s: {name}", tokens / median(values) / 1e3, "k")
    yield Line(f"{size}: launches of the graph", ours.graph.num_launches, "")
    target = MEMORY_TARGET_GIB if size == "gpt2" and not uses_tf32() else None
    yield Line(f"{size}: memory of the card, minigrad", peak_gib, "GiB", target)
    if peers:
        rival = min((name for name in steps if "PyTorch" in name), key=lambda name: median(seconds[name]))
        what = f"{size}: minigrad's time / {rival}"
        yield ratio(
            what,
            seconds["minigrad, graph"],
            seconds[rival],
            1 / (TF32_SPEED_TARGET if uses_tf32() else SPEED_TARGETS[size]),
        )


def losses(precision: str, num_steps: int, seed: int) -> float:
    """Return the mean loss of the last 50 steps of `baby` on English text; weights and batches follow the seed."""
    from pydoc_data.topics import topics

    batch, model = 32, SIZES["baby"][1] | {"vocab_size": 256}
    net = GPT(GPTConfig(**model), device="cuda", seed=seed)
    optimizer = Optimizer(net.parameters(), AdamW(1e-3, betas=(0.9, 0.95)), max_norm=1.0)
    use_precision(net.parameters(), precision)
    text = np.frombuffer("".join(topics.values()).encode(), np.uint8).astype(np.int64)
    generator = np.random.default_rng(seed)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = mg.cross_entropy(net(x), y)
        mg.backward(loss)
        optimizer.step()
        return loss

    captured, found = CapturedStep(step, optimizer), []
    for _ in range(num_steps):
        starts = generator.integers(len(text) - model["context"] - 1, size=(batch, 1))
        ids = text[starts + np.arange(model["context"] + 1)]
        found.append(captured(ids[:, :-1].copy(), ids[:, 1:].copy()).data.copy())
    mean = float(np.mean([float(loss) for loss in found[-50:]]))
    captured.clear()
    return mean


def curves(num_steps: int) -> Iterator[Line]:
    """Compare two precisions over seeds: one run is as good as chance, and its loss a few hundredths off the next."""
    found = {p: np.array([losses(p, num_steps, seed) for seed in range(NUM_SEEDS)]) for p in ("float32", "bfloat16")}
    what = f"baby on text, {num_steps} steps, last 50"
    for precision, values in found.items():
        yield Line(f"{what}: {precision}, mean of {NUM_SEEDS} seeds", values.mean(), "nats")
        yield Line(f"{what}: {precision}, spread of the seeds", values.std(ddof=1), "nats")
    off = found["bfloat16"] - found["float32"]
    yield Line("baby on text: bfloat16 off float32, mean", abs(off.mean()), "nats", LOSS_TARGET_NATS)
    yield Line("baby on text: standard error of that", off.std(ddof=1) / NUM_SEEDS**0.5, "nats")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--loss-steps", type=int, default=300, help="of the loss curves; 0 leaves them out")
    parser.add_argument("--no-peers", action="store_true", help="measure minigrad alone")
    args = parser.parse_args()
    driver = cp.cuda.runtime.driverGetVersion()
    head = f"{gpu_name()}, CUDA driver {driver}, CuPy {cp.__version__}, Python {platform.python_version()}"
    if not args.no_peers:
        import torch

        head += f", PyTorch {torch.__version__}"
    lines = [head]
    if uses_tf32():
        head += ", TF32"
    print(head, flush=True)

    def report(found: Iterator[Line]) -> None:
        for line in found:
            lines.append(str(line))
            print(line, flush=True)

    for size in args.sizes:
        report(speed(size, args.rounds, peers=not args.no_peers))
        cp.get_default_memory_pool().free_all_blocks()
    if args.loss_steps and not uses_tf32():
        report(curves(args.loss_steps))
    if len(sys.argv) == 1:  # only what the command makes by default is kept
        (RESULTS / ("gpu_tf32.txt" if uses_tf32() else "gpu.txt")).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
