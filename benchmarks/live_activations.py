"""How many micro-batches a pipeline holds, counted on the arrays themselves, through weak references."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

import minigrad as mg
from distributed import Communicator
from minigrad import nn
from pipeline import PipelineExecutor, PipelineStage, Schedule

WIDTH = 4


class CountedLayer(nn.Module):
    """tanh(x @ w + b), which notes the activation of every forward: its backward's input half needs it, and no more.

    Attributes:
        peak: the most micro-batches whose activation was somewhere in memory at a time.
    """

    def __init__(self, param: nn.ParamGetter) -> None:
        self.linear = nn.Linear(param, WIDTH, WIDTH)
        self.peak = 0
        self._activations: list[weakref.ref[Any]] = []

    def __call__(self, x: Any) -> mg.Tensor:
        h = mg.tanh(self.linear(x))
        self._activations.append(weakref.ref(h.data))
        self.peak = max(self.peak, self.num_alive())
        return h * 1.0  # another array: the next stage may keep its input for longer

    def num_alive(self) -> int:
        return sum(activation() is not None for activation in self._activations)


def live_activations(comm: Communicator, schedule: Schedule, num_microbatches: int) -> dict[int, tuple[int, int]]:
    """Train two steps with one layer a stage.

    Returns:
        Of each stage on this rank, the peak, and what is left after the steps.
    """

    def layer(name: str) -> Any:
        return name, lambda param: CountedLayer(param.at(name))

    layers = [layer(f"layer{i}") for i in range(schedule.num_stages(comm.size))]
    stages = PipelineStage.of(layers, comm, schedule)
    pipe = PipelineExecutor(stages, comm, schedule, num_microbatches=num_microbatches, loss_fn=mg.mse)
    x = np.ones((num_microbatches, WIDTH), np.float32)
    for _ in range(2):
        pipe.step(x, x)
    return {stage.stage_id: (layer.peak, layer.num_alive()) for stage in stages for layer in stage.layers}
