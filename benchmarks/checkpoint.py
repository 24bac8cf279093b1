"""Measure what saving costs a training run: one process, a GPT of 10.8 million parameters and AdamW's state, 130 MB.

    make bench-checkpoint

A round is a step, a save and the step beside it, a save that nobody trains beside, and a load, which finds the files
in the page cache. A ratio is the median over rounds, with the 10% and 90% quantiles in brackets. The writer is a
thread: it is measured with a core to itself, and on the core that the training has.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one a rank; NumPy reads it when it loads

import argparse
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from statistics import median

import numpy as np
from engine import Line, ratio
from engine_jobs import LEARNING_RATE, SIZES, random_text
from pinned_workers import pin
from results_file import FOLDER, keep

from distributed import SoloCommunicator
from distributed.checkpoint.checkpointer import Checkpointer
from minigrad import backward, cross_entropy
from minigrad.models import GPT, GPTConfig
from minigrad.optim import AdamW, Optimizer

RESULTS = FOLDER / "checkpoint.txt"
HELD_MILLISECONDS = 50.0  # targets
STEP_RATIO = 1.05
COMMITTED_MILLISECONDS = 1000.0
LOAD_MILLISECONDS = 500.0


class Training:
    """A model, and the steps of its training that are timed."""

    def __init__(self, size: str, folder: str) -> None:
        self._model = GPT(GPTConfig(**SIZES[size]))
        self._optimizer = Optimizer(self._model.parameters(), AdamW(LEARNING_RATE))
        self._x, self._y = random_text(size)
        self._checkpoints = Checkpointer(folder, SoloCommunicator(), self._model, self._optimizer)

    def measure(self, num_rounds: int) -> dict[str, list[float]]:
        """Return the seconds of each round; the first round touches memory, and is `first` alone."""
        seconds: dict[str, list[float]] = {"alone": [], "held": [], "saving": [], "committed": [], "load": []}
        first: dict[str, float] = {}
        for number in range(num_rounds + 1):
            times = {
                "alone": seconds_of(self._step),
                "held": seconds_of(lambda number=number: self._checkpoints.save(number)),
                "saving": seconds_of(self._step),
            }
            self._checkpoints.wait()
            times["committed"] = seconds_of(lambda number=number: self._save_and_wait(number))
            times["load"] = seconds_of(self._checkpoints.load)
            first = first or times
            if times is not first:
                for name, value in times.items():
                    seconds[name].append(value)
        return seconds | {"first": [first["held"]]}

    def _step(self) -> None:
        self._optimizer.zero_grad()
        backward(cross_entropy(self._model(self._x), self._y))
        self._optimizer.step()

    def _save_and_wait(self, number: int) -> None:
        self._checkpoints.save(number)
        self._checkpoints.wait()


def seconds_of(call: Callable[[], object]) -> float:
    """Time a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def report(size: str, num_rounds: int, folder: str) -> Iterator[str]:
    """Measure, and yield the lines."""
    cores = sorted(os.sched_getaffinity(0))
    yield (
        f"{platform.machine()}, cores {cores}, Python {platform.python_version()}, NumPy {np.__version__}; "
        f"float32, AdamW, one thread for matrix products; medians of {num_rounds} rounds"
    )
    training = Training(size, folder)
    seconds = training.measure(num_rounds)
    milliseconds = {name: 1e3 * median(values) for name, values in seconds.items()}
    yield str(Line(f"{size}, a step", milliseconds["alone"], "ms"))
    yield str(Line("save() keeps the training for", milliseconds["held"], "ms", HELD_MILLISECONDS))
    yield str(Line("save() keeps the training for, the first time", milliseconds["first"], "ms"))
    yield str(ratio("a step beside a save / a step", seconds["saving"], seconds["alone"], STEP_RATIO))
    yield str(Line("from save() to a checkpoint", milliseconds["committed"], "ms", COMMITTED_MILLISECONDS))
    yield str(Line("load()", milliseconds["load"], "ms", LOAD_MILLISECONDS))
    pin()  # threads that start from now on stay on this core too
    seconds = training.measure(num_rounds)
    yield str(ratio("on one core: a step beside a save / a step", seconds["saving"], seconds["alone"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--size", choices=SIZES, default="baby", help="default: %(default)s")
    parser.add_argument("--folder", help="where to save; the disk is part of what is measured (default: here)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder or ".") as folder:
        lines = []
        for line in report(args.size, args.rounds, folder):
            print(line, flush=True)
            lines.append(line)
    keep(lines, RESULTS, is_default=args == parser.parse_args([]))


if __name__ == "__main__":
    main()
