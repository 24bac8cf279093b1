"""A job of `ddp.py`: the same GPT in PyTorch's DistributedDataParallel over gloo. Rank 0 prints a line of JSON.

    mpirun -n 2 python benchmarks/ddp_torch.py nano-cpu --batch 12 --turns 3 --port 29500

mpirun only starts the ranks, where it starts those of `ddp_minigrad.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from engine_jobs import LEARNING_RATE, SIZES
from interleave import take_turns
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=list(SIZES))
    parser.add_argument("--batch", type=int, required=True, help="sequences a rank")
    parser.add_argument("--turns", type=int, required=True, help="of a few steps")
    parser.add_argument("--port", type=int, required=True, help="of rank 0's host, MASTER_ADDR, where ranks meet")
    args = parser.parse_args()
    rank = join(args.port)

    model = TorchGPT(**SIZES[args.size])
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = model.adamw(lr=LEARNING_RATE, fused=True)  # the fastest of the three that it has
    rows = torch.randint(SIZES[args.size]["vocab_size"], (args.batch, SIZES[args.size]["context"] + 1))
    x, y = rows[:, :-1].contiguous(), rows[:, 1:].flatten()

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(ddp(x).flatten(0, 1), y).backward()
        optimizer.step()

    result = take_turns({"torch": step}, args.turns, barrier=dist.barrier, gather=gather)
    if rank == 0:
        print(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
