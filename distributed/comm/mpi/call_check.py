"""The check that all ranks make the same collectives: a row of bytes of each, exchanged before a call starts."""

from __future__ import annotations

from collections.abc import Callable, Generator

import numpy as np

from distributed.comm.calls import Call, describe_mismatch
from distributed.comm.mpi.progress import Steps
from distributed.comm.work import Array

_WHAT_BYTES, _WHERE_BYTES = 160, 224  # of a row: what must be equal, and from where


class CallCheck:
    """Compares each collective of a communicator over its ranks before it starts.

    Args:
        gather: collects a row of bytes of every rank, through messages of the check's own.
        label: of the communicator, where it is not of all ranks.
    """

    def __init__(self, gather: Callable[[Array], Steps], label: str) -> None:
        self._gather = gather
        self._label = label
        self._num_compared = 0
        self._mismatch: str | None = None

    def compare(self, number: int, call: Call, where: str) -> Generator[None, None, None]:
        """Wait until all ranks have come to this call, and to its predecessors.

        Args:
            number: of the call on its communicator, from 0.
            where: the line that makes it.
        Raises:
            RuntimeError: they make different calls here, or did at an earlier number; the same on every rank.
        """
        row = np.zeros(_WHAT_BYTES + _WHERE_BYTES, np.uint8)
        _write(row[:_WHAT_BYTES], str(call).encode()[:_WHAT_BYTES])  # what moves, and then what it is about
        _write(row[_WHAT_BYTES:], where.encode()[-_WHERE_BYTES:])  # of a long path the end says more
        rows = yield from self._gather(row)
        while self._num_compared < number:
            yield  # ranks match what follows by the order of its launch
        self._num_compared += 1
        if self._mismatch is None:
            calls = {rank: (_read(row[:_WHAT_BYTES]), _read(row[_WHAT_BYTES:])) for rank, row in enumerate(rows)}
            self._mismatch = describe_mismatch(number, calls, self._label)
        if self._mismatch is not None:
            raise RuntimeError(self._mismatch)


def _write(row: Array, text: bytes) -> None:
    row[: len(text)] = np.frombuffer(text, np.uint8)


def _read(row: Array) -> str:
    return row.tobytes().rstrip(b"\0").decode(errors="replace")
