"""The jobs of `engine.py`, one a process: a job prepares itself and returns a function that measures one turn.

    python benchmarks/engine_jobs.py step minigrad baby

Nothing is imported before the job that needs it: imports and memory are among what is measured.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from generation_steps import TEXTS
from pinned_workers import DROPPED, serve

SIZES = {  # of nanoGPT's recipe for a CPU, and of its "baby" GPT; called as in GPTConfig
    "tiny": {"vocab_size": 65, "context": 64, "num_layers": 1, "num_heads": 1, "width": 8},
    "nano-cpu": {"vocab_size": 65, "context": 64, "num_layers": 4, "num_heads": 4, "width": 128},
    "baby": {"vocab_size": 65, "context": 256, "num_layers": 6, "num_heads": 6, "width": 384},
}
BATCH = {"tiny": 1, "nano-cpu": 12, "baby": 8}
STEPS_A_TURN = {"tiny": 1, "nano-cpu": 3, "baby": 1}
LEARNING_RATE = 1e-3
CHAIN = 200  # products
KEY_BLOCK = 64  # rows of the attention matrix at a time: what lies after a block's keys is not computed

IMPORTS = """
from time import process_time
start = process_time()
import numpy
between = process_time()
import minigrad
end = process_time()
import json, sys
mpi = sum(name.partition(".")[0] == "mpi4py" for name in sys.modules)
print(json.dumps({"numpy": between - start, "seconds": end - between, "mpi": mpi}))
"""

Step = Callable[[], Any]


def random_text(size: str) -> tuple[Any, Any]:
    """Return inputs and targets, (batch, context) each."""
    import numpy as np

    shape = (BATCH[size], SIZES[size]["context"] + 1)
    rows = np.random.default_rng(0).integers(0, SIZES[size]["vocab_size"], shape)
    return rows[:, :-1].copy(), rows[:, 1:].copy()


def minigrad_step(size: str, *, exact: bool = False, recompute: bool = False) -> Step:
    """Return a training step of minigrad's GPT.

    Args:
        exact: take the exact GELU.
        recompute: keep only what lies between the blocks.
    """
    import minigrad as mg
    from minigrad.models import GPT, GPTConfig, gpt
    from minigrad.optim import AdamW, Optimizer

    if exact:  # a choice that the model does not offer, in a process that has no other model
        gpt.feed_forward = partial(mg.feed_forward, exact=True)
    model = GPT(GPTConfig(**SIZES[size]))
    optimizer = Optimizer(model.parameters(), AdamW(LEARNING_RATE))
    embed, *blocks, head = model.layers
    x, y = random_text(size)

    def forward() -> mg.Tensor:
        h = embed(x)
        for block in blocks:
            h = mg.recompute(block, h) if recompute else block(h)
        return head(h)

    def step() -> None:
        optimizer.zero_grad()
        mg.backward(mg.cross_entropy(forward(), y))
        optimizer.step()

    return step


def torch_step(size: str, *, gelu: str = "tanh", fused: bool | None = None, compiled: bool = False) -> Step:
    """Return a training step of the same GPT in PyTorch."""
    import torch
    from torch_gpt import TorchGPT

    torch.set_num_threads(1)
    model = TorchGPT(**SIZES[size], gelu=gelu)
    optimizer = model.adamw(lr=LEARNING_RATE, fused=fused)
    loss = torch.compile(model.loss) if compiled else model.loss
    x, y = map(torch.from_numpy, random_text(size))

    def step() -> None:
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()

    return step


def gemm_step(size: str) -> Step:
    """Return the matrix products of a training step through NumPy, each at its own shape, and nothing else."""
    import numpy as np

    calls = matrix_products(size)

    def step() -> None:
        for a, b, out in calls:
            np.matmul(a, b, out)

    return step


def torch_gemm_step(size: str) -> Step:
    """Return the same matrix products through PyTorch, whose BLAS is another one."""
    import torch

    torch.set_num_threads(1)
    calls = [[torch.from_numpy(array) for array in call] for call in matrix_products(size)]

    def step() -> None:
        for a, b, out in calls:
            torch.matmul(a, b, out=out)

    return step


def matrix_products(size: str) -> list[tuple[Any, Any, Any]]:
    """List the matrix products of a training step as (left, right, output), transposed views where it has them."""
    return [product for group in products_by_op(size).values() for product in group]


def products_by_op(size: str) -> dict[str, list[tuple[Any, Any, Any]]]:
    """Return the matrix products of a training step by the op that needs them."""
    import numpy as np

    batch, s = BATCH[size], SIZES[size]
    rows, width, head = batch * s["context"], s["width"], s["width"] // s["num_heads"]

    def array(*shape: int) -> Any:
        return np.ones(shape, np.float32)

    def linear(num_in: int, num_out: int) -> list[tuple[Any, Any]]:
        x, w, g = array(rows, num_in), array(num_in, num_out), array(rows, num_out)
        return [(x, w), (g, w.T), (x.T, g)]

    def attention() -> list[tuple[Any, Any]]:
        pairs = []
        for stop in range(KEY_BLOCK, s["context"] + 1, KEY_BLOCK):
            queries = array(batch, s["num_heads"], KEY_BLOCK, head)
            keys = array(batch, s["num_heads"], stop, head)
            weights = array(batch, s["num_heads"], KEY_BLOCK, stop)
            forward = [(queries, keys.mT), (weights, keys)]
            pairs += [*forward, *forward, (weights.mT, queries), (weights.mT, queries)]  # forward, then ds, dq, dv, dk
        return pairs

    pairs: dict[str, list[tuple[Any, Any]]] = {"linear": [], "feed_forward": [], "causal_attention": []}
    for _ in range(s["num_layers"]):
        pairs["linear"] += linear(width, 3 * width) + linear(width, width)
        pairs["feed_forward"] += linear(width, 4 * width) + linear(4 * width, width)
        pairs["causal_attention"] += attention()
    pairs["unembed"] = linear(width, s["vocab_size"])
    shared: dict[Any, Any] = {}  # as an allocator would reuse them

    def out(a: Any, b: Any) -> Any:
        shape = (*a.shape[:-1], b.shape[-1])
        return shared.setdefault(shape, np.empty(shape, np.float32))

    return {name: [(a, b, out(a, b)) for a, b in group] for name, group in pairs.items()}


STEPS: dict[str, Callable[[str], Step]] = {
    "minigrad": minigrad_step,
    "minigrad-exact": partial(minigrad_step, exact=True),
    "minigrad-recompute": partial(minigrad_step, recompute=True),
    "torch": torch_step,
    "torch-fused": partial(torch_step, fused=True),
    "torch-exact": partial(torch_step, gelu="none"),
    "torch-compile": partial(torch_step, compiled=True),
    "gemm": gemm_step,
    "torch-gemm": torch_gemm_step,
}


def step_seconds(engine: str, size: str) -> Step:
    """Measure a training step, after one that warms up: seconds, the median of a turn's steps."""
    step = STEPS[engine](size)
    step()
    return lambda: median(seconds(step) for _ in range(STEPS_A_TURN[size]))


