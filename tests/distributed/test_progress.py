"""The progress engine, driven by operations of plain Python: no rank and no MPI."""

import gc
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from distributed.comm.failure import RankFailure
from distributed.comm.mpi import progress
from distributed.comm.mpi.progress import Engine, until_done, until_sequence_done
from distributed.comm.work import Work

DONE = np.ones(1)


class Clock:
    """A time that stands still but where a test moves it."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def make_engine(**settings):
    return Engine(rank=3, **{"timeout_seconds": 30.0, **settings})


def steps(log, name, num_waits, result=DONE):
    log.append(f"{name} launched")
    for _ in range(num_waits):
        yield
    log.append(f"{name} done")
    if isinstance(result, Exception):
        raise result
    return result


def test_an_operation_is_launched_at_once_and_completed_by_polls():
    log = []
    work = make_engine().start(steps(log, "a", 1000), lambda: "a")
    assert log == ["a launched"]
    for _ in range(1000):
        work.test()
    assert log == ["a launched", "a done"]
    assert work.test()
    assert work.wait() is DONE


def test_a_wait_moves_the_others_too():
    engine, opened = make_engine(), []

    def opener():
        yield
        yield
        opened.append(True)
        return DONE

    def waits_for_the_other():
        while not opened:
            yield
        return DONE

    engine.start(opener(), lambda: "opener")
    assert engine.start(waits_for_the_other(), lambda: "b").wait() is DONE


class Part(Work):
    """A message that has come when it is tested for the third time."""

    def __init__(self, value):
        self.value, self.num_tests = value, 0

    def test(self):
        self.num_tests += 1
        return self.num_tests == 3

    def wait(self):
        assert self.num_tests == 3, "nobody may block for it"
        return np.full(1, self.value)


def test_a_sequence_launches_each_message_when_the_one_before_it_has_come():
    parts = [Part(2.0), Part(3.0)]
    launched, result = [], []

    def sequence():
        total = np.ones(1)
        for part in parts:
            launched.append(part)
            total = total * (yield part)
        return total

    def watched():
        result.append((yield from until_sequence_done(sequence())))

    assert [len(launched) for _ in watched()] == [1, 1, 2, 2]
    assert result == [6.0]


def test_progress_polls_in_order_of_launch_and_not_too_often(clock):
    engine, polls = make_engine(), []

    def notes(name):
        while True:
            polls.append(name)
            yield

    for name in "abc":
        engine.start(notes(name), lambda: "a note")
    polls.clear()
    for _ in range(1000):
        clock.now += 20e-6
        engine.progress()
    assert polls == list("abc") * (len(polls) // 3)
    assert len(polls) // 3 == pytest.approx(1000 * 20 / 200, abs=10)  # an interval is of 10 calls, or with rounding 11


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, OSError, MemoryError])  # MPI.Exception is a RuntimeError
def test_an_error_belongs_to_its_operation_whoever_finds_it(kind):
    engine, log = make_engine(), []
    bad = engine.start(steps(log, "bad", 1, kind("boom")), lambda: "bad")
    good = engine.start(steps(log, "good", 3), lambda: "good")
    while not bad.complete:
        engine.progress()
    assert good.wait() is DONE
    for ask in (bad.wait, bad.test, bad.wait):
        with pytest.raises(kind, match="boom"):
            ask()


def test_an_operation_may_start_another():
    engine = make_engine()

    def outer():
        yield
        time.sleep(300e-6)  # so that the start polls all, this one too
        inner = engine.start(steps([], "inner", 2), lambda: "inner")
        while not inner.test():
            yield
        return inner.wait()

    assert engine.start(outer(), lambda: "outer").wait() is DONE


def test_a_dropped_operation_is_kept_until_it_is_done():
    engine, log = make_engine(), []
    engine.start(steps(log, "dropped", 5), lambda: "dropped")
    gc.collect()
    deadline = time.monotonic() + 10
    while log != ["dropped launched", "dropped done"] and time.monotonic() < deadline:
        engine.progress()
    assert log == ["dropped launched", "dropped done"]


def test_a_wait_too_long_says_for_what():
    engine = make_engine(timeout_seconds=0.05)

    def never():
        while True:
            yield

    work = engine.start(never(), lambda: "recv from 1 tag 7")
    rule = r"no rank may wait longer than 0\.05 s, but rank 3 waits for recv from 1 tag 7"
    with pytest.raises(TimeoutError, match=rule):
        work.wait()


def test_what_comes_while_a_process_is_held_up_is_in_time(clock):
    # It looked, was stopped until its time was up, and gave up without another look.
    def held_up():
        yield
        yield  # the start has looked
        clock.now += 1000
        yield
        return DONE

    assert make_engine(timeout_seconds=10).start(held_up(), lambda: "held up").wait() is DONE


def later(clock, num_waits):
    """Steps that take a hundredth of a second each."""
    for _ in range(num_waits):
        clock.now += 0.01
        yield
    return DONE


def test_a_rank_that_waits_answers_now_and_then_what_it_waits_for(clock):
    answers = []
    roll_call = SimpleNamespace(answer=lambda describe: answers.append((describe(), clock.now)))
    engine = make_engine(roll_call=roll_call)
    assert engine.start(later(clock, 100), lambda: "a barrier").wait() is DONE
    assert {words for words, _ in answers} == {"a barrier"}
    times = [now for _, now in answers]
    apart = np.diff([100.0, *times, 101.0])
    assert apart[:-1].min() > progress.LOOK_SECONDS
    assert apart.max() < progress.LOOK_SECONDS + 0.04


def test_what_an_error_of_an_answer_means_the_fault_watch_says(clock):
    def answer(describe):
        raise OSError("MPI knows why")

    watch = SimpleNamespace(check=lambda: None, translate=lambda error: RankFailure((len(str(error)),)))
    engine = make_engine(roll_call=SimpleNamespace(answer=answer), fault_watch=watch)
    with pytest.raises(RankFailure) as caught:
        engine.start(later(clock, 100), lambda: "a barrier").wait()
    assert caught.value.ranks == (13,)


def test_a_wait_ends_where_a_rank_has_died(clock):
    def check():
        if clock.now > 100.5:
            raise RankFailure((1,))

    engine = make_engine(fault_watch=SimpleNamespace(check=check, translate=lambda error: error))
    assert engine.start(later(clock, 40), lambda: "in time").wait() is DONE
    with pytest.raises(RankFailure):
        engine.start(later(clock, 100), lambda: "for ever").wait()
    assert clock.now < 101


def test_one_request_is_tested_until_it_is_done():
    answers = [False, False, True]
    steps = until_done(SimpleNamespace(Test=lambda: answers.pop(0)), DONE)
    assert [next(steps), next(steps)] == [None, None]
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert end.value.value is DONE


def test_waits_are_counted_until_an_exception_ends_them():
    engine = make_engine(timeout_seconds=0.02)

    def never():
        while True:
            yield

    work = engine.start(never(), lambda: "never")
    for num_waits in (1, 2):
        with pytest.raises(TimeoutError):
            work.wait()
        assert engine.wait_clock.seconds >= num_waits * 0.02


def test_only_waits_that_block_are_counted():
    engine, log = make_engine(), []
    done = engine.start(steps(log, "done", 0), lambda: "done")
    polled = engine.start(steps(log, "polled", 3), lambda: "polled")
    while not polled.test():
        engine.progress()
    done.wait()
    polled.wait()
    assert engine.wait_clock.seconds == 0


def test_the_longest_wait_is_positive():
    with pytest.raises(ValueError, match="timeout_seconds must be positive, got 0"):
        make_engine(timeout_seconds=0)


def test_a_thread_completes_operations_and_sleeps_when_there_are_none():
    engine = make_engine(thread=True)
    log = []
    work = engine.start(steps(log, "a", 3), lambda: "a")
    end = time.monotonic() + 30
    while not work.complete and time.monotonic() < end:
        time.sleep(0.001)
    assert work.complete
    polled = []
    engine._poll_all = lambda: polled.append(1)
    time.sleep(0.02)
    assert polled == []
    del engine._poll_all
    assert engine.start(steps(log, "b", 2), lambda: "b").wait() is DONE
    engine.stop()
    assert not any(thread.name == "progress" for thread in threading.enumerate())


def test_two_threads_never_move_one_operation_at_once():
    engine = make_engine(thread=True)
    inside = []

    def guarded():
        for _ in range(200):
            inside.append(1)
            assert len(inside) == 1
            time.sleep(0)
            inside.pop()
            yield
        return DONE

    works = [engine.start(guarded(), lambda: "guarded") for _ in range(3)]
    assert [work.wait() is DONE for work in works] == [True] * 3
    engine.stop()
