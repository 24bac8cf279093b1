"""The deadlock check and the executor mean the same by a program: what one refuses, the other cannot run to its end.

Every program that comes of a right one by moving, leaving out or doubling one message is given to both, with sends
that complete only when they are received.
"""

import numpy as np
import pytest
from toy_pipeline import check_grads, connect, four_layers, gradients_in_one_process

import minigrad as mg
from distributed import LocalWorld
from pipeline import SCHEDULES, ScheduleError, check_deadlock_free, lower
from pipeline.runtime import program
from pipeline.runtime.microbatch import split
from pipeline.schedules.schedule import round_robin

SIZES = {"rank_of": round_robin, "num_stages": 2}
RIGHT = lower(SCHEDULES["1f1b"].orders(2, 2), **SIZES)
X = np.random.default_rng(0).standard_normal((4, 4))
Y = np.random.default_rng(1).standard_normal((4, 2))


def other_programs():
    """Return the programs of both ranks with one message moved, left out or doubled, each once."""
    found = []
    for rank, actions in enumerate(RIGHT):
        for index, action in enumerate(actions):
            if not action.kind.is_compute:
                without = [*actions[:index], *actions[index + 1 :]]
                moved = [[*without[:place], action, *without[place:]] for place in range(len(actions))]
                doubled = [*actions[:index], action, action, *actions[index + 1 :]]
                found += [[*RIGHT[:rank], new, *RIGHT[rank + 1 :]] for new in (*moved, without, doubled)]
    return [new for i, new in enumerate(found) if new not in found[:i]]


def is_allowed(programs):
    try:
        check_deadlock_free(programs, **SIZES)
    except ScheduleError:
        return False
    return True


PROGRAMS = other_programs()
ALLOWED = [programs for programs in PROGRAMS if is_allowed(programs)]
REFUSED = [programs for programs in PROGRAMS if programs not in ALLOWED]


@pytest.fixture
def run(monkeypatch):
    """Run two steps of these programs, unchecked, on two ranks."""
    loss, grads = gradients_in_one_process(four_layers(), split(X, 2), split(Y, 2), mg.mse)

    def steps(comm):
        pipe = connect(comm, four_layers(), num_microbatches=2)
        for _ in range(2):  # with headers and without
            mg.flat.zero_grad(pipe.stages.parameters())
            np.testing.assert_allclose(pipe.step(X, Y), loss, rtol=1e-12)
            check_grads(pipe, grads)

    def run(programs, timeout_seconds):
        monkeypatch.setattr(program, "lower", lambda orders, **sizes: programs)
        monkeypatch.setattr(program, "check_deadlock_free", lambda programs, **sizes: None)
        LocalWorld(2, synchronous_sends=True, timeout_seconds=timeout_seconds).run(steps)

    return run


def test_both_kinds_of_program_are_there():
    assert RIGHT in ALLOWED
    assert len(ALLOWED) > 5
    assert len(REFUSED) > 20


@pytest.mark.parametrize("number", range(len(ALLOWED)))
def test_what_the_check_allows_runs_to_its_end(run, number):
    run(ALLOWED[number], 30)


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_the_check_refuses_does_not(run, number):
    with pytest.raises((KeyError, RuntimeError, TimeoutError)):
        run(REFUSED[number], 0.1)


def test_the_executor_asks_the_check_before_any_message(monkeypatch):
    monkeypatch.setattr(program, "lower", lambda orders, **sizes: REFUSED[0])
    with pytest.raises(ScheduleError):
        LocalWorld(2).run(lambda comm: connect(comm, four_layers(), num_microbatches=2))
