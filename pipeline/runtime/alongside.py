"""Work done a step at a time in between the steps of something else."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import copy_context


class Alongside:
    """Steps that run whenever they are asked to, as if nothing else ran.

    They keep the context in which this was made: what asks may itself record nothing, draw other random numbers, or
    be in an op's hook that must not be called from here.
    """

    def __init__(self, steps: Iterator[None]) -> None:
        self._steps = steps
        self._context = copy_context()
        self._done = False
        self._error: BaseException | None = None

    def step(self) -> None:
        """Do one step, if any is left."""
        if self._error is not None:
            raise self._error  # whoever asked the last time has swallowed it
        if self._done:
            return
        try:
            self._done = self._context.run(_next, self._steps)
        except BaseException as error:
            self._error = error
            raise

    def finish(self) -> None:
        """Do all steps that are left."""
        while not self._done:
            self.step()


def _next(steps: Iterator[None]) -> bool:
    """Do one step; return whether there was none."""
    for _ in steps:
        return False
    return True
