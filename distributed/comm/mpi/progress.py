"""Operations that move only when they are asked: a progress engine for whatever can be polled.

An operation is a generator: it launches something, yields as long as it has to wait for other ranks, and returns its
result. Whatever takes several messages (exchange, add, gather) is written down as a sequence of steps, and moves while
its rank computes, because `progress()` polls every unfinished operation.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator
from typing import Protocol, TypeAlias, cast

from distributed.comm.mpi.roll_call import LOOK_SECONDS, RollCall
from distributed.comm.sequence import MessageSteps
from distributed.comm.wait_clock import WaitClock
from distributed.comm.work import Array, Work

Steps: TypeAlias = Generator[None, None, Array]


class Request(Protocol):
    """A non-blocking call of mpi4py."""

    def Test(self) -> bool: ...


class FaultWatch(Protocol):
    """What notices that ranks have died, in a world that survives it."""

    def check(self) -> None:
        """Raise RankFailure if it knows of a death."""

    def translate(self, error: Exception) -> Exception:
        """Return RankFailure for an error that a death has caused.

        Any other error is returned as it is.
        """


def until_done(request: Request, result: Array) -> Steps:
    """Wait for one request, and return the result that is there then.

    What the request reads must live as long: the steps that wait for it hold it.
    """
    while not request.Test():
        yield
    return result


def until_sequence_done(steps: MessageSteps) -> Steps:
    """Wait for the messages of a sequence, one after the other."""
    try:
        part = next(steps)
        while True:
            while not part.test():
                yield
            part = steps.send(part.wait())
    except StopIteration as end:
        return cast(Array, end.value)


_SPIN_SECONDS = 20e-6  # of a wait, before it lets other operations and other processes have the core
_PROGRESS_SECONDS = 200e-6  # a poll of many operations costs microseconds, and a backward has thousands of ops


class Engine:
    """The unfinished operations of a family of communicators.

    It keeps them and their arrays alive until they are done.

    Args:
        rank: in the world, for an error message.
        timeout_seconds: the longest single wait.
        thread: whether a thread of the engine's own polls too, while anything is unfinished.
        roll_call: asks the other ranks what they wait for, for an error message; it is answered in waits.
        fault_watch: ends waits when a rank has died; None where that ends the job.
    Attributes:
        wait_clock: time spent in wait_for; what the engine's own thread does is no wait.
    Raises:
        ValueError: timeout_seconds is not positive.
    """

    def __init__(
        self,
        *,
        rank: int,
        timeout_seconds: float,
        thread: bool = False,
        roll_call: RollCall | None = None,
        fault_watch: FaultWatch | None = None,
    ) -> None:
        if timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds must be positive, got {timeout_seconds}")
        self._rank = rank
        self.timeout_seconds = timeout_seconds
        self.wait_clock = WaitClock()
        self._roll_call = roll_call
        self._fault_watch = fault_watch
        self._lock = threading.RLock()  # one thread moves an operation; one operation may start another
        self._unfinished: dict[Operation, None] = {}  # in order of launch
        self._last_progress = 0.0
        self._busy = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._poll_while_busy, name="progress", daemon=True) if thread else None
        if self._thread is not None:
            self._thread.start()

    def start(self, steps: Steps, describe: Callable[[], str]) -> Operation:
        """Launch an operation: run its steps up to the first that has to wait.

        Args:
            describe: what a rank waits for that waits for it, for an error message.
        """
        operation = Operation(self, steps, describe)
        with self._lock:
            if not self.move(operation):
                self._unfinished[operation] = None
                if self._thread is not None:
                    self._busy.set()
        self.progress()
        return operation

    def progress(self) -> None:
        """Poll what is unfinished, at most every 200 us."""
        now = time.perf_counter()
        if now - self._last_progress >= _PROGRESS_SECONDS:
            self._last_progress = now
            self._poll_all()

    def wait_for(self, operation: Operation) -> None:
        """Block until an operation is complete.

        The others move meanwhile, since other ranks may wait for those.

        Raises:
            TimeoutError: it took too long.
            RankFailure: a rank has died.
        """
        start = time.perf_counter()
        next_look = start + LOOK_SECONDS
        now = start  # of the look that follows: one that finds nothing after the time is over is the last
        with self.wait_clock:
            while not self.move(operation):
                looked, now = now, time.perf_counter()
                if now - start < _SPIN_SECONDS:
                    continue
                self.progress()
                if self._fault_watch is not None:
                    self._fault_watch.check()
                if looked - start > self.timeout_seconds:
                    others = "" if self._roll_call is None else self._roll_call.ask(operation.describe)
                    raise TimeoutError(
                        f"no rank may wait longer than {self.timeout_seconds:g} s, but rank {self._rank} waits for "
                        f"{operation.describe()}{others}"
                    )
                if self._roll_call is not None and now > next_look:
                    try:
                        self._roll_call.answer(operation.describe)
                    except Exception as error:
                        raise self.translate(error) from error
                    next_look = now + LOOK_SECONDS
                os.sched_yield()  # a rank without a core of its own would take its neighbour's

    def translate(self, error: Exception) -> Exception:
        """Return what an operation's error means."""
        return error if self._fault_watch is None else self._fault_watch.translate(error)

    def stop(self) -> None:
        """End the engine's thread, if it has one; nothing moves by itself afterwards."""
        if self._thread is not None:
            self._stopped = True
            self._busy.set()
            self._thread.join()

    def move(self, operation: Operation) -> bool:
        """Take an operation as far as it goes now; return whether it is complete."""
        with self._lock:
            if not operation.complete and operation.step():
                self._unfinished.pop(operation, None)
                if not self._unfinished:
                    self._busy.clear()
            return operation.complete

    def _poll_all(self) -> None:
        with self._lock:
            for operation in list(self._unfinished):
                operation.poll()

    def _poll_while_busy(self) -> None:
        while True:
            self._busy.wait()
            if self._stopped:
                return
            self._poll_all()
            time.sleep(_PROGRESS_SECONDS)


class Operation(Work):
    """An operation that an engine moves.

    An error of it is kept for wait() and test(), whoever finds it first.
    """

    def __init__(self, engine: Engine, steps: Steps, describe: Callable[[], str]) -> None:
        self._engine = engine
        self._steps = steps
        self.describe = describe
        self.complete = False
        self._moving = False
        self._result: Array | None = None
        self._error: Exception | None = None

    def wait(self) -> Array:
        if not self.complete:
            self._engine.wait_for(self)
        return self._outcome()

    def test(self) -> bool:
        if self.poll():
            self._outcome()
        return self.complete

    def poll(self) -> bool:
        """Move on without blocking or raising; return whether the operation is complete."""
        return self.complete or self._engine.move(self)

    def step(self) -> bool:
        """Run to the next yield; return whether that was the end.

        Only the engine calls it, in its lock.
        """
        if self._moving:
            return False  # it is just starting another operation, which lets all of them move
        self._moving = True
        try:
            next(self._steps)
        except StopIteration as end:
            self._result = end.value
        except Exception as error:
            self._error = self._engine.translate(error)
        else:
            return False
        finally:
            self._moving = False
        self.complete = True
        return True

    def _outcome(self) -> Array:
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result
