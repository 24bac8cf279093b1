"""What the two stages of a GPT-2 124M pipeline take on one GPU, and what a kernel costs that waits beside them.

    python benchmarks/gpu_stages.py

Each layer is measured, blocks in halves; by these times the model is cut in two, and each stage is measured as a whole:
a graph of 8 micro-batches, of forwards, of forwards and the input half of backwards, and of all. Of the stages' times
the simulator makes a step of two cards whose messages take none: what a schedule could reach with such stages. Beside
them kernels that do nothing but wait, as those of NCCL do for a message that has not come: so many blocks, each as
large as a multiprocessor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import cupy as cp
import numpy as np
from gpu import SIZES
from stage_times import NUM_MICROBATCHES, Stage, Times, layer_times, simulated

from minigrad.backend import gpu_name
from minigrad.models import gpt
from pipeline import cut_by_weights

SIZE, MICROBATCH_SIZE = "gpt2", 4
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


class Waiting:
    """Blocks of threads that wait on a stream of their own."""

    def __init__(self) -> None:
        self._wait = cp.RawKernel(WAIT, "wait")
        self._wait.max_dynamic_shared_size_bytes = SHARED_BYTES
        self._over, self._beside = cp.zeros(1, np.int32), cp.cuda.Stream(non_blocking=True, priority=-5)

    @contextmanager
    def beside(self, num_blocks: int) -> Iterator[None]:
        """Let blocks wait until the work inside is done."""
        done = self._start(num_blocks)
        yield
        if done is not None:
            self._over.fill(1)
            cp.cuda.get_current_stream().wait_event(done)

    def _start(self, num_blocks: int) -> Any:
        """Launch the blocks, in a graph only: loading a kernel would wait for them to end."""
        current = cp.cuda.get_current_stream()
        if not cp.cuda.runtime.streamIsCapturing(current.ptr):
            return None
        self._over.fill(0)
        self._beside.wait_event(current.record())
        with self._beside:
            self._wait((num_blocks,), (THREADS,), (self._over,), shared_mem=SHARED_BYTES)
            return self._beside.record()


def main() -> None:
    print(f"{gpu_name()}, CuPy {cp.__version__}: {SIZE} in bfloat16, {NUM_MICROBATCHES} micro-batches", flush=True)
    config = gpt.GPTConfig(**SIZES[SIZE][1])
    layers, found = gpt.layers(config, half_blocks=True), layer_times(config, MICROBATCH_SIZE)
    names = [name for name, _ in layers]
    for i in (0, 1, 2, len(layers) - 1):
        print(f"{names[i]}, a micro-batch: {found.layers[i]}", flush=True)
    waiting, times, optimizers = Waiting(), [], []
    for number, spec in enumerate(cut_by_weights(names, [sum(each) for each in found.layers], 2)):
        own = slice(spec.layer_start, spec.layer_stop)
        stage = Stage(config, layers[own], MICROBATCH_SIZE)
        times.append(stage.times())
        optimizers.append(stage.optimizer_milliseconds())
        print(f"stage {number}, {names[own][0]} to {names[own][-1]}, a micro-batch: {times[-1]}", flush=True)
        print(f"stage {number}, by its layers: {Times.together(found.layers[own])}", flush=True)
        by_size = found.optimizer * stage.num_parameters
        print(f"stage {number}, the optimizer: {optimizers[-1]:.2f} ms, by parameters {by_size:.2f} ms", flush=True)
        for num_blocks in WAITING:
            slowed = stage.milliseconds(2, beside=partial(waiting.beside, num_blocks)) / NUM_MICROBATCHES
            print(f"stage {number}, {num_blocks} blocks wait beside it: {slowed / sum(times[-1]):.2f}x", flush=True)
    for name in ("1f1b", "zero_bubble_h1"):
        total = simulated(name, 2, times) + max(optimizers)
        print(f"{name} on two cards, simulated: {total:.1f} ms a step", flush=True)


if __name__ == "__main__":
    main()
