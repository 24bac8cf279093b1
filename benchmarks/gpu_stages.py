"""What the two stages of a GPT-2 124M pipeline take on one GPU, and what a kernel costs that waits beside them.

    python benchmarks/gpu_stages.py

Each stage is a graph of 8 micro-batches: of forwards, of forwards and the input half of backwards, and of all. Of these
times the simulator makes a step of two cards whose messages take none: what a schedule could reach with such stages.
Beside them kernels that do nothing but wait, as those of NCCL do for a message that has not come: so many blocks, each
as large as a multiprocessor.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import cupy as cp
import numpy as np
from gpu import LEARNING_RATE, SIZES, seconds_a_step
from gpu_pipeline import NUM_MICROBATCHES

import minigrad as mg
from minigrad.autodiff.backprop import backward_input, backward_weight
from minigrad.backend import gpu_name, to_device
from minigrad.cuda_graph import CapturedStep
from minigrad.models import gpt
from minigrad.nn import ParamGetter
from minigrad.optim import AdamW, Optimizer
from minigrad.precision import dtype_of, use_precision
from minigrad.tensor import Tensor
from pipeline import SCHEDULES, simulate

SIZE, MICROBATCH_SIZE = "gpt2", 4
CUT = 9  # layers of the first stage: the embedding and 8 blocks
WAITING = (1, 4, 16)  # blocks
SHARED_BYTES, THREADS = 120 << 10, 544
WAIT = r"""extern "C" __global__ __launch_bounds__(544, 1) void wait(volatile int* over) {
  extern __shared__ char room[];
  if (!threadIdx.x) {
    room[0] = 0;
    while (!*over) __nanosleep(100);
  }
  __syncthreads();
}"""


class Stage:
    """Some layers in training, on a micro-batch that stays the same."""

    def __init__(self, start: int, stop: int | None) -> None:
        config, param = gpt.GPTConfig(**SIZES[SIZE][1]), ParamGetter(0, np.float32, "cuda")
        self.is_first, self.is_last = start == 0, stop is None
        self.layers = [factory(param) for _, factory in gpt.layers(config)[start:stop]]
        params = list(dict.fromkeys(p for layer in self.layers for p in layer.parameters()))
        self.optimizer = Optimizer(params, AdamW(LEARNING_RATE))
        use_precision(params, "bfloat16")
        generator = np.random.default_rng(0)
        ids = generator.integers(0, config.vocab_size, (MICROBATCH_SIZE, config.context + 1))
        self.x, self.y = to_device(ids[:, :-1].copy()), to_device(ids[:, 1:].copy())
        shape = (MICROBATCH_SIZE, config.context, config.width)
        self.h, g = (to_device(generator.standard_normal(shape).astype(dtype_of("bfloat16"))) for _ in range(2))
        self.g = np.float32(1 / NUM_MICROBATCHES) if self.is_last else g
        self._wait = cp.RawKernel(WAIT, "wait")
        self._wait.max_dynamic_shared_size_bytes = SHARED_BYTES
        self._over, self._beside = cp.zeros(1, np.int32), cp.cuda.Stream(non_blocking=True, priority=-5)

    def milliseconds(self, *, halves: int, steps: bool = False, num_waiting: int = 0) -> float:
        """Return the time of a graph of all micro-batches.

        Args:
            halves: of the backward: none, that of the inputs, or both.
            steps: whether the optimizer's step is part of it.
            num_waiting: blocks that wait beside it.
        """

        def step(_: Any) -> None:
            self.optimizer.zero_grad()
            done = self._start_waiting(num_waiting)
            kept = [self._microbatch(halves) for _ in range(NUM_MICROBATCHES)]
            if done is not None:
                self._over.fill(1)
                cp.cuda.get_current_stream().wait_event(done)
            if steps:
                self.optimizer.step()
            del kept

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

    def _start_waiting(self, num_blocks: int) -> Any:
        """Launch the blocks, in a graph only: loading a kernel would wait for them to end."""
        current = cp.cuda.get_current_stream()
        if not num_blocks or not cp.cuda.runtime.streamIsCapturing(current.ptr):
            return None
        self._over.fill(0)
        self._beside.wait_event(current.record())
        with self._beside:
            self._wait((num_blocks,), (THREADS,), (self._over,), shared_mem=SHARED_BYTES)
            return self._beside.record()


def main() -> None:
    print(f"{gpu_name()}, CuPy {cp.__version__}: {SIZE} in bfloat16, {NUM_MICROBATCHES} micro-batches", flush=True)
    times: list[list[float]] = []
    optimizers = []
    for number, (start, stop) in enumerate(((0, CUT), (CUT, None))):
        stage = Stage(start, stop)
        forward, with_inputs, whole = (stage.milliseconds(halves=halves) / NUM_MICROBATCHES for halves in range(3))
        times.append([forward, with_inputs - forward, whole - with_inputs])
        optimizers.append(stage.milliseconds(halves=2, steps=True) - NUM_MICROBATCHES * whole)
        print(
            f"stage {number}, a micro-batch: F {forward:.2f}, B {times[-1][1]:.2f}, W {times[-1][2]:.2f} ms; "
            f"the optimizer {optimizers[-1]:.2f} ms",
            flush=True,
        )
        for num_waiting in WAITING:
            slowed = stage.milliseconds(halves=2, num_waiting=num_waiting) / NUM_MICROBATCHES
            print(f"stage {number}, {num_waiting} blocks wait beside it: {slowed / whole:.2f}x", flush=True)
    forward_ms, input_ms, weight_ms = map(list, zip(*times, strict=True))
    for name in ("1f1b", "zero_bubble_h1"):
        made = simulate(
            SCHEDULES[name].orders(2, NUM_MICROBATCHES),
            num_stages=2,
            forward=forward_ms,
            backward_input=input_ms,
            backward_weight=weight_ms,
        )
        print(f"{name} on two cards, simulated: {made.makespan + max(optimizers):.1f} ms a step", flush=True)


if __name__ == "__main__":
    main()
