"""StopRequest: a signal to any rank ends the run of all of them, after the same step."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

import numpy as np

from distributed.comm.communicator import Communicator, ReduceOp

# Open MPI's mpirun passes SIGUSR1 on too, and does not kill soon after it. SIGINT is a person's Ctrl-C.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Notes signals that ask this process to end, instead of ending it.

    Making one is collective. A second Ctrl-C is not noted: it ends the process as ever.

        with StopRequest(comm) as stop:
            for step in ...:
                ...
                if stop.agreed():
                    break

    Signals are handled by the main thread only, so the `with` belongs there.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm.duplicate()
        self._requested = False
        self._before: dict[signal.Signals, Any] = {}

    def rebind(self, comm: Communicator) -> None:
        """Agree with the ranks of another communicator from now on. Collective over them."""
        self._comm = comm.duplicate()

    def request(self) -> None:
        """Ask as a signal does."""
        self._requested = True

    def agreed(self) -> bool:
        """Return whether any rank was asked to stop. Collective.

        It costs one small message, once a step.
        """
        requested = np.array([self._requested], np.int64)
        return bool(self._comm.allreduce(requested, op=ReduceOp.MAX).wait()[0])

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
        if number == signal.SIGINT:
            signal.signal(number, self._before[signal.SIGINT])

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
