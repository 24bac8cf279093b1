"""What a pipeline keeps: as many micro-batches as its schedule says, counted on the arrays themselves."""

import gc
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
from toy_pipeline import connect

import minigrad as mg
from minigrad import nn


class Watch(nn.Module):
    """tanh(x @ w + b); `alive` counts the micro-batches of which an array or a node is still somewhere."""

    def __init__(self, param, *, first):
        self.linear = nn.Linear(param, 4, 4)
        self.first = first
        self.kept = []  # for each forward
        self.peak = 0

    def __call__(self, x):
        y = mg.tanh(self.linear(x))
        mine = [y.data, y.node] if self.first else [x.data, y.data, y.node]  # the first input is a view of the batch
        self.kept.append([weakref.ref(thing) for thing in mine])
        self.peak = max(self.peak, self.alive())
        return y

    def alive(self):
        return sum(any(ref() is not None for ref in refs) for refs in self.kept)


@contextmanager
def without_collector():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("num_microbatches", [1, 2, 8, 16])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.point_to_point
def test_1f1b_keeps_as_many_micro_batches_as_there_are_stages_to_come(ranks, schedule, num_microbatches):
    """A cache, or sends that nobody completes, would keep them all. pytorch#128910"""

    def layer(name):
        return name, lambda param: Watch(param.at(name), first=name == "l0")

    def program(comm):
        pipe = connect(
            comm, [layer(f"l{i}") for i in range(comm.size)], schedule=schedule, num_microbatches=num_microbatches
        )
        (stage,) = pipe.stages
        (watch,) = stage.layers
        x, y = np.ones((num_microbatches, 4)), np.zeros((num_microbatches, 4))
        for _ in range(2):
            pipe.step(x, y)
            assert watch.alive() == 0
            assert stage.num_in_flight == 0
        return watch.peak

    with without_collector():
        peaks = ranks.run(program)
    stages_to_come = [ranks.size - rank if schedule == "1f1b" else num_microbatches for rank in range(ranks.size)]
    assert peaks == [min(num_microbatches, peak) for peak in stages_to_come]
