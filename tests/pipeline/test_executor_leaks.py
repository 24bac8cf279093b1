"""What a step keeps, counted over all arrays: activations, what travels between stages, outputs, tapes, gradients.

NumPy tells tracemalloc of every array. Outputs of the stages are 1 MiB a micro-batch and inputs a few bytes, so that
whatever is kept too long is at least 1 MiB.
"""

import gc
import tracemalloc

import numpy as np
import pytest
from toy_pipeline import apply, connect, dense, scale

import minigrad as mg
from distributed import LocalWorld
from minigrad import nn
from pipeline import SCHEDULES

WIDTH = 131_072  # float64: 1 MiB a sample
MIB = 2**20


class Widen(nn.Module):
    def __init__(self, param):
        self.row = param.at("widen")("row", (1, WIDTH), lambda generator, shape: np.ones(shape))

    def __call__(self, x):
        return x * self.row


def layers(num_stages):
    between = [scale(f"w{i}", 0.5) for i in range(num_stages - 2)]
    return [("first", Widen), *between, ("last", lambda param: narrow)]


def narrow(x):
    return x.mean(axis=1, keepdims=True)


def traced(schedule, num_microbatches):
    """Return the most MiB that a step had at a time beyond what was there before it, and what it left."""
    batch = np.ones((num_microbatches, 1))

    def program(comm):
        pipe = connect(
            comm,
            layers(SCHEDULES[schedule].num_stages(comm.size)),
            schedule=schedule,
            num_microbatches=num_microbatches,
        )
        pipe.step(batch, batch)
        comm.barrier()
        if comm.rank == 0:
            gc.collect()
            tracemalloc.start()
        comm.barrier()
        pipe.step(batch, batch)
        comm.barrier()
        if comm.rank == 0:
            left, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            return peak / MIB, left / MIB
        return None

    gc.disable()
    try:
        return LocalWorld(2).run(program)[0]
    finally:
        gc.enable()


@pytest.mark.usefixtures("young_heap")
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
def test_a_step_of_twice_as_many_micro_batches_holds_no_more_and_leaves_nothing(schedule):
    few, _ = traced(schedule, 8)
    many, left = traced(schedule, 16)
    assert left < 0.5
    # Which rank is ahead of the other moves a peak by 1 or 2 MiB, at any number of micro-batches.
    assert many < few + 4, "8 more micro-batches: what is kept of each would be 8 MiB more"


def test_outputs_go_with_whoever_asked_for_them():
    batch = np.ones((4, 1))

    def program(comm):
        pipe = connect(comm, layers(2)[:1], num_microbatches=4)
        pipe.predict(batch)
        gc.collect()
        tracemalloc.start()
        for run in (pipe.predict, lambda x: pipe.run(x, np.ones((4, WIDTH)))):
            result = run(batch)
            del result
        pipe.forward(batch)
        pipe.cancel()
        left, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return left / MIB

    gc.disable()
    try:
        assert LocalWorld(1).run(program)[0] < 1.5, "the gradient of the row alone is 1 MiB"
    finally:
        gc.enable()


def test_evaluation_and_prediction_record_no_tape(ranks):
    def program(comm):
        seen = []

        def look(x):
            seen.append(isinstance(x, mg.Tensor) and x.node is not None)
            return x

        size = comm.size
        pipe = connect(comm, [dense("a", 4, 2), *(apply(f"look{i}", look) for i in range(size)), scale("b")])
        pipe.evaluate(np.ones((3, 4)), np.ones((3, 2)))
        pipe.predict(np.ones((3, 4)))
        recorded = any(seen)
        pipe.step(np.ones((3, 4)), np.ones((3, 2)))
        assert recorded is False
        return any(seen)

    assert any(ranks.run(program)), "in training something is recorded, so that the test can tell"
