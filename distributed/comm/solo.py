"""The group of one rank: a script needs no other code path outside mpirun."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any, NoReturn

import numpy as np

from distributed.comm.communicator import MAX_MESSAGE_ELEMENTS, PORTABLE_MAX_TAG, Communicator
from distributed.comm.reduction import ReduceOp
from distributed.comm.transfer import as_bytes, unpack
from distributed.comm.work import Array, CompletedWork, Work
from minigrad.backend import round_to


class SoloCommunicator(Communicator):
    """The group of one rank.

    Every collective is over at once, and a message to itself waits in a queue. A receive that is waited for before its
    send would wait for ever, so that wait raises RuntimeError.
    """

    def __init__(self, *, max_message_elements: int = MAX_MESSAGE_ELEMENTS) -> None:
        super().__init__(rank=0, size=1, max_message_elements=max_message_elements)
        self._messages: dict[tuple[int, int], Array] = {}  # by tag and number within the tag
        self._num_sent: defaultdict[int, itertools.count[int]] = defaultdict(itertools.count)
        self._num_posted: defaultdict[int, itertools.count[int]] = defaultdict(itertools.count)

    @property
    def library(self) -> str:
        return "no MPI"

    @property
    def max_tag(self) -> int:
        return PORTABLE_MAX_TAG

    @property
    def waited_seconds(self) -> float:
        return 0.0  # there is nobody to wait for

    def gather_objects(self, obj: object) -> list[Any]:
        return [obj]

    def barrier(self) -> None:
        pass

    def abort(self, message: str) -> NoReturn:
        raise SystemExit(f"[rank {self.rank}] {message}")

    def _broadcast(self, array: Array, root: int) -> Work:
        return CompletedWork(array)

    def _allreduce(self, array: Array, op: ReduceOp) -> Work:
        return CompletedWork(array)

    def _reduce_scatter(self, flat: Array, op: ReduceOp) -> Work:
        return CompletedWork(flat[:])

    def _sum_widely(self, array: Array, wide: Array, is_wide: Array, everywhere: bool) -> Work:
        if is_wide[0]:
            round_to(array, wide)
        return CompletedWork(array)

    def _allgather(self, array: Array) -> Work:
        return CompletedWork(array[np.newaxis].copy())

    def _all_to_all(self, array: Array) -> Work:
        return CompletedWork(array.copy())

    def _split(self, color: int, key: int) -> Communicator:
        return SoloCommunicator(max_message_elements=self.max_message_elements)

    def _reads_gpu_memory(self, call: str) -> bool:
        return call not in ("isend", "irecv")  # a message may come from a GPU and go to the host

    def _finish_writing(self, array: Array) -> None:
        """Wait for nothing: a copy comes after the kernels that write its array, on the same stream."""

    def _isend(self, array: Array, dest: int, tag: int) -> Work:
        self._messages[tag, next(self._num_sent[tag])] = as_bytes(array).copy()
        return CompletedWork(array)

    def _irecv(self, array: Array, source: int, tag: int) -> Work:
        return _SoloReceive(array, self._messages, (tag, next(self._num_posted[tag])))


class _SoloReceive(Work):
    def __init__(self, array: Array, messages: dict[tuple[int, int], Array], key: tuple[int, int]) -> None:
        self._array = array
        self._messages = messages
        self._key = key
        self._complete = False

    def test(self) -> bool:
        if not self._complete and self._key in self._messages:
            unpack(self._messages[self._key], self._array, source=0, tag=self._key[0])
            del self._messages[self._key]
            self._complete = True
        return self._complete

    def wait(self) -> Array:
        if not self.test():
            raise RuntimeError(f"a single rank waits for a message to itself, tag {self._key[0]}, before it sends it")
        return self._array