def text_seconds(writer: str, size: str) -> Step:
    """Measure the writing of one text, after one that warms up."""
    write = TEXTS[writer](SIZES[size])
    write()
    return lambda: seconds(write)


def first_step_seconds(engine: str, size: str) -> Step:
    """Measure what a new process takes until its first training step is done, imports of the engine included."""
    return lambda: seconds(lambda: STEPS[engine](size)())


def step_peak_bytes(engine: str, size: str) -> Step:
    """Measure by how much the memory of three training steps, model included, exceeds that of the loaded engine."""
    STEPS[engine]("tiny")()  # loads what an engine imports only when it is used
    before = status_bytes("VmRSS")

    def turn() -> int:
        step = STEPS[engine](size)
        for _ in range(3):
            step()
        return status_bytes("VmHWM") - before

    return turn


def status_bytes(field: str) -> int:
    """Read a size of this process from the kernel: VmRSS is its memory now, VmHWM the most that it was."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no field {field}")


def chain_seconds(engine: str) -> Step:
    """Measure a chain of tiny products, recorded and walked back: seconds a product, the median of 50 chains."""
    chain = CHAINS[engine]()
    return lambda: median(seconds(chain) for _ in range(50)) / CHAIN


def numpy_chain() -> Step:
    """Return the arithmetic of the chain and of its gradients, by hand."""
    import numpy as np

    x, w, ones = (np.ones(4, np.float32) for _ in range(3))

    def chain() -> Any:
        values = [x]
        for _ in range(CHAIN):
            values.append(values[-1] * w)
        g, grad = ones, np.zeros_like(w)
        for value in values[-2::-1]:
            grad += g * value
            g = g * w
        return grad

    return chain


def minigrad_chain() -> Step:
    import numpy as np

    import minigrad as mg

    x, w = mg.Tensor(np.ones(4, np.float32)), mg.Tensor(np.ones(4, np.float32), requires_grad=True)
    ones = np.ones(4, np.float32)

    def chain() -> None:
        w.grad = None
        y = x
        for _ in range(CHAIN):
            y = y * w
        mg.backward_with_grad(y, ones)

    return chain


def torch_chain() -> Step:
    import torch

    torch.set_num_threads(1)
    x, w, ones = torch.ones(4), torch.ones(4, requires_grad=True), torch.ones(4)

    def chain() -> None:
        w.grad = None
        y = x
        for _ in range(CHAIN):
            y = y * w
        y.backward(ones)

    return chain


CHAINS = {"numpy": numpy_chain, "minigrad": minigrad_chain, "torch": torch_chain}


def import_seconds() -> Step:
    """Measure `import minigrad` after `import numpy`, and that; count what it loads of mpi4py.

    In a new process, as a user's is: this one has loaded much of what NumPy wants of the standard library.
    """

    def turn() -> dict[str, Any]:
        return dict(json.loads(subprocess.check_output([sys.executable, "-c", IMPORTS])))

    return turn


def machine() -> Step:
    """Describe the machine and the libraries as a worker sees them."""
    import numpy as np
    import torch
    from threadpoolctl import threadpool_info

    from minigrad import kernels

    cpuinfo = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
    blas = [
        f"{pool['internal_api']} {pool['version']}, {pool.get('architecture')}"
        for pool in threadpool_info()
        if pool["user_api"] == "blas"
    ]
    settings = torch.__config__.show().replace("\n", ",").split(",")
    linked = [name.partition("=")[2] for name in settings if "BLAS_INFO=" in name]
    lines = [
        f"{platform.machine()}, {names[0] if names else platform.processor()}, {os.cpu_count()} cores; "
        f"without {', '.join(DROPPED)}",
        f"Python {platform.python_version()}; NumPy {np.__version__} (BLAS: {'; '.join(blas)}), {kernels.describe()}; "
        f"PyTorch {torch.__version__} (BLAS: {', '.join(linked)}, {torch.backends.cpu.get_cpu_capability()})",
    ]
    return lambda: lines


def seconds(call: Callable[[], Any]) -> float:
    """Measure CPU time: with one thread that is the time on an idle core, and what neighbours take does not count."""
    start = time.process_time()
    call()
    return time.process_time() - start


JOBS: dict[str, Callable[..., Step]] = {
    "step": step_seconds,
    "first": first_step_seconds,
    "memory": step_peak_bytes,
    "chain": chain_seconds,
    "text": text_seconds,
    "import": import_seconds,
    "machine": machine,
}

if __name__ == "__main__":
    serve(JOBS[sys.argv[1]](*sys.argv[2:]))
