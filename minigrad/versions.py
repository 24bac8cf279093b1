"""Versions: which memory was changed in place, and when.

Backward needs the values of the forward. Each owner of memory (a leaf tensor, or the flat that a parameter lies in)
has a `Version`, and every in-place change that goes through minigrad (optimizer, loading, `t.data = ...`) is noted
there. Time is counted in ticks: a node of the tape takes one when it is recorded, a change when it is noted, so a
change with a later tick than a node came after that op's forward. What cannot be seen: writes into `t.data[...]`, and
changes of one of two tensors that were made from the same array.
"""

from __future__ import annotations

import itertools
import threading

from minigrad.backend import Array, memory_range

tick = itertools.count().__next__  # the next moment, over all threads


class Version:
    """The in-place changes of one owner's memory.

    Attributes:
        newest: tick of the last change; -1 before the first.
    """

    __slots__ = ("_changes", "_lock", "newest")

    def __init__(self) -> None:
        self.newest = -1
        self._changes: dict[tuple[int, int], tuple[int, str]] = {}  # (first byte, one past the last) -> last change
        self._lock = threading.Lock()

    def note(self, array: Array, name: str) -> None:
        """Note that `array`, called `name`, has just been changed in place."""
        changed = memory_range(array)
        with self._lock:  # of two threads the later tick has to stay
            self.newest = tick()
            self._changes[changed] = (self.newest, name)

    def since(self, when: int, array: Array) -> str | None:
        """Return the name of what changed `array`'s memory after the tick `when`, or None."""
        start, stop = memory_range(array)
        with self._lock:
            for (first, end), (changed_at, name) in self._changes.items():
                if changed_at > when and first < stop and start < end:
                    return name
        return None

    def absorb(self, other: Version) -> None:
        """Take over the changes of memory whose values move here.

        The old memory may be gone, and its place given to somebody else. That does no harm: whoever holds it now got it
        after those changes.
        """
        with self._lock, other._lock:
            self.newest = max(self.newest, other.newest)
            self._changes |= other._changes
