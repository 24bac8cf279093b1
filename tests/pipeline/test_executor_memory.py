"""What a pipeline keeps: as many micro-batches as its schedule says, counted on the arrays themselves."""

import gc
from contextlib import contextmanager

import pytest
from live_activations import live_activations
from toy_pipeline import X, Y, connect, dense, scale

from distributed import LocalWorld
from pipeline import SCHEDULES, simulate
from pipeline.runtime.p2p import PointToPoint


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


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
def test_what_was_sent_goes_as_soon_as_its_gradient_is_there(schedule, monkeypatch):
    """In a cooldown nothing else is sent that way, and all outputs of the warmup stayed to the end of the step."""
    events = []

    def noted(name):
        call = getattr(PointToPoint, name)

        def call_and_note(p2p, action):
            if p2p.comm.rank == 0:
                events.append((name, action))
            return call(p2p, action)

        monkeypatch.setattr(PointToPoint, name, call_and_note)

    noted("receive")
    noted("wait_sent")

    def program(comm):
        pipe = connect(comm, [dense("a", 4, 3), scale("b"), dense("c", 3, 2)], schedule=schedule, num_microbatches=7)
        pipe.step(X, Y)

    LocalWorld(3).run(program)
    arrivals = [(place, action) for place, (name, action) in enumerate(events) if name == "receive"]
    assert len(arrivals) == 7
    for place, gradient in arrivals:
        assert events[place + 1] == ("wait_sent", gradient.confirms)
