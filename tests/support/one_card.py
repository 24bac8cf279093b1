"""Two ranks that share a GPU, as if each had its own: NCCL refuses them, mailboxes do not.

So a captured step of two ranks can be tried on one card. Eager messages and reductions go through the host; those of a
step that is captured go by mailbox, reductions too, which NCCL would do elsewhere.

mpirun -n 2 python -m pytest -m "mpi and gpu" -k captured --one-card tests
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from distributed.comm.communicator import Communicator
from distributed.comm.nccl import NCCLCommunicator
from distributed.comm.nccl.messages import NCCLMessages
from distributed.comm.nccl.side_stream import is_capturing
from distributed.comm.nccl.stream_flags import StreamFlags
from distributed.comm.reduction import ReduceOp
from distributed.comm.work import Array, CompletedWork, Work
from minigrad.backend import cupy, xp_of

_DEFAULT_COPY = 4  # by the addresses


class OneCard(NCCLCommunicator):
    """A communicator of two ranks over another one of them. Making one is collective."""

    def __init__(self, host: Communicator) -> None:
        assert host.size == 2
        Communicator.__init__(self, host.rank, host.size, max_message_elements=host.max_message_elements)
        self._host, self._wait_contexts, self._cp = host, host._wait_contexts, cupy()
        self._messages = None
        self._reductions = self._new_messages([(0, 1), (1, 0)])

    @property
    def library(self) -> str:
        return f"{self._host.library} and NCCL's ways on one card"

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        self._messages = self._new_messages(pairs)

    def _new_messages(self, pairs: Iterable[tuple[int, int]]) -> NCCLMessages:
        host = self._host.duplicate()
        messages = NCCLMessages(host, pairs, cp=self._cp, nccl=HostNCCL(self._cp, host), flags=StreamFlags())
        assert messages._mailboxes is not None
        assert all(map(messages._mailboxes.connects, pairs)), "processes cannot share this GPU's memory"
        return messages

    def _split(self, color: int, key: int) -> Communicator:
        part = self._host.split(color, key)
        return OneCard(part) if part.size > 1 else part

    def _broadcast(self, array: Array, root: int) -> Work:
        if not self._is_captured(array):
            return self._host.broadcast(array, root=root)
        if self.rank == root:
            self._reductions.isend(array, 1 - root, 0).wait()
        else:
            self._reductions.irecv(array, root, 0).wait()
        return CompletedWork(array)

    def _allreduce(self, array: Array, op: ReduceOp) -> Work:
        if not self._is_captured(array):
            return self._host.allreduce(array, op=op)
        assert op is ReduceOp.SUM
        sent, other = array.copy(), self._cp.empty_like(array)
        work = self._reductions.isend(sent, 1 - self.rank, 0)
        array += self._reductions.irecv(other, 1 - self.rank, 0).wait()
        work.wait()
        return CompletedWork(array)

    def average(self, array: Array) -> Work:
        if not self._is_captured(array):
            return self._host.average(array)
        array *= array.dtype.type(1 / self.size)
        return self._allreduce(array, ReduceOp.SUM)

    def _is_captured(self, array: Array) -> bool:
        return xp_of(array) is not np and is_capturing(self._cp)


class HostNCCL:
    """As much of NCCL as messages outside of a graph need, through the host, which waits."""

    def __init__(self, cp: Any, host: Communicator) -> None:
        self._cp, self._host = cp, host.duplicate()
        self._sent: list[Work] = []

    def get_unique_id(self) -> int:
        return 0

    def NcclCommunicator(self, size: int, unique_id: int, rank: int) -> HostNCCL:
        return self

    def send(self, pointer: int, count: int, dtype: int, dest: int, stream: int) -> None:
        values = np.empty(count, np.uint8)
        self._copy(values.ctypes.data, pointer, count, stream)
        self._sent = [work for work in self._sent if not work.test()]
        self._sent.append(self._host.isend(values, dest=1 - self._host.rank, tag=0))

    def recv(self, pointer: int, count: int, dtype: int, source: int, stream: int) -> None:
        values = self._host.recv(np.empty(count, np.uint8), source=1 - self._host.rank, tag=0)
        self._copy(pointer, values.ctypes.data, count, stream)

    def _copy(self, target: int, source: int, count: int, stream: int) -> None:
        runtime = self._cp.cuda.runtime
        runtime.streamSynchronize(stream)
        runtime.memcpy(target, source, count, _DEFAULT_COPY)
