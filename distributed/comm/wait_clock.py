"""How long a rank has been blocked: what communication costs that nothing hides."""

from __future__ import annotations

import threading
import time


class WaitClock:
    """Seconds during which at least one wait went on.

    A wait inside a wait, or on a second thread, counts once.

        with clock:
            ...  # blocks

    Attributes:
        seconds: of the waits that have ended, by an exception too.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._num_waits = 0
        self._start = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if self._num_waits == 0:
                self._start = time.perf_counter()
            self._num_waits += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_waits -= 1
            if self._num_waits == 0:
                self.seconds += time.perf_counter() - self._start
