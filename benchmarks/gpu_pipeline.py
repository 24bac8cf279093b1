"""A pipeline on GPUs over NCCL, GPT-2 124M in bfloat16: each rank has a GPU, a whole step is one graph a rank.

    mpirun -n 2 python -m mpi4py benchmarks/gpu_pipeline.py

Beside each schedule the same micro-batches on one card, one after the other, and the ideal: how much faster the
simulator has the schedule where messages take no time. Stages are cut, and simulated, by the time of a block and of
the head, which one card tells from steps of 12 and of 6 blocks. With one rank only the one card is measured. Variants
take turns, and all ranks start a turn together. Nobody clips.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import cupy as cp
import numpy as np
from engine import Line
from gpu import LEARNING_RATE, SIZES
from gpu_ddp import measured

import minigrad as mg
from distributed import Communicator, SoloCommunicator, local_rank, world
from minigrad.backend import gpu_name, to_device, use_gpu
from minigrad.cuda_graph import CapturedStep
from minigrad.models import gpt
from minigrad.optim import AdamW, Optimizer
from minigrad.precision import use_precision
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage, cut_by_weights, simulate

TRAINED = ("1f1b", "zero_bubble_h1", "zbv")
NUM_MICROBATCHES = 8
ALONE = "one card"
Step = Callable[[], Any]


class Training:
    """A GPT in training on the ranks of `comm`, cut into stages by the weights of its layers."""

    def __init__(
        self, comm: Communicator, model: Mapping[str, int], schedule: str, size: int, weights: list[float] | None = None
    ) -> None:
        config = gpt.GPTConfig(**model)
        layers, order = gpt.layers(config), SCHEDULES[schedule]
        weights = weights or [1.0] * len(layers)
        specs = cut_by_weights([name for name, _ in layers], weights, order.num_stages(comm.size))
        self.work = [sum(weights[spec.layer_start : spec.layer_stop]) for spec in specs]
        self.stages = PipelineStage.of(layers, comm, order, specs=specs, device="cuda")
        self.pipe = PipelineExecutor(
            self.stages, comm, order, num_microbatches=NUM_MICROBATCHES, loss_fn=mg.cross_entropy
        )
        self._optimizer = Optimizer(self.stages.parameters(), AdamW(LEARNING_RATE))
        use_precision(self.stages.parameters(), "bfloat16")
        shape = (size * NUM_MICROBATCHES, config.context + 1)
        ids = np.random.default_rng(0).integers(0, config.vocab_size, shape)
        self.batch = to_device(ids[:, :-1].copy()), to_device(ids[:, 1:].copy())
        self.graph = CapturedStep(self._step, self._optimizer, gather=comm.gather_objects)

    def step(self) -> Any:
        return self.graph(*self.batch)

    def _step(self, x: Any, y: Any) -> Any:
        self._optimizer.zero_grad()
        loss = self.pipe.step_on_device(x, y)
        self._optimizer.step()
        return loss


def layer_weights(comm: Communicator, size: str, alone: Training, microbatch_size: int) -> list[float]:
    """Return the seconds of each layer on one card, as rank 0 has them. Collective.

    The embedding, which takes little, counts with the head.
    """
    num_layers = SIZES[size][1]["num_layers"]
    half = Training(SoloCommunicator(), SIZES[size][1] | {"num_layers": num_layers // 2}, "1f1b", microbatch_size)
    seconds = measured({"all": alone.step, "half": half.step}, comm, 3)
    whole, part = (median(seconds[name]) for name in ("all", "half"))
    half.graph.clear()
    block = (whole - part) / (num_layers - num_layers // 2)
    weights: list[float] = comm.broadcast_object([0.0, *[block] * num_layers, whole - num_layers * block])
    return weights


def ideal(schedule: str, num_ranks: int, work: list[float]) -> float:
    """Return how many times as fast as one card a schedule would be, its stages taking time as they have work."""
    order = SCHEDULES[schedule]
    made = simulate(
        order.orders(num_ranks, NUM_MICROBATCHES),
        num_stages=order.num_stages(num_ranks),
        forward=work,
        backward_input=work,
        backward_weight=work,
    )
    return 3 * NUM_MICROBATCHES * sum(work) / made.makespan


def report(size: str, trainings: dict[str, Training], seconds: dict[str, list[float]], ranks: int) -> Iterator[Line]:
    alone = median(seconds[ALONE])
    tokens = SIZES[size][1]["context"] * NUM_MICROBATCHES
    for name, values in seconds.items():
        training = trainings[name]
        what = f"{size}, m = {NUM_MICROBATCHES}, {name}"
        yield Line(f"{what}: a step", 1e3 * median(values), "ms")
        batch = len(training.batch[0]) // NUM_MICROBATCHES
        yield Line(f"{what}: thousand tokens/s", batch * tokens / median(values) / 1e3, "k")
        if name != ALONE:
            faster, best = alone / median(values), ideal(name, ranks, training.work)
            yield Line(f"{what}: times one card", faster, "x")
            yield Line(f"{what}: times one card, simulated", best, "x")
            yield Line(f"{what}: ideal time over measured", faster / best, "x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="gpt2", choices=list(SIZES))
    parser.add_argument("--microbatch-size", type=int, default=4)
    parser.add_argument("--schedules", nargs="*", default=TRAINED, choices=list(SCHEDULES))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    use_gpu(local_rank())
    comm = world(gpus=True)
    model = SIZES[args.size][1]
    alone = Training(SoloCommunicator(), model, "1f1b", args.microbatch_size)
    trainings = {ALONE: alone}
    if comm.size > 1:
        weights = layer_weights(comm, args.size, alone, args.microbatch_size)
        for schedule in args.schedules:
            trainings[schedule] = Training(comm, model, schedule, args.microbatch_size, weights)
    steps: dict[str, Step] = {name: training.step for name, training in trainings.items()}
    seconds = measured(steps, comm, args.rounds)
    if comm.rank == 0:
        print(f"{comm.size} x {gpu_name()}, {comm.library}, CuPy {cp.__version__}")
        if comm.size > 1:
            block, head = 1e3 * weights[1] / NUM_MICROBATCHES, 1e3 * weights[-1] / NUM_MICROBATCHES
            print(f"a micro-batch of {args.microbatch_size}: a block {block:.2f} ms, the head {head:.2f} ms")
        for line in report(args.size, trainings, seconds, comm.size):
            print(line, flush=True)


if __name__ == "__main__":
    main()
