"""The line of metrics of a step: what is of the step's time, and what is aside."""

import math

import pytest

from distributed import Communicator, LocalWorld, SoloCommunicator
from distributed.run import step_line
from distributed.run.step_line import StepLine


class Clock:
    """Seconds that pass where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Waiting(SoloCommunicator):
    """A rank whose waits a test says, as one of two that wait alike."""

    waited = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.size = 2

    @property
    def waited_seconds(self) -> float:
        return self.waited


def test_what_runs_aside_is_left_out_of_the_time_and_of_the_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, comm, line = Clock(), Waiting(), StepLine("tokens", 48)
    monkeypatch.setattr(step_line, "time", clock)
    for _ in range(2):  # the next line knows nothing of what was aside of the one before
        line.begin(3, 0.5, {"ranks": 1})
        line.note(loss=2)
        before, waited_before = clock.now, comm.waited
        clock.now, comm.waited = clock.now + 1.0, comm.waited + 0.25
        for _ in range(2):
            with line.aside(comm):
                clock.now, comm.waited = clock.now + 4.0, comm.waited + 0.5
        clock.now += 2.0
        waited = line.mean_wait(comm, comm.waited - waited_before)
        assert waited == 0.25
        assert line.end(clock.now - before, waited) == {
            "step": 3,
            "learning_rate": 0.5,
            "ranks": 1,
            "loss": 2.0,
            "seconds": 3.0,
            "tokens_per_second": 16.0,
            "exposed_comm_seconds": 0.25,
        }


def test_a_wait_is_the_mean_of_all_ranks() -> None:
    def program(comm: Communicator) -> float | None:
        return StepLine("samples", 1).mean_wait(comm, 1.0 + 2 * comm.rank)

    assert LocalWorld(2).run(program) == [2.0, 2.0]
    assert LocalWorld(1).run(program) == [None]


def test_a_bar_says_the_last_loss_and_the_speed_of_all_steps() -> None:
    line = StepLine("tokens", 3072)
    line.note(loss=1.23456)
    assert line.words(10, 2.0) == "loss 1.235, 15,360 tokens/s"


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_leads_nowhere_is_an_error(loss: float) -> None:
    line = StepLine("tokens", 1)
    line.begin(7, 0.1, {})
    with pytest.raises(RuntimeError, match=r"every step logs its loss"):
        line.end(1.0, None)
    line.note(loss=loss)
    with pytest.raises(ValueError, match=rf"the loss of step 8 is {loss}, and what follows would be too"):
        line.check_loss()
