"""A job of `pipeline_bench.py`: the same GPT in torch.distributed.pipelining over gloo. Rank 0 prints a line of JSON.

    mpirun -n 2 python benchmarks/pipeline_torch.py baby --microbatches 8 --turns 2 --blocks 3 --port 29500

mpirun only starts the ranks, where it starts those of `pipeline_minigrad.py`. The head has a table of its own: PyTorch
ties no parameters over stages, which spares it a sum.
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.distributed as dist
from ddp_torch import gather, join, leave
from engine_jobs import BATCH, LEARNING_RATE, SIZES
from interleave import take_turns
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy, linear
from torch_gpt import TorchGPT


class FirstStage(nn.Module):
    """Token ids (B, T) -> (B, T, width)."""

    def __init__(self, model: TorchGPT, num_blocks: int) -> None:
        super().__init__()
        self.token, self.position, self.blocks = model.token, model.position, model.blocks[:num_blocks]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x


class LastStage(nn.Module):
    """(B, T, width) -> logits (B, T, vocab_size)."""

    def __init__(self, model: TorchGPT, num_blocks: int) -> None:
        super().__init__()
        self.blocks, self.norm, self.table = model.blocks[num_blocks:], model.norm, model.token.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return linear(self.norm(x), self.table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=list(SIZES))
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True, help="of one step")
    parser.add_argument("--blocks", type=int, required=True, help="of the first stage")
    parser.add_argument("--port", type=int, required=True, help="of rank 0's host, MASTER_ADDR, where ranks meet")
    args = parser.parse_args()
    rank = join(args.port)

    model = TorchGPT(**SIZES[args.size])
    module = (FirstStage, LastStage)[rank](model, args.blocks)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, args.microbatches, loss_fn=lambda y, t: cross_entropy(y.flatten(0, 1), t.flatten()))
    rows = torch.randint(SIZES[args.size]["vocab_size"], (BATCH[args.size], SIZES[args.size]["context"] + 1))
    x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def step() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=[])
        optimizer.step()

    result = take_turns({"torch": step}, args.turns, barrier=dist.barrier, gather=gather, steps_a_turn=1)
    if rank == 0:
        print(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
