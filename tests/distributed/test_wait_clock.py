"""A clock of waits, with a time that the test moves."""

from types import SimpleNamespace

import pytest

import distributed.comm.wait_clock
from distributed.comm.wait_clock import WaitClock


@pytest.fixture
def time(monkeypatch):
    fake = SimpleNamespace(now=100.0)
    fake.perf_counter = lambda: fake.now
    monkeypatch.setattr(distributed.comm.wait_clock, "time", fake)
    return fake


def test_waits_add_up_and_what_lies_between_does_not_count(time):
    clock = WaitClock()
    assert clock.seconds == 0
    for waited in (1, 2, 4):
        time.now += 1000
        with clock:
            time.now += waited
    assert clock.seconds == 7


def test_a_wait_inside_a_wait_counts_once(time):
    clock = WaitClock()
    with clock:
        time.now += 1
        with clock:
            time.now += 2
        time.now += 4
    assert clock.seconds == 7


def test_waits_that_overlap_as_on_two_threads_count_once(time):
    clock = WaitClock()
    clock.__enter__()
    time.now += 1
    clock.__enter__()
    time.now += 2
    clock.__exit__()  # the first to begin is the first to end
    time.now += 4
    clock.__exit__()
    assert clock.seconds == 7


def test_a_wait_that_raises_counts(time):
    clock = WaitClock()

    def wait():
        with clock:
            time.now += 3
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            wait()
    assert clock.seconds == 6
