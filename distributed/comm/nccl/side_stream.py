"""A CUDA stream beside the one that computes: what runs there begins and ends in step with it, and no host waits.

    current stream   ...kernels that write the array... |      ...kernels...      | wait() | kernels that read it
    side stream                                          `-> operation -----------------'

All of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed.comm.work import Array, Work

_HIGHEST_PRIORITY = -5  # or the nearest that there is


class SideStream:
    """A stream for communication.

    Before all else: a message needs few of the multiprocessors, but would wait for kernels that fill them all.

    Args:
        cp: CuPy.
    """

    def __init__(self, cp: Any) -> None:
        self._cp = cp
        self._stream = cp.cuda.Stream(non_blocking=True, priority=_HIGHEST_PRIORITY)
        self._unfinished: list[StreamWork] = []  # keeps arrays that are read and written

    def start(
        self, result: Array, launch: Callable[[int], None], read: object = None, *, after: Any = None
    ) -> StreamWork:
        """Launch an operation.

        Args:
            result: what it gives.
            launch: is given the stream; not called where there is nothing in `result`.
            read: arrays that it reads beside it.
            after: the event that it waits for; by default what the current stream has to do already.
        """
        current = self._cp.cuda.get_current_stream()
        self._stream.wait_event(current.record() if after is None else after)
        if result.size:
            with self._stream:
                launch(self._stream.ptr)
        work = StreamWork(self._cp, result, read, self._stream.record(), is_captured=is_capturing(self._cp))
        if not is_capturing(self._cp):
            self._unfinished = [other for other in self._unfinished if not other.is_over()]
        self._unfinished.append(work)
        return work

    def synchronize(self) -> None:
        """Let the host wait until all that was started is done."""
        self._stream.synchronize()


def is_capturing(cp: Any) -> bool:
    """Return whether what the current stream is told becomes part of a CUDA graph."""
    return bool(cp.cuda.runtime.streamIsCapturing(cp.cuda.get_current_stream().ptr))


class StreamWork(Work):
    """An operation on a side stream."""

    def __init__(self, cp: Any, result: Array, read: object, done: Any, *, is_captured: bool) -> None:
        self._done = done
        self._cp = cp
        self._result = result
        self._read = read
        self._is_captured = is_captured

    def wait(self) -> Array:
        """Let the current stream wait; the host goes on."""
        self._cp.cuda.get_current_stream().wait_event(self._done)
        return self._result

    def test(self) -> bool:
        return not self._is_captured and self.is_over()

    def is_over(self) -> bool:
        """Return whether its arrays can go.

        The GPU is done with it, or a graph has it, and its capture is over.
        """
        return self._is_captured or bool(self._done.done)

    @property
    def done_event(self) -> Any:
        return self._done
