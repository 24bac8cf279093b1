"""A job of `ddp.py`: the same GPT in PyTorch's DistributedDataParallel over gloo. Rank 0 prints a line of JSON.

    mpirun -n 2 python benchmarks/ddp_torch.py nano-cpu --batch 12 --turns 3 --port 29500 --mebibytes 25 1
    python benchmarks/ddp_torch.py nano-cpu --batch 24 --turns 3 --threads 2

mpirun only starts the ranks, where it starts those of `ddp_minigrad.py`. With --threads there are no ranks: one
process trains with that many threads.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from engine_jobs import LEARNING_RATE, SIZES
from interleave import STEPS_A_TURN, Turnstile, take_turns
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch_gpt import TorchGPT

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")  # Open MPI, MPICH


def gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def join(port: int) -> int:
    """Meet the other rank, with one thread; return this one's rank."""
    torch.set_num_threads(1)
    rank = next(int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ)
    meeting = f"tcp://{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{port}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    return rank


def leave() -> NoReturn:
    """End this process once the other rank is here too, without ending gloo's threads: that aborts now and then."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def training_step(size: str, batch: int, mebibytes: float | None) -> Callable[[], None]:
    """Return a step of a model of its own.

    Args:
        mebibytes: the size of DDP's buckets; None: no DDP.
    """
    model = TorchGPT(**SIZES[size])
    forward: Callable[[torch.Tensor], torch.Tensor] = model
    if mebibytes is not None:
        forward = DistributedDataParallel(
            model, bucket_cap_mb=mebibytes, gradient_as_bucket_view=True, static_graph=True
        )
    optimizer = model.adamw(lr=LEARNING_RATE, fused=True)  # the fastest of the three that it has
    rows = torch.randint(SIZES[size]["vocab_size"], (batch, SIZES[size]["context"] + 1))
    x, y = rows[:, :-1].contiguous(), rows[:, 1:].flatten()

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(forward(x).flatten(0, 1), y).backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=list(SIZES))
    parser.add_argument("--batch", type=int, required=True, help="sequences a rank")
    parser.add_argument("--turns", type=int, required=True, help="of a few steps")
    parser.add_argument("--steps", type=int, default=STEPS_A_TURN, help="of a turn (default: %(default)s)")
    parser.add_argument("--port", type=int, help="of rank 0's host, MASTER_ADDR, where ranks meet")
    parser.add_argument("--mebibytes", type=float, nargs="+", default=[25], help="of a bucket, each a variant")
    parser.add_argument("--threads", type=int, help="train in one process")
    parser.add_argument("--turnstile", nargs=2, metavar=("FILE", "NAME"), help="take turns with other jobs")
    args = parser.parse_args()
    turnstile = Turnstile(Path(args.turnstile[0]), args.turnstile[1]) if args.turnstile else None
    if args.threads:
        torch.set_num_threads(args.threads)
        steps = {"torch": training_step(args.size, args.batch, None)}
        alone: dict[str, Any] = {"barrier": int, "gather": lambda x: [x]}
        print(json.dumps(take_turns(steps, args.turns, **alone, steps_a_turn=args.steps, turnstile=turnstile)))
        return
    rank = join(args.port)
    steps = {f"{size:g} MiB": training_step(args.size, args.batch, size) for size in args.mebibytes}
    ranks: dict[str, Any] = {"barrier": dist.barrier, "gather": gather}
    result = take_turns(steps, args.turns, **ranks, steps_a_turn=args.steps, turnstile=turnstile)
    if rank == 0:
        print(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
