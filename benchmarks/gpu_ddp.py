"""Data parallelism over NCCL, GPT-2 124M in bfloat16: each rank has a GPU, the whole step is one graph a rank.

    CUDA_DEVICE_MAX_CONNECTIONS=1 mpirun -n 2 python -m mpi4py benchmarks/gpu_ddp.py

Beside it the same step without a reduction, on the same cards, and PyTorch's: DistributedDataParallel and alone.
Variants take turns, back and forth, and all ranks start a turn together; a turn begins with steps that do not count,
since cards that have rested are faster. Parameters are updated in the order in which their buckets arrive
(`step_early`): the table's, which is last, travels beside the updates of all others. With shards (ZeRO 1) each card
updates half of the parameters, and gathers the other half in bfloat16. Hidden is the share of a reduction's own time by
which a step with it is not longer than a step without.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import cupy as cp
import numpy as np
from engine import Line
from gpu import LEARNING_RATE, SIZES, TURN_SECONDS, random_tokens

import minigrad as mg
from distributed import Communicator, DistributedDataParallel, ReduceOp, local_rank, world
from minigrad.backend import gpu_name, to_device, use_gpu
from minigrad.cuda_graph import CapturedStep
from minigrad.models import GPT, GPTConfig
from minigrad.optim import AdamW, Optimizer
from minigrad.precision import use_precision

BUCKET_BYTES = 50 << 20  # twice the default: NVLink is faster with long messages
Step = Callable[[], Any]


def our_steps(size: str, comm: Communicator) -> dict[str, Step]:
    """Return captured steps with and without a reduction, and the reduction alone."""
    x, y = map(to_device, random_tokens(size))

    def new_step(**how: Any) -> tuple[Step, Any]:
        model = GPT(GPTConfig(**SIZES[size][1]), device="cuda")
        ddp = DistributedDataParallel(model, comm, **how) if how else None
        use_precision(model.parameters(), "bfloat16")
        optimizer = (
            Optimizer(model.parameters(), AdamW(LEARNING_RATE)) if ddp is None else ddp.optimizer(AdamW(LEARNING_RATE))
        )

        def step(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = mg.cross_entropy(model(x), y)
            if ddp is None:
                mg.backward(loss)
            else:
                mg.backward_with_hooks(loss, ddp.hooks(num_samples=len(x)))
                ddp.wait()
            optimizer.step()
            return loss

        captured = CapturedStep(step, optimizer, gather=comm.gather_objects)
        return (lambda: captured(x, y)), ddp

    alone, _ = new_step()
    together, ddp = new_step(step_early=True, bucket_bytes=BUCKET_BYTES)
    in_shards, _ = new_step(step_early=True, bucket_bytes=BUCKET_BYTES, zero=1)
    parts = [cp.zeros(b.range.stop - b.range.start, np.float32) for b in ddp.buckets.buckets]

    def reduce() -> None:
        for work in [comm.allreduce(part, op=ReduceOp.SUM) for part in parts]:
            work.wait()

    return {
        "minigrad, one card": alone,
        "minigrad, DDP": together,
        "minigrad, ZeRO 1": in_shards,
        "minigrad, the reduction alone": reduce,
    }


def torch_steps(size: str, comm: Communicator) -> dict[str, Step]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as TorchDDP
    from torch_gpt import TorchGPT

    torch.cuda.set_device(local_rank())
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    dist.init_process_group("nccl", rank=comm.rank, world_size=comm.size)
    torch.set_float32_matmul_precision("high")
    x, y = (torch.from_numpy(ids).cuda() for ids in random_tokens(size))

    class Loss(torch.nn.Module):  # DDP hooks into forward
        def __init__(self) -> None:
            super().__init__()
            self.net = TorchGPT(**SIZES[size][1])

        def forward(self, x: Any, y: Any) -> Any:
            return self.net.loss(x, y)

    def new_step(reduces: bool) -> Step:
        model: Any = Loss().cuda()
        optimizer = model.net.adamw(lr=LEARNING_RATE, fused=True)
        if reduces:
            model = TorchDDP(model, device_ids=[local_rank()], gradient_as_bucket_view=True, static_graph=True)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x, y)
            loss.backward()
            optimizer.step()

        return step

    return {"PyTorch, one card": new_step(False), "PyTorch, DDP": new_step(True)}


def measured(steps: dict[str, Step], comm: Communicator, num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds a step of each variant and round, on the slower rank."""

    def seconds(step: Step, count: int) -> float:
        for number in range(2):
            comm.barrier()
            start = time.perf_counter()
            for _ in range(count if number else count // 2):
                step()
            cp.cuda.Device().synchronize()
        return max(comm.gather_objects((time.perf_counter() - start) / count))

    counts = {}
    for name, step in steps.items():
        seconds(step, 4)
        counts[name] = max(2, int(TURN_SECONDS / seconds(step, 3)))
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(num_rounds):
        for name in reversed(steps) if number % 2 else steps:
            found[name].append(seconds(steps[name], counts[name]))
    return found


def machine(comm: Communicator) -> str:
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "the driver's")
    return f"{comm.size} x {gpu_name()}, {comm.library}, CuPy {cp.__version__}, queues for streams: {queues}"


def report(size: str, seconds: dict[str, list[float]], num_ranks: int) -> Iterator[Line]:
    tokens = SIZES[size][0] * SIZES[size][1]["context"]
    for name, values in seconds.items():
        yield Line(f"{size}: {name}", 1e3 * median(values), "ms")
    for name in ("minigrad, DDP", "minigrad, ZeRO 1", "PyTorch, DDP"):
        if name in seconds:
            library, _ = name.split(", ")
            one, many = (median(seconds[kind]) for kind in (f"{library}, one card", name))
            yield Line(f"{size}: {name}, thousand tokens/s on {num_ranks} cards", num_ranks * tokens / many / 1e3, "k")
            yield Line(f"{size}: {name}, times one card", num_ranks * one / many, "x")
    one, alone = (median(seconds[f"minigrad, {kind}"]) for kind in ("one card", "the reduction alone"))
    for kind in ("DDP", "ZeRO 1"):
        many = median(seconds[f"minigrad, {kind}"])
        yield Line(f"{size}: minigrad, {kind}, share of the reduction hidden", 1 - max(0.0, many - one) / alone, "x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="gpt2", choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-peers", action="store_true", help="measure minigrad alone")
    args = parser.parse_args()
    use_gpu(local_rank())
    comm = world(gpus=True)
    steps = our_steps(args.size, comm)
    seconds = measured(steps, comm, args.rounds)
    if not args.no_peers:
        seconds |= measured(torch_steps(args.size, comm), comm, args.rounds)
    if comm.rank == 0:
        print(machine(comm))
        for line in report(args.size, seconds, comm.size):
            print(line, flush=True)
    if not args.no_peers:
        import torch.distributed

        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
