"""What layers of a GPT take on one GPU, as stages of a pipeline run them: graphs of 8 micro-batches in bfloat16.

By these times a GPT is cut into stages, and the simulator makes of them a step of several cards whose messages take
none: what a schedule could reach with such stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any, NamedTuple

import cupy as cp
import numpy as np
from gpu import LEARNING_RATE, seconds_a_step

import minigrad as mg
from minigrad.autodiff.backprop import backward_input, backward_weight
from minigrad.backend import to_device
from minigrad.cuda_graph import CapturedStep
from minigrad.models import gpt
from minigrad.nn import LayerFactory, ParamGetter
from minigrad.optim import AdamW, Optimizer
from minigrad.precision import dtype_of, use_precision
from minigrad.tensor import Tensor
from pipeline import SCHEDULES, simulate

NUM_MICROBATCHES = 8
SHORTEST = 1e-6  # milliseconds of B or W, where the graphs that tell them apart take as long


class Times(NamedTuple):
    """Milliseconds a micro-batch of some layers: F, B and W."""

    forward: float
    backward_input: float
    backward_weight: float

    @staticmethod
    def together(parts: Iterable[Times]) -> Times:
        """Return the times of parts that run one after another."""
        return Times(*map(sum, zip(*parts, strict=True)))

    @property
    def even(self) -> Times:
        """As much work, with F, B and W alike."""
        return Times(*[sum(self) / 3] * 3)

    def __str__(self) -> str:
        f, b, w = self
        return f"F {f:.3f}, B {b:.3f}, W {w:.3f}, in all {sum(self):.3f} ms"


class LayerTimes(NamedTuple):
    """What a GPT takes whose blocks are cut in halves.

    Attributes:
        layers: of each layer.
        optimizer: milliseconds of a step of the optimizer for each parameter.
    """

    layers: list[Times]
    optimizer: float


class Stage:
    """Some layers of a GPT in training, on a micro-batch that stays the same.

    Args:
        layers: of a GPT, whose loss belongs to the head.
    """

    def __init__(self, config: gpt.GPTConfig, layers: Sequence[tuple[str, LayerFactory]], microbatch_size: int) -> None:
        param = ParamGetter(0, np.float32, "cuda")
        self.is_first, self.is_last = layers[0][0] == "embed", layers[-1][0] == "head"
        self.layers = [factory(param) for _, factory in layers]
        params = list(param.made.values())
        self.num_parameters = sum(p.size for p in params)
        self.optimizer = Optimizer(params, AdamW(LEARNING_RATE))
        use_precision(params, "bfloat16")
        generator = np.random.default_rng(0)
        ids = generator.integers(0, config.vocab_size, (microbatch_size, config.context + 1))
        self.x, self.y = to_device(ids[:, :-1].copy()), to_device(ids[:, 1:].copy())
        shape = (microbatch_size, config.context, config.width)
        self.h, g = (to_device(generator.standard_normal(shape).astype(dtype_of("bfloat16"))) for _ in range(2))
        self.g = np.float32(1 / NUM_MICROBATCHES) if self.is_last else g

    def times(self) -> Times:
        forward, with_inputs, whole = (self.milliseconds(halves) / NUM_MICROBATCHES for halves in range(3))
        return Times(forward, max(with_inputs - forward, SHORTEST), max(whole - with_inputs, SHORTEST))

    def milliseconds(self, halves: int, *, beside: Callable[[], AbstractContextManager[None]] = nullcontext) -> float:
        """Return the time of a graph of all micro-batches.

        Args:
            halves: of the backward: none, that of the inputs, or both.
            beside: around what is captured: what runs beside it.
        """

        def step(_: Any) -> None:
            self.optimizer.zero_grad()
            with beside():
                kept = [self._microbatch(halves) for _ in range(NUM_MICROBATCHES)]
            del kept

        return self._milliseconds(step)

    def optimizer_milliseconds(self) -> float:
        """Return the time of a graph of the optimizer's step, by gradients that stay the same."""
        return self._milliseconds(lambda _: self.optimizer.step())

    def _milliseconds(self, step: Callable[[Any], None]) -> float:
        captured, nothing = CapturedStep(step, self.optimizer), cp.zeros(1)
        for _ in range(4):
            captured(nothing)
        found = 1e3 * median(seconds_a_step(lambda: captured(nothing), 6) for _ in range(5))
        captured.clear()
        return found

    def _microbatch(self, halves: int) -> Any:
        h: Any = self.x if self.is_first else Tensor(self.h, requires_grad=True)
        for layer in self.layers:
            h = layer(h)
        out = mg.cross_entropy(h, self.y) if self.is_last else h
        if not halves:
            return out
        deferred = backward_input(out, self.g)
        if halves == 2:
            backward_weight(deferred)
        return None


def layer_times(config: gpt.GPTConfig, microbatch_size: int) -> LayerTimes:
    """Measure each kind of layer: all of a kind one after another, as memory is not warm between a stage's layers."""
    embed, *halves, head = gpt.layers(config, half_blocks=True)
    kinds = [[embed], halves[0::2], halves[1::2], [head]]
    stages = [Stage(config, kind, microbatch_size) for kind in kinds]
    first, attention, feed_forward, last = (
        Times(*(time / len(kind) for time in stage.times())) for stage, kind in zip(stages, kinds, strict=True)
    )
    optimizer = sum(stage.optimizer_milliseconds() for stage in stages) / sum(stage.num_parameters for stage in stages)
    return LayerTimes([first, *[attention, feed_forward] * config.num_layers, last], optimizer)


def simulated(schedule: str, num_ranks: int, stages: Sequence[Times]) -> float:
    """Return the milliseconds that all micro-batches take where messages take none."""
    forward, backward_input, backward_weight = map(list, zip(*stages, strict=True))
    made = simulate(
        SCHEDULES[schedule].orders(num_ranks, NUM_MICROBATCHES),
        num_stages=len(stages),
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
    )
    return made.makespan
