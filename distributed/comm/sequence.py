"""Operations of several messages, where each is launched when the one before it has come.

    steps:   first = yield comm.all_to_all(parts)       a generator, which is sent the result of each Work
             second = yield other.allgather(sum(first))     `other` is a duplicate: see below
             return second

A communicator whose operations move while a rank computes moves these too (`Communicator.sequence`); any other one
moves them when somebody tests them or waits. Ranks get to the second message of two sequences in any order, but match
collectives in the order of their launch: so a later message goes through another communicator than the first ones,
which are launched where the sequence begins, and waits there for its turn.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias

import numpy as np

from distributed.comm.work import Array, Work

MessageSteps: TypeAlias = Generator[Work, Array, Array]


class SequenceWork(Work):
    """A sequence that moves when it is tested or waited for.

    One that fails keeps failing, and so says why.
    """

    def __init__(self, steps: MessageSteps) -> None:
        self._steps = steps
        self._part: Work
        self._result: Array | None = None
        self._error: BaseException | None = None
        self._go_on(None)

    def test(self) -> bool:
        while self._result is None and self._under_way().test():
            self._go_on(self._part.wait())
        return self._result is not None

    def wait(self) -> Array:
        while self._result is None:
            self._go_on(self._under_way().wait())
        return self._result

    def _under_way(self) -> Work:
        if self._error is not None:
            raise self._error
        return self._part

    def _go_on(self, result: Array | None) -> None:
        try:
            self._part = next(self._steps) if result is None else self._steps.send(result)
        except StopIteration as end:
            self._result = end.value
        except BaseException as error:
            self._error = error
            raise


class Turn(Work):
    """Over when the sequence before has launched its later message.

    `yield turn`, then launch, and `take` it.

    Args:
        before: that sequence's; None for the first.

    Attributes:
        sequence: whose turn this is.
    """

    def __init__(self, before: Turn | None) -> None:
        self._before = before
        self.sequence: Work | None = None
        self.is_taken = False

    def take(self) -> None:
        """Say that the later message of this sequence is launched now."""
        self.is_taken = True
        self._before = None

    def test(self) -> bool:
        return self._before is None or self._before.is_taken

    def wait(self) -> Array:
        if self._before is not None and not self._before.is_taken:
            assert self._before.sequence is not None
            self._before.sequence.wait()
        return np.empty(0)
