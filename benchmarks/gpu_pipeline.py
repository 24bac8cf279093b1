"""A pipeline on GPUs over NCCL, GPT-2 124M in bfloat16: each rank has a GPU, a whole step is one graph a rank.

    CUDA_DEVICE_MAX_CONNECTIONS=1 mpirun -n 2 python -m mpi4py benchmarks/gpu_pipeline.py

Layers are measured first, on one card: embedding, head and the halves of a block, of which stages are cut. Beside each
schedule stand the same micro-batches on one card, one after the other, and what the simulator has where messages take
no time: the ideal, with F, B and W alike, and a step with F, B and W of each stage's own layers, and its optimizer. Of
1F1B also the formula, p m / (m + p - 1) times one card. With one rank only the one card is measured. Variants take
turns, and all ranks start a turn together. Nobody clips.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import numpy as np
from engine import Line
from gpu import LEARNING_RATE, SIZES
from gpu_ddp import machine, measured
from stage_times import NUM_MICROBATCHES, LayerTimes, Times, layer_times, simulated

import minigrad as mg
from distributed import Communicator, SoloCommunicator, local_rank, world
from minigrad.backend import to_device, use_gpu
from minigrad.cuda_graph import CapturedStep
from minigrad.models import gpt
from minigrad.optim import AdamW, Optimizer
from minigrad.precision import use_precision
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage, cut_by_weights

TRAINED = ("1f1b", "zero_bubble_h1", "zbv")
ALONE = "one card"
Step = Callable[[], Any]


class Training:
    """A GPT in training on the ranks of `comm`, cut into stages by the times of its layers.

    Attributes:
        stage_times: of the stages of all ranks.
        optimizer: milliseconds of its step, on the rank with the most parameters.
    """

    def __init__(
        self, comm: Communicator, config: gpt.GPTConfig, schedule: str, microbatch_size: int, times: LayerTimes
    ) -> None:
        layers, order = gpt.layers(config, half_blocks=True), SCHEDULES[schedule]
        weights = [sum(each) for each in times.layers]
        specs = cut_by_weights([name for name, _ in layers], weights, order.num_stages(comm.size))
        self.cut = ", ".join(f"{layers[spec.layer_start][0]} to {layers[spec.layer_stop - 1][0]}" for spec in specs)
        self.stage_times = [Times.together(times.layers[spec.layer_start : spec.layer_stop]) for spec in specs]
        self.stages = PipelineStage.of(layers, comm, order, specs=specs, device="cuda")
        num_parameters = max(comm.gather_objects(sum(p.size for p in self.stages.parameters())))
        self.optimizer = num_parameters * times.optimizer
        self.pipe = PipelineExecutor(
            self.stages, comm, order, num_microbatches=NUM_MICROBATCHES, loss_fn=mg.cross_entropy
        )
        self._optimizer = Optimizer(self.stages.parameters(), AdamW(LEARNING_RATE))
        use_precision(self.stages.parameters(), "bfloat16")
        shape = (microbatch_size * NUM_MICROBATCHES, config.context + 1)
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


def report(
    size: str, trainings: Mapping[str, Training], seconds: Mapping[str, list[float]], num_ranks: int
) -> Iterator[Line]:
    """Yield what each variant takes, beside what the simulator has for it."""
    alone = median(seconds[ALONE])
    for name, values in seconds.items():
        training, step = trainings[name], median(values)
        what = f"{size}, m = {NUM_MICROBATCHES}, {name}"
        yield Line(f"{what}: a step", 1e3 * step, "ms")
        yield Line(f"{what}: thousand tokens/s", training.batch[0].size / step / 1e3, "k")
        if name != ALONE:
            even = [stage.even for stage in training.stage_times]
            best = NUM_MICROBATCHES * sum(map(sum, even)) / simulated(name, num_ranks, even)
            yield Line(f"{what}: times one card", alone / step, "x")
            yield Line(f"{what}: times one card, simulated", best, "x")
            yield Line(f"{what}: ideal time over measured", alone / best / step, "x")
        if name == "1f1b":
            formula = num_ranks * NUM_MICROBATCHES / (NUM_MICROBATCHES + num_ranks - 1)
            yield Line(f"{what}: times one card, p m / (m + p - 1)", formula, "x")
            yield Line(f"{what}: that time over measured", alone / formula / step, "x")
        order, ranks = ("1f1b", 1) if name == ALONE else (name, num_ranks)
        own = simulated(order, ranks, training.stage_times) + training.optimizer
        yield Line(f"{what}: a step by its layers' times", own, "ms")
        yield Line(f"{what}: layers' times over measured", own / (1e3 * step), "x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="gpt2", choices=list(SIZES))
    parser.add_argument("--microbatch-size", type=int, default=4)
    parser.add_argument("--schedules", nargs="*", default=TRAINED, choices=list(SCHEDULES))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    use_gpu(local_rank())
    comm = world(gpus=True)
    config = gpt.GPTConfig(**SIZES[args.size][1])
    times: LayerTimes = comm.broadcast_object(layer_times(config, args.microbatch_size))
    if comm.rank == 0:
        print(machine(comm))
        names = [name for name, _ in gpt.layers(config, half_blocks=True)]
        for i in (0, 1, 2, len(names) - 1):
            print(f"a micro-batch of {args.microbatch_size}, {names[i]}: {times.layers[i]}", flush=True)
    trainings = {ALONE: Training(SoloCommunicator(), config, "1f1b", args.microbatch_size, times)}
    if comm.size > 1:
        for schedule in args.schedules:
            trainings[schedule] = Training(comm, config, schedule, args.microbatch_size, times)
            if comm.rank == 0:
                print(f"stages of {schedule}: {trainings[schedule].cut}", flush=True)
    steps: dict[str, Step] = {name: training.step for name, training in trainings.items()}
    seconds = measured(steps, comm, args.rounds)
    if comm.rank == 0:
        for line in report(args.size, trainings, seconds, comm.size):
            print(line, flush=True)


if __name__ == "__main__":
    main()
