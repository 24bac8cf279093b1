"""Work: an operation under way, and the ways to make one out of others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


class Work(ABC):
    """An operation under way."""

    @abstractmethod
    def wait(self) -> Array:
        """Block until the operation is complete and return its result.

        Later calls return it again.
        """

    @abstractmethod
    def test(self) -> bool:
        """Return whether the operation is complete, without blocking.

        Once it has returned True the result is there, and wait() does not block.
        """

    @property
    def done_event(self) -> Any:
        """The event of a GPU at which it is over, where it runs on one; None elsewhere."""
        return None


class CompletedWork(Work):
    """An operation that was over at once."""

    def __init__(self, result: Array) -> None:
        self._result = result

    def wait(self) -> Array:
        return self._result

    def test(self) -> bool:
        return True


class JoinedWork(Work):
    """Several operations as one, and what is made of their results.

    Args:
        parts: the operations.
        land: called once, at the wait() or test() that finds them all complete, with their results; gives this one's.
    """

    def __init__(self, parts: Sequence[Work], land: Callable[[list[Array]], Array]) -> None:
        self._parts = parts
        self._land = land
        self._result: Array | None = None

    def wait(self) -> Array:
        if self._result is None:
            self._result = self._land([part.wait() for part in self._parts])
            self._parts = ()  # their buffers can go
        return self._result

    def test(self) -> bool:
        if self._result is None and all(part.test() for part in self._parts):
            self.wait()
        return self._result is not None
