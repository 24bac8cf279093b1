"""Show where a training step's time goes: by kind of op, beside the least that its products and its bytes need.

    python benchmarks/step_profile.py nano-cpu

    products   the op's matrix products alone, again and again in the same memory: what BLAS needs at best
    bytes      reading each input and writing each output once, forward and backward, as fast as a copy of a large array

Each call counts with its fastest run of several steps, so that a busy machine is no matter. What an op takes beyond its
products is passes over memory, of which the products' own operands are a part: in a step they come from further away.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from engine_jobs import LEARNING_RATE, SIZES, products_by_op, random_text

import minigrad as mg
from minigrad import kernels
from minigrad.mode import Seen, hooked_by
from minigrad.models import GPT, GPTConfig
from minigrad.optim import AdamW, Optimizer
from minigrad.tape import Node

NUM_STEPS = {"tiny": 5, "nano-cpu": 20, "baby": 4}
COPY_BYTES = 64 << 20  # of the array whose copying gives the speed of memory
OPTIMIZER_PASSES = 7  # AdamW reads values, gradients and two states, and writes all but the gradients


class Calls:
    """An op hook that notes each call's op, seconds and bytes, in the order in which they run."""

    def __init__(self) -> None:
        self.forward_calls: list[tuple[str, float, int]] = []
        self.backward_calls: list[tuple[str, float, int]] = []

    def forward(self, name: str, function: Any, arrays: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Seen]:
        (y, vjps), taken = timed(lambda: function(*arrays, **kwargs))
        moved = y.nbytes + sum(getattr(x, "nbytes", 0) for x in arrays)
        self.forward_calls.append((name, taken, moved))
        return y, vjps, Seen("", taken)

    def backward(self, node: Node, vjp: Any, g: Any) -> Any:
        result, taken = timed(lambda: vjp(g))
        self.backward_calls.append((node.name, taken, g.nbytes + getattr(result, "nbytes", 0)))
        return result

    def module(self, module: Any) -> AbstractContextManager[None]:
        return nullcontext()


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def fastest(call: Callable[[], Any], times: int) -> float:
    return min(timed(call)[1] for _ in range(times))


def by_op(steps: list[list[tuple[str, float, int]]]) -> tuple[dict[str, float], dict[str, int]]:
    """Return seconds and bytes by op, of each call the fastest of all steps."""
    seconds: dict[str, float] = defaultdict(float)
    moved: dict[str, int] = defaultdict(int)
    for same_call in zip(*steps, strict=True):
        name, _, size = same_call[0]
        seconds[name] += min(taken for _, taken, _ in same_call)
        moved[name] += size
    return seconds, moved


def report(size: str, num_steps: int) -> Iterator[str]:
    """Train for some steps; yield the lines of the table."""
    model = GPT(GPTConfig(**SIZES[size]))
    optimizer = Optimizer(model.parameters(), AdamW(LEARNING_RATE))
    x, y = random_text(size)
    calls, between, updates = [], [], []
    for _ in range(num_steps + 1):
        optimizer.zero_grad()
        with hooked_by(noted := Calls()):
            start = time.perf_counter()
            mg.backward(mg.cross_entropy(model(x), y))
            ended = time.perf_counter() - start
        updates.append(timed(optimizer.step)[1])
        calls.append(noted)
        between.append(ended - sum(taken for _, taken, _ in noted.forward_calls + noted.backward_calls))
    forward, read = by_op([noted.forward_calls for noted in calls[1:]])  # the first step compiles
    backward, written = by_op([noted.backward_calls for noted in calls[1:]])
    products = {
        name: sum(fastest(partial(np.matmul, *product), num_steps) for product in group)
        for name, group in products_by_op(size).items()
    }
    source, target = np.ones(COPY_BYTES, np.uint8), np.ones(COPY_BYTES, np.uint8)
    seconds_a_byte = fastest(lambda: np.copyto(target, source), 5) / (2 * COPY_BYTES)

    rows = {
        name: (forward[name], backward[name], products.get(name, 0.0), (read[name] + written[name]) * seconds_a_byte)
        for name in sorted(forward, key=lambda name: -forward[name] - backward[name])
    }
    num_bytes = OPTIMIZER_PASSES * sum(p.data.nbytes for p in model.parameters())
    rows["the optimizer"] = (min(updates[1:]), 0.0, 0.0, num_bytes * seconds_a_byte)
    rows["the tape"] = (min(between[1:]), 0.0, 0.0, 0.0)  # and sums of cotangents
    total = sum(row[0] + row[1] for row in rows.values())
    yield f"{size}, one thread, {kernels.describe()}: the fastest of {num_steps} steps, call by call; ms"
    yield f"{'':<22}{'forward':>9}{'backward':>10}{'share':>8}{'products':>10}{'bytes':>8}"
    rows["all"] = tuple(map(sum, zip(*rows.values(), strict=True)))  # type: ignore[assignment]
    for name, (one, two, alone, memory) in rows.items():
        floors = f"{1e3 * alone:>10.2f}{1e3 * memory:>8.2f}"
        yield f"{name:<22}{1e3 * one:>9.2f}{1e3 * two:>10.2f}{(one + two) / total:>8.1%}{floors}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=list(SIZES))
    args = parser.parse_args()
    for line in report(args.size, NUM_STEPS[args.size]):
        print(line)


if __name__ == "__main__":
    main()
