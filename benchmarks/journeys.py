"""How many moves between files of the project an array makes on its way: what thin layers cost a reader.

    python benchmarks/journeys.py [--by-file]

    gradient       one parameter's, from the start of the backward to the end of the optimizer's step, of two replicas
    micro-batch    one more in a step of a pipeline of two stages, forward and backward: on the first stage's rank

A move is a call or a return that leads from one file to another. Ranks are the threads of a LocalWorld, which asks
whether a message is there as often as anything changes: the least of many runs counts.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import minigrad as mg
from distributed import Communicator, DistributedDataParallel, LocalWorld
from minigrad.nn import Linear
from minigrad.optim import SGD, Optimizer
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage

ROOT = Path(mg.__file__).parents[1]
PACKAGES = tuple(f"{ROOT / package}/" for package in ("minigrad", "distributed", "pipeline"))
NUM_RUNS = 50

Moves = Counter[tuple[str, str]]  # (from, to)


@contextmanager
def counted() -> Iterator[Moves]:
    """Count the moves of this thread inside the `with`."""
    moves: Moves = Counter()
    here = [""]

    def note(frame: FrameType, event: str, _: Any) -> None:
        target = frame if event == "call" else frame.f_back if event == "return" else None
        if target is None or not target.f_code.co_filename.startswith(PACKAGES):
            return
        file = target.f_code.co_filename
        if here[0] and file != here[0]:
            moves[here[0], file] += 1
        here[0] = file

    sys.setprofile(note)
    try:
        yield moves
    finally:
        sys.setprofile(None)


def gradient(comm: Communicator) -> list[Moves]:
    """Take steps of a model of one parameter, one replica a rank."""

    class Model:
        def __init__(self) -> None:
            self.w = mg.Parameter(np.ones((4, 4)), "w")

        def parameters(self) -> list[mg.Parameter]:
            return [self.w]

    model = Model()
    ddp = DistributedDataParallel(model, comm)
    optimizer = Optimizer(model.parameters(), SGD(0.1))
    x = np.ones((2, 4))
    runs = []
    for _ in range(NUM_RUNS):
        optimizer.zero_grad()
        loss = (x @ model.w).mean()
        hooks = ddp.hooks(num_samples=2)
        with counted() as moves:
            mg.backward_with_hooks(loss, hooks)
            ddp.wait()
            optimizer.step()
        runs.append(moves)
    return runs


def steps(num_microbatches: int) -> Callable[[Communicator], list[Moves]]:
    """Return what trains a pipeline of one layer a rank."""

    def program(comm: Communicator) -> list[Moves]:
        schedule = SCHEDULES["1f1b"]
        layers = [(name, lambda param, name=name: Linear(param.at(name), 4, 4)) for name in "ab"]
        stages = PipelineStage.of(layers, comm, schedule)
        pipe = PipelineExecutor(
            stages, comm, schedule, num_microbatches=num_microbatches, loss_fn=lambda y, t: mg.mse(y, t)
        )
        x = np.ones((2 * num_microbatches, 4), np.float32)
        runs = []
        for _ in range(NUM_RUNS):
            with counted() as moves:
                pipe.step(x, x)
            runs.append(moves)
        return runs

    return program


def least(program: Callable[[Communicator], list[Moves]]) -> Moves:
    return min(LocalWorld(2).run(program)[0], key=lambda moves: moves.total())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by-file", action="store_true", help="say from where to where")
    by_file = parser.parse_args().by_file
    fewer, more = least(steps(8)), least(steps(9))
    more.subtract(fewer)
    for name, moves in (("gradient", least(gradient)), ("micro-batch", more)):
        print(f"{name:<12} {moves.total():>4} moves")
        if by_file:
            for (source, target), count in moves.most_common():
                if count:
                    print(f"{count:>8}  {Path(source).relative_to(ROOT)} -> {Path(target).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
