"""Clocks for a recorder: the host's, or a GPU's, which tells when kernels run and not when they are launched.

A moment is what a clock gives at once; its time in seconds may be asked for later, and on a GPU waits for it.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import numpy as np

from distributed.comm.work import Work


class Clock(Protocol):
    """What a recorder asks."""

    def start(self) -> None:
        """Begin a recording."""

    def now(self) -> Any:
        """Return this moment."""

    def end_of(self, work: Work) -> Any:
        """Return the moment at which work is over; asked when it is seen to be."""

    def seconds(self, moment: Any) -> float:
        """Return the time of a moment of this recording.

        It is on the host's clock `time.perf_counter`.
        """


class HostClock:
    """The time at which this process does something."""

    def start(self) -> None:
        """Do nothing: it always runs."""

    def now(self) -> float:
        return time.perf_counter()

    def end_of(self, work: Work) -> float:
        return self.now()

    def seconds(self, moment: float) -> float:
        return moment


class DeviceClock:
    """The time at which the current stream of a GPU comes to something.

    Moments of it are events. A recording begins with a wait for the GPU, so that one event is at a known time of the
    host.

    Args:
        cuda: `cupy.cuda`.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._first: Any = None
        self._first_seconds = 0.0

    def start(self) -> None:
        self._first = self.now()
        self._first.synchronize()
        self._first_seconds = time.perf_counter()

    def now(self) -> Any:
        return self._cuda.get_current_stream().record()

    def end_of(self, work: Work) -> Any:
        return self.now() if work.done_event is None else work.done_event

    def seconds(self, moment: Any) -> float:
        moment.synchronize()
        return self._first_seconds + self._cuda.get_elapsed_time(self._first, moment) / 1e3


def clock_of(xp: Any) -> Clock:
    """Return the clock for what is computed by an array module, numpy or cupy."""
    return HostClock() if xp is np else DeviceClock(xp.cuda)
