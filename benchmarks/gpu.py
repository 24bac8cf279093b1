"""A training step on one GPU beside PyTorch's, in the same process on the same card.

    make bench-gpu
    make bench-gpu MINUTES=3                                 measure for so long; the same command goes on
    python benchmarks/gpu.py --sizes nano-cpu baby --rounds 5

minigrad trains its own GPT class through its tape, in bfloat16 with float32 masters, captured in a CUDA graph; PyTorch
the same model in bfloat16 autocast with fused AdamW, as it is and through torch.compile. Variants take turns, because a
hot card slows down over minutes: a ratio is the median over neighbouring turns, with the 10% and 90% quantiles in
brackets. Nobody clips.

Losses are of the same model on the same text in bfloat16 and in float32, in pairs of runs that have the same seed, so
the same first weights and the same batches in the same order. A difference in the last bit grows within some hundred
steps to another run of the same kind, so pairs differ by chance, too, and only their mean tells.

With CUPY_TF32=1 both compute in float32 with products in TF32, and there are no loss curves.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import cupy as cp
import numpy as np
from engine import Line, ratio
from results_file import FOLDER, keep

import minigrad as mg
from minigrad.backend import gpu_name, to_device, uses_tf32
from minigrad.cuda_graph import CapturedStep
from minigrad.lr_schedule import warmup_cosine
from minigrad.models import GPT, GPTConfig
from minigrad.optim import AdamW, Optimizer
from minigrad.precision import use_precision

UNFINISHED = Path("runs/gpu")  # what is measured, until all is
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
LOSS_STEPS, LOSS_BATCH, LAST_STEPS = 300, 32, 50
NUM_SEEDS = 20
NUM_ROUNDS = 7
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
    start = time.perf_counter()

    def note(what: str) -> None:
        print(f"{size}: {what}, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)

    gc.collect()  # of the size before
    cp.get_default_memory_pool().free_all_blocks()
    to_device(np.zeros(1))  # CUDA is there
    free_before = cp.cuda.runtime.memGetInfo()[0]
    ours = Ours(size, "float32" if uses_tf32() else "bfloat16")
    x, y = map(to_device, random_tokens(size))
    steps: dict[str, Step] = {"minigrad, graph": lambda: ours.graph(x, y), "minigrad, eager": lambda: ours.step(x, y)}
    seconds: dict[str, list[float]] = {}
    for _ in range(4):
        steps["minigrad, graph"]()
    cp.cuda.Device().synchronize()
    card_gib = (free_before - cp.cuda.runtime.memGetInfo()[0]) / 2**30
    if peers:
        steps |= torch_steps(size)
    num_steps = {}
    for name, step in steps.items():  # warm, compiled, and timed once
        seconds_a_step(step, 3)
        num_steps[name] = max(2, int(TURN_SECONDS / seconds_a_step(step, 3)))
        note(f"{name} is ready")
    for i in range(num_rounds):
        for name, step in steps.items():
            seconds.setdefault(name, []).append(seconds_a_step(step, num_steps[name]))
        note(f"round {i + 1} of {num_rounds}")
    tokens = SIZES[size][0] * SIZES[size][1]["context"]
    for name, values in seconds.items():
        yield Line(f"{size}, a step: {name}", 1e3 * median(values), "ms")
        yield Line(f"{size}, thousand tokens/s: {name}", tokens / median(values) / 1e3, "k")
    yield Line(f"{size}: launches of the graph", ours.graph.num_launches, "")
    target = MEMORY_TARGET_GIB if size == "gpt2" and not uses_tf32() else None
    yield Line(f"{size}: memory of the card, minigrad", card_gib, "GiB", target)
    if peers:
        rival = min((name for name in steps if "PyTorch" in name), key=lambda name: median(seconds[name]))
        target = 1 / (TF32_SPEED_TARGET if uses_tf32() else SPEED_TARGETS[size])
        yield ratio(f"{size}: minigrad's time / {rival}", seconds["minigrad, graph"], seconds[rival], target)
    ours.graph.clear()


def loss_on_text(precision: str, num_steps: int, seed: int) -> float:
    """Return the mean loss of the last steps of `baby` on English text; weights and batches follow the seed."""
    from pydoc_data.topics import topics

    model = SIZES["baby"][1] | {"vocab_size": 256}
    net = GPT(GPTConfig(**model), device="cuda", seed=seed)
    lr = warmup_cosine(1e-3, num_steps=num_steps, num_warmup_steps=num_steps // 10, floor=1e-4)
    optimizer = Optimizer(net.parameters(), AdamW(lr, betas=(0.9, 0.95)), max_norm=1.0)
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
        starts = generator.integers(len(text) - model["context"] - 1, size=(LOSS_BATCH, 1))
        ids = text[starts + np.arange(model["context"] + 1)]
        found.append(captured(ids[:, :-1].copy(), ids[:, 1:].copy()).data.copy())
    mean = float(np.mean([float(loss) for loss in found[-LAST_STEPS:]]))
    captured.clear()
    return mean


def compared(pairs: Sequence[tuple[float, float]], num_steps: int) -> Iterator[Line]:
    """Compare losses in float32 and in bfloat16, a pair for each seed."""
    single, half = np.array(pairs).T
    what = f"baby on text, {num_steps} steps, last {LAST_STEPS}"
    for precision, values in (("float32", single), ("bfloat16", half)):
        yield Line(f"{what}: {precision}, mean of {len(values)} seeds", values.mean(), "nats")
        yield Line(f"{what}: {precision}, spread of the seeds", values.std(ddof=1), "nats")
    less = half - single
    yield Line("baby on text: bfloat16 less float32, mean of the pairs", less.mean(), "nats")
    yield Line("baby on text: how far that is off", abs(less.mean()), "nats", LOSS_TARGET_NATS)
    yield Line("baby on text: its standard error", less.std(ddof=1) / len(less) ** 0.5, "nats")


Piece = tuple[str, Callable[[], Any]]


def pieces(args: argparse.Namespace) -> Iterator[Piece]:
    """Yield what is measured, by name: each gives what JSON can keep, and says what it has found."""

    def lines_of(size: str) -> list[str]:
        lines = [str(line) for line in speed(size, args.rounds, peers=not args.no_peers)]
        print("\n".join(lines), flush=True)
        return lines

    def pair_of(seed: int) -> list[float]:
        pair = [loss_on_text(precision, args.loss_steps, seed) for precision in ("float32", "bfloat16")]
        print(f"seed {seed}: float32 {pair[0]:.4f}, bfloat16 {pair[1]:.4f}", file=sys.stderr, flush=True)
        return pair

    for size in args.sizes:
        yield size, lambda size=size: lines_of(size)
    if args.loss_steps and not uses_tf32():
        for seed in range(args.seeds):
            yield f"seed {seed}", lambda seed=seed: pair_of(seed)


def measure(wanted: Sequence[Piece], found: dict[str, Any], seconds: float, kept: Path | None) -> bool:
    """Go on with what is not yet found, at least by one piece, for about so long; return whether all is there.

    Args:
        wanted: by name.
        found: by name, of earlier calls too; what is measured is added.
        kept: where it is written after each piece.
    """
    start = time.perf_counter()
    missing = [(name, find) for name, find in wanted if name not in found]
    for i, (name, find) in enumerate(missing):
        if i and time.perf_counter() - start > seconds:
            return False
        found[name] = find()
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(found))
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--loss-steps", type=int, default=LOSS_STEPS, help="of the losses on text; 0 leaves them out")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="of the losses on text")
    parser.add_argument("--no-peers", action="store_true", help="measure minigrad alone")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of measuring (default: until all is measured)")
    args = parser.parse_args()
    defaults = vars(parser.parse_args([])) | {"minutes": args.minutes}
    driver = cp.cuda.runtime.driverGetVersion()
    head = f"{gpu_name()}, CUDA driver {driver}, CuPy {cp.__version__}, Python {platform.python_version()}"
    if not args.no_peers:
        import torch

        head += f", PyTorch {torch.__version__}"
    if uses_tf32():
        head += ", TF32"
    print(head, flush=True)

    results = FOLDER / ("gpu_tf32.txt" if uses_tf32() else "gpu.txt")
    kept = UNFINISHED / results.with_suffix(".json").name if vars(args) == defaults else None
    found = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    if found.get("head") != head:  # another machine's
        found = {"head": head}
    wanted = list(pieces(args))
    if not measure(wanted, found, 60 * args.minutes, kept):
        print(f"unfinished: the same command goes on with {kept or 'nothing'}")
        return
    lines = [line for size in args.sizes for line in found[size]]
    pairs = [found[name] for name, _ in wanted if name.startswith("seed")]
    if len(pairs) > 1:
        of_losses = [str(line) for line in compared(pairs, args.loss_steps)]
        print("\n".join(of_losses))
        lines += of_losses
    keep([head, *lines], results, is_default=kept is not None)
    if kept is not None:
        kept.unlink()


if __name__ == "__main__":
    main()
