"""A job of `pipeline_bench.py`: minigrad, two stages. Rank 0 prints what was measured as one line of JSON.

mpirun -n 2 python benchmarks/pipeline_minigrad.py baby --microbatches 8 --turns 2
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import numpy as np
from engine_jobs import BATCH, LEARNING_RATE, SIZES
from interleave import take_turns
from live_activations import live_activations

import minigrad as mg
from distributed import Communicator, SoloCommunicator, world
from minigrad.models import gpt
from minigrad.optim import AdamW, Optimizer
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage, Timeline, cut_by_weights, simulate
from pipeline.schedules.measured import predict, timeline

RECORDED = ("1f1b", "zero_bubble_h1")
NUM_RECORDED = 7  # steps, before and after the turns


class Training:
    """A GPT in training on the ranks of `comm`, with the stages that the schedule has."""

    def __init__(self, comm: Communicator, size: str, schedule: str, num_microbatches: int) -> None:
        self.comm = comm
        config = gpt.GPTConfig(**SIZES[size])
        layers = gpt.layers(config)
        num_stages = SCHEDULES[schedule].num_stages(comm.size)
        specs = cut_by_weights([name for name, _ in layers], work_of_layers(config), num_stages)
        self.stages = PipelineStage.of(layers, comm, SCHEDULES[schedule], specs=specs)
        self.pipe = PipelineExecutor(
            self.stages, comm, SCHEDULES[schedule], num_microbatches=num_microbatches, loss_fn=mg.cross_entropy
        )
        self._optimizer = Optimizer(self.stages.parameters(), AdamW(LEARNING_RATE))
        rows = np.random.default_rng(0).integers(0, config.vocab_size, (BATCH[size], config.context + 1))
        self._x, self._y = rows[:, :-1].copy(), rows[:, 1:].copy()

    def step(self) -> None:
        self._optimizer.zero_grad()
        self.pipe.step(self._x, self._y)
        self._optimizer.step()

    def recorded(self) -> Timeline:
        """Run a step and return what ran when, on every rank."""
        self.comm.barrier()
        with self.pipe.recorder:
            self.step()
        return timeline(self.pipe.recorder.gather(self.comm))


def record(pipes: Mapping[str, Training]) -> dict[str, list[Timeline]]:
    """Record some steps of each, in turn."""
    recorded: dict[str, list[Timeline]] = {name: [] for name in pipes}
    for _ in range(NUM_RECORDED):
        for name, training in pipes.items():
            recorded[name].append(training.recorded())
    return recorded


def work_of_layers(config: gpt.GPTConfig) -> list[float]:
    """Return the weights in matrix products of each layer: the time of a layer is about in proportion."""
    return [0.0, *[12.0 * config.width**2] * config.num_layers, float(config.vocab_size * config.width)]


def idle_share(timeline: Timeline) -> float:
    """Return the share of the makespan in which a rank idles, on average over ranks."""
    ranks = range(len(timeline.rows))
    return sum(timeline.makespan_bubble(rank) for rank in ranks) / len(ranks) / timeline.makespan


def peaks(comm: Communicator, num_microbatches: int) -> dict[str, Any]:
    """Count the micro-batches that each stage holds under each schedule, beside the simulator's."""
    found = {}
    for name, schedule in SCHEDULES.items():
        by_rank = comm.gather_objects(live_activations(comm, schedule, num_microbatches))
        stages = sorted((stage, *counts) for rank in by_rank for stage, counts in rank.items())
        orders = schedule.orders(comm.size, num_microbatches)
        simulated = simulate(orders, num_stages=len(stages)).peak_microbatches_per_stage
        found[name] = {
            "peak": [peak for _, peak, _ in stages],
            "left": [left for _, _, left in stages],
            "simulated": simulated,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=list(SIZES))
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True, help="of each variant, one step each")
    args = parser.parse_args()
    comm = world()

    pipes = {name: Training(comm, args.size, name, args.microbatches) for name in RECORDED}
    variants: dict[str, Callable[[], None]] = {name: training.step for name, training in pipes.items()}
    # Both ranks train a whole model each, at the same time: what two busy cores are worth.
    variants["alone"] = Training(SoloCommunicator(), args.size, "gpipe", 1).step
    variants["alone, micro-batches"] = Training(SoloCommunicator(), args.size, "1f1b", args.microbatches).step

    for step in variants.values():
        step()
    earlier = record(pipes)
    predicted = {name: predict(*timelines) for name, timelines in earlier.items()}
    result = take_turns(variants, args.turns, barrier=comm.barrier, gather=comm.gather_objects, steps_a_turn=1)
    later = record(pipes)
    result["idle"] = {
        name: {"predicted": idle_share(predicted[name]), "measured": median(map(idle_share, later[name]))}
        for name in pipes
    }
    orders = {name: SCHEDULES[name].orders(comm.size, args.microbatches) for name in pipes}
    in_halves = earlier["zero_bubble_h1"]  # whose times are enough to simulate the other
    result["makespan"] = {name: predict(*in_halves, orders=orders[name]).makespan for name in pipes}
    result["layers"] = comm.gather_objects([s.spec.layer_stop - s.spec.layer_start for s in pipes["1f1b"].stages])
    result["peaks"] = peaks(comm, args.microbatches)
    if comm.rank == 0:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
