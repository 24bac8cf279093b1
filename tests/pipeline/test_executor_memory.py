"""What a pipeline keeps: as many micro-batches as its schedule says, counted on the arrays themselves."""

import gc
from contextlib import contextmanager

import pytest
from live_activations import live_activations

from pipeline import SCHEDULES, simulate


@contextmanager
def without_collector():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def held(ranks, schedule, num_microbatches):
    """Return the most micro-batches that each stage held; check that nothing is left."""
    with without_collector():
        by_stage = {
            stage: counts
            for found in ranks.run(live_activations, schedule, num_microbatches)
            for stage, counts in found.items()
        }
    assert all(left == 0 for _, left in by_stage.values())
    return [by_stage[stage][0] for stage in sorted(by_stage)]


@pytest.mark.parametrize("num_microbatches", [1, 2, 8, 16])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.point_to_point
def test_1f1b_keeps_as_many_micro_batches_as_there_are_stages_to_come(ranks, schedule, num_microbatches):
    """A cache, or sends that nobody completes, would keep them all. pytorch#128910"""
    stages_to_come = [ranks.size - rank if schedule == "1f1b" else num_microbatches for rank in range(ranks.size)]
    peaks = held(ranks, SCHEDULES[schedule], num_microbatches)
    assert peaks == [min(num_microbatches, peak) for peak in stages_to_come]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.point_to_point
def test_every_schedule_keeps_what_its_simulation_says(ranks, schedule):
    orders = SCHEDULES[schedule].orders(ranks.size, 12)
    simulated = simulate(orders, num_stages=SCHEDULES[schedule].num_stages(ranks.size))
    assert held(ranks, SCHEDULES[schedule], 12) == simulated.peak_microbatches_per_stage
