"""What the ranks have to know of each other's backward before they step: whether it ended, and what it reached.

One number for each parameter travels, 1 where this rank's backward reached it, one for a launch order that should be
learned anew, and one for a backward that was given up; of all ranks the largest counts. It is the last message of a
step: who has its result knows that all ranks step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distributed.comm.communicator import Communicator, ReduceOp, Work
from minigrad.parameter import Parameter


class Verdict:
    """The ranks' verdict on one step after the other.

    Attributes:
        is_sent: this rank has said what it has to say, so that others may act on it.
        is_given_up: this rank, or after `wait` any rank, has given its backward up.
        wants_order: after `wait`, all ranks are to learn the order of launches from rank 0.
    """

    def __init__(self, params: Sequence[Parameter], comm: Communicator) -> None:
        self._params = params
        self._comm = comm
        self._flags = np.zeros(len(params) + 2, np.uint8)  # of this rank; once they are there, of all
        self._work: Work | None = None
        self.is_sent = self.is_given_up = self.wants_order = False

    def reset(self, reached: Sequence[bool]) -> None:
        """Begin a step, whose backward reaches these parameters here."""
        self._flags[:-2], self._flags[-2:] = reached, 0
        self._work = None
        self.is_sent = self.is_given_up = self.wants_order = False

    def ask_for_order(self) -> None:
        """Say that the order of launches is not that in which buckets become complete."""
        self._flags[-2] = 1

    def give_up(self) -> None:
        """Say that no rank may take this step."""
        self._flags[-1] = 1
        self.is_given_up = True

    def send(self) -> None:
        """Launch the message, if it is not under way. Collective."""
        if self._work is None:
            self._work = self._comm.allreduce(self._flags, op=ReduceOp.MAX)
            self.is_sent = True

    def wait(self) -> list[str] | None:
        """Block until all ranks have said what they have to say. Collective.

        Returns:
            Names of the parameters that no rank's backward reached; None where a rank gave its backward up.
        """
        self.send()
        assert self._work is not None
        self._work.wait()  # in place
        self.wants_order, self.is_given_up = map(bool, self._flags[-2:])
        if self.is_given_up:
            return None
        return [p.name for p, flag in zip(self._params, self._flags[:-2], strict=True) if not flag]
