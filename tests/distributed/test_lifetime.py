"""How a process begins and ends in a job whose ranks may die, without MPI: what would end it is noted instead."""

import os
import signal
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest

from distributed.comm.mpi import lifetime
from distributed.comm.mpi.lifetime import NEWCOMER, dead_if_stuck, leave_at_exit, lost_if, starting
from distributed.comm.outcome import NEWCOMERS


class Ended(BaseException):
    """The process would be no more."""


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIGRAD_JOB_FOLDER", str(tmp_path))
    return tmp_path


@pytest.fixture
def lost(monkeypatch):
    """Why the job would be lost; said again and again, since nothing ends."""
    reasons = []
    monkeypatch.setattr(lifetime, "lose", reasons.append)
    monkeypatch.setattr(lifetime, "_LOOK_SECONDS", 0.002)
    return reasons


@pytest.fixture
def dead():
    """The number of a process that is no more, and not yet buried."""
    process = subprocess.Popen(["sleep", "60"])
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid
    process.wait()


def wait_for(reasons):
    end = time.monotonic() + 20
    while not reasons and time.monotonic() < end:
        time.sleep(0.001)


def test_what_is_over_in_time_loses_nothing(lost):
    with lost_if("nobody came", seconds=30, dies=[os.getpid()]):
        time.sleep(0.02)  # some looks
    with pytest.raises(KeyError), lost_if("nobody came", seconds=30):
        raise KeyError
    assert lost == []
    assert not [thread for thread in threading.enumerate() if thread.name == "lost_if"]


def test_what_takes_too_long_loses_the_job(lost):
    with lost_if("nobody came", seconds=0.01):
        wait_for(lost)
    assert set(lost) == {"nobody came within 0.01 s"}


def test_who_dies_meanwhile_loses_the_job(lost, dead):
    with lost_if("nobody came", seconds=30, dies=[os.getpid(), dead]):
        wait_for(lost)
    assert set(lost) == {f"nobody came: process {dead} died meanwhile"}


def test_newcomers_are_watched_where_anybody_is(lost, dead, job):
    (job / NEWCOMERS).mkdir()
    with lost_if("nobody came", seconds=30):
        (job / NEWCOMERS / str(dead)).touch()
        time.sleep(0.02)
    with lost_if("nobody came", seconds=30, dies=[os.getpid()]):  # that one died before it
        time.sleep(0.02)
    assert lost == []
    (job / NEWCOMERS / str(dead)).unlink()
    with lost_if("nobody came", seconds=30, dies=[os.getpid()]):
        (job / NEWCOMERS / str(dead)).touch()
        wait_for(lost)
    assert set(lost) == {f"nobody came: process {dead} died meanwhile"}


def test_a_watch_over_a_call_leaves_alarms_as_they_were():
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        own = signal.getsignal(signal.SIGALRM)
        signal.setitimer(signal.ITIMER_REAL, 500, 7)
        with dead_if_stuck():
            left, _ = signal.getitimer(signal.ITIMER_REAL)
            assert 0 < left <= lifetime.STUCK_SECONDS
            assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
        left, interval = signal.getitimer(signal.ITIMER_REAL)
        assert lifetime.STUCK_SECONDS < left <= 500
        assert (interval, signal.getsignal(signal.SIGALRM)) == (7, own)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


@pytest.fixture
def mortal(monkeypatch):
    """Who would die with its parent, in order."""
    noted = []
    monkeypatch.setattr(lifetime, "die_with_parent", lambda: noted.append("with its parent"))

    def end_now():
        raise Ended

    monkeypatch.setattr(lifetime, "end_now", end_now)
    return noted


def test_a_newcomer_is_known_until_it_is_met_and_ends_where_mpi_fails(job, mortal, monkeypatch):
    for _ in range(2):  # the second finds the folder there
        monkeypatch.setenv(NEWCOMER, "1")
        with starting():
            assert NEWCOMER not in os.environ, "what it starts is none"
            assert [path.name for path in (job / NEWCOMERS).iterdir()] == [str(os.getpid())]
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert mortal == ["with its parent"] * 2
    monkeypatch.setenv(NEWCOMER, "1")
    with pytest.raises(Ended), starting():
        raise ValueError("MPI cannot start")


@pytest.mark.parametrize("has_launcher", [False, True])
def test_any_other_process_fails_as_it_does(has_launcher, mortal, request):
    if has_launcher:
        request.getfixturevalue("job")
    with starting():
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    with pytest.raises(ValueError, match="MPI cannot start"), starting():
        raise ValueError("MPI cannot start")
    assert mortal == ["with its parent"] * (2 * has_launcher)


class World:
    """Ranks of which some may be dead, whose barriers are passed after so many looks."""

    def __init__(self, events, num_looks, num_dead=0):
        self.events, self.num_looks, self.num_dead = events, list(num_looks), num_dead

    def Ibarrier(self):
        self.events.append("barrier")
        looks = iter(range(self.num_looks.pop(0)))
        return SimpleNamespace(Test=lambda: next(looks, None) is None)

    def Get_failed(self):
        return SimpleNamespace(Get_size=lambda: self.num_dead)


NEVER = 10**9


@pytest.mark.parametrize(
    ("num_looks", "num_dead", "expected"),
    [
        ([0, 0], 0, ["leaving", "barrier", "end", "barrier"]),
        ([3, 3], 0, ["leaving", "barrier", "end", "barrier"]),
        ([0, 0], 1, ["leaving", "barrier", "end", "barrier"]),  # who came last has left already
        ([1, 0], 1, ["leaving", "barrier", "end", "barrier"]),  # it came just before it was seen to have left
        ([NEVER], 1, ["leaving", "barrier"]),
        ([0, NEVER], 0, ["leaving", "barrier", "end", "barrier"]),  # nobody waits for ever for the last farewell
    ],
    ids=str,
)
def test_a_job_has_ended_where_all_ranks_came_to_their_end(num_looks, num_dead, expected, mortal, monkeypatch):
    events, at_exit = [], []
    monkeypatch.setattr(lifetime, "_LEAVE_SECONDS", 0.02)
    monkeypatch.setattr(lifetime, "note_leaving", lambda: events.append("leaving"))
    monkeypatch.setattr(lifetime, "note_end", lambda: events.append("end"))
    register = SimpleNamespace(unregister=lambda leave: at_exit.clear(), register=lambda *call: at_exit.append(call))
    monkeypatch.setattr(lifetime, "atexit", register)
    leave_at_exit(World(events, [NEVER]))
    leave_at_exit(World(events, num_looks, num_dead))
    ((leave, world),) = at_exit  # the world before this one is left no more
    with pytest.raises(Ended):
        leave(world)
    assert events == expected
