"""A signal to any rank ends the run of all of them, after the same step."""

import os
import signal
import threading
from contextlib import nullcontext

import pytest

from distributed import SoloCommunicator
from distributed.stop import SIGNALS, StopRequest

NUM_STEPS = 6


def in_main_thread():
    return threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize("number", [*SIGNALS, None], ids=lambda number: number.name if number else "nobody")
@pytest.mark.parametrize("asked", ["first", "last"])
def test_all_ranks_stop_after_the_same_step(ranks, number, asked):
    asked_rank = 0 if asked == "first" else ranks.size - 1

    def program(comm):
        """As a process gets a signal; a rank that is a thread gets none, and is asked by a call."""
        stop = StopRequest(comm)
        with stop if in_main_thread() else nullcontext():
            for step in range(NUM_STEPS):
                if step == 2 and comm.rank == asked_rank and number is not None:
                    if in_main_thread():
                        os.kill(os.getpid(), number)
                    else:
                        stop.request()
                if stop.agreed():
                    return step
        return NUM_STEPS

    assert ranks.run(program) == [2 if number else NUM_STEPS] * ranks.size


def test_a_request_is_not_forgotten(ranks):
    def program(comm):
        stop = StopRequest(comm)
        if comm.rank == comm.size - 1:
            stop.request()
        return [stop.agreed(), stop.agreed()]

    assert ranks.run(program) == [[True, True]] * ranks.size


@pytest.mark.parametrize("fails", [False, True])
def test_handlers_are_as_they_were(fails):
    def mine(number, frame):
        raise AssertionError("the handler from before")

    before = {number: signal.signal(number, mine) for number in SIGNALS}
    try:
        with nullcontext() if not fails else pytest.raises(ZeroDivisionError), StopRequest(SoloCommunicator()) as stop:
            for number in SIGNALS:
                assert signal.getsignal(number) is not mine
                signal.raise_signal(number)
            assert stop.agreed()
            if fails:
                raise ZeroDivisionError
        assert [signal.getsignal(number) for number in SIGNALS] == [mine] * len(SIGNALS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_outside_the_with_signals_are_nobody_s():
    handlers = [signal.getsignal(number) for number in SIGNALS]
    StopRequest(SoloCommunicator())
    assert [signal.getsignal(number) for number in SIGNALS] == handlers


def test_a_second_ctrl_c_ends_the_process_as_ever():
    with StopRequest(SoloCommunicator()) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.agreed()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_sigterm_sigusr1_and_ctrl_c_are_noted():
    assert set(SIGNALS) == {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}
