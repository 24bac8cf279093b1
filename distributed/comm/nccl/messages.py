"""Messages of GPU arrays between two ranks through NCCL, which knows no tags.

    source   isend   header (tag, size, its way) by the host ---->  headers come in the order of the sends
                     ncclSend on the lane source -> dest     ---->  ncclRecv into what is posted for that tag,
                                                                    or aside, if nothing is posted yet

On a lane the k-th send meets the k-th receive, and a send is over when it is received. So each direction between two
ranks has a lane of its own, a communicator of two and a stream: no message waits for one of another direction. Hosts
wait for headers, that is for the other host to have launched its send, never for a GPU. In a step that is captured
headers travel once, and what they led to is replayed; there messages go by mailboxes (`mailboxes.py`), where two ranks
have them.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from distributed.comm.communicator import Communicator
from distributed.comm.nccl.mailboxes import Mailboxes, Slot
from distributed.comm.nccl.side_stream import SideStream, is_capturing
from distributed.comm.nccl.stream_flags import StreamFlags
from distributed.comm.transfer import as_bytes, message_size_error
from distributed.comm.work import Array, Work
from minigrad.backend import address, to_host, xp_of

Pair = tuple[int, int]  # source, dest
_UINT8 = 1  # of NCCL's data types
_HEADER_TAG = 0
_BY_HOST, _BY_NCCL, _BY_MAILBOX = range(3)  # ways of a message


def new_nccl(nccl: Any, size: int, unique_id: Any, rank: int) -> Any:
    """Make a communicator of NCCL. Collective.

    It is never ended but with the process: ncclCommDestroy waits for other ranks, and for ever where it is in a graph.
    """
    comm = nccl.NcclCommunicator(size, unique_id, rank)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(comm))
    return comm


class NCCLMessages:
    """The messages of one rank with those that it is connected to.

    Making one is collective over `host`. A message to another rank goes the same way whatever array it is of, since the
    other end may have it on the host.

    Args:
        host: the same ranks, by another way: carries headers, and arrays of the host.
        pairs: of all ranks, the same on each: who sends to whom.
        nccl: NCCL, as CuPy has it.
        flags: what mailboxes need, or None for none.
    """

    def __init__(
        self, host: Communicator, pairs: Iterable[Pair], *, cp: Any, nccl: Any, flags: StreamFlags | None
    ) -> None:
        pairs = list(pairs)
        self._host = host
        self._mailboxes = None if flags is None else Mailboxes(host, pairs, cp=cp, flags=flags)
        self._cp = cp
        self._headers = host.duplicate()
        self._headers._wait_contexts = host._wait_contexts  # an error says in whose name a header was waited for
        self._next_header: dict[int, Work] = {}  # by source
        self._sent_headers: list[Work] = []
        self._posted: defaultdict[Pair, deque[_Receive]] = defaultdict(deque)  # by source and tag
        self._num_posted: defaultdict[int, int] = defaultdict(int)  # by source
        self._early: defaultdict[Pair, deque[_Arrived]] = defaultdict(deque)  # by source and tag
        ids = host.gather_objects({pair: nccl.get_unique_id() for pair in pairs if pair[0] == host.rank})
        id_of = {pair: unique_id for own in ids for pair, unique_id in own.items()}
        # All ranks take the pairs in the same order, so that the two of the first one left are always both there.
        self._lanes = {
            pair: _Lane(
                cp, nccl.NcclCommunicator(2, id_of[pair], pair.index(host.rank)), is_source=pair[0] == host.rank
            )
            for pair in sorted(id_of)
            if host.rank in pair
        }

    def connects(self, source: int, dest: int) -> bool:
        return (source, dest) in self._lanes

    def isend(self, array: Array, dest: int, tag: int) -> Work:
        pair, on_gpu = (self._host.rank, dest), xp_of(array) is not np
        pushed = self._push(array, pair) if on_gpu else None
        way = _BY_MAILBOX if pushed else _BY_NCCL if on_gpu else _BY_HOST
        slot = pushed[1] if pushed else Slot(0, 0)
        self._sent_headers = [work for work in self._sent_headers if not work.test()]
        header = np.array([tag, array.nbytes, way, *slot], np.int64)
        self._sent_headers.append(self._headers.isend(header, dest=dest, tag=_HEADER_TAG))
        if pushed:
            return pushed[0]
        return self._lanes[pair].send(array) if on_gpu else self._host._isend(array, dest, tag)

    def _push(self, array: Array, pair: Pair) -> tuple[Work, Slot] | None:
        """Start sending by mailbox, if that is the way."""
        if self._mailboxes is None or not self._mailboxes.connects(pair) or not is_capturing(self._cp):
            return None
        return self._mailboxes.send(array, pair)

    def irecv(self, array: Array, source: int, tag: int) -> Work:
        receive = _Receive(self, array, source, tag)
        early = self._early[source, tag]
        if early:
            receive.arrived = early.popleft()
        else:
            self._posted[source, tag].append(receive)
            self._num_posted[source] += 1
        return receive

    def progress(self) -> None:
        """Launch receives whose sends are launched."""
        for source in [source for source, count in self._num_posted.items() if count]:
            while self.pull(source, block=False):
                pass

    def pull(self, source: int, *, block: bool) -> bool:
        """Take the next message of a rank, if a receive waits for one and one is announced."""
        if not self._num_posted[source]:
            return False
        if source not in self._next_header:
            header = np.empty(5, np.int64)
            self._next_header[source] = self._headers.irecv(header, source=source, tag=_HEADER_TAG)
        if not block and not self._next_header[source].test():
            return False
        tag, num_bytes, way, *slot = self._next_header.pop(source).wait().tolist()
        on_gpu, pair = way != _BY_HOST, (source, self._host.rank)
        waiting = self._posted[source, tag]
        receive = waiting.popleft() if waiting else None
        if receive is not None and (receive.array.nbytes, receive.on_gpu) == (num_bytes, on_gpu):
            target, posted = receive.array, receive.posted
        else:
            target, posted = (self._cp if on_gpu else np).empty(num_bytes, np.uint8), None
        if way == _BY_MAILBOX:
            assert self._mailboxes is not None
            work: Work = self._mailboxes.receive(target, pair, Slot(*slot))
        elif way == _BY_NCCL:
            work = self._lanes[pair].receive(target, posted)
        else:
            work = self._host._irecv(target, source, tag)
        arrived = _Arrived(target, work)
        if receive is None:
            self._early[source, tag].append(arrived)
        else:
            receive.arrived = arrived
            self._num_posted[source] -= 1
        return True


class _Lane:
    """One direction between two ranks."""

    def __init__(self, cp: Any, nccl: Any, *, is_source: bool) -> None:
        self._nccl = nccl
        self._stream = SideStream(cp)
        byte = cp.zeros(1, np.uint8)
        # The first message makes the connection, for which the hosts wait for each other.
        if is_source:
            self.send(byte)
        else:
            self.receive(byte, None)
        self._stream.synchronize()

    def send(self, array: Array) -> Work:
        return self._stream.start(
            array, lambda stream: self._nccl.send(address(array), array.nbytes, _UINT8, 1, stream)
        )

    def receive(self, array: Array, after: Any) -> Work:
        return self._stream.start(
            array, lambda stream: self._nccl.recv(address(array), array.nbytes, _UINT8, 0, stream), after=after
        )


class _Arrived:
    """A message under way into `target`: the array of its receive, or memory aside."""

    def __init__(self, target: Array, work: Work) -> None:
        self.target = target
        self.work = work


class _Receive(Work):
    """A receive that is posted.

    Attributes:
        posted: an event: from when on the array may be written to; of a GPU array.
        arrived: its message, once that is announced.
    """

    def __init__(self, messages: NCCLMessages, array: Array, source: int, tag: int) -> None:
        self.array = array
        self.on_gpu = xp_of(array) is not np
        self.posted = xp_of(array).cuda.get_current_stream().record() if self.on_gpu else None
        self.arrived: _Arrived | None = None
        self._messages = messages
        self._source = source
        self._tag = tag
        self._is_landed = False

    def wait(self) -> Array:
        while self.arrived is None:
            self._messages.pull(self._source, block=True)
        if not self._is_landed:
            message = self.arrived.work.wait()
            if message is not self.array:
                self._copy(message)
            self._is_landed = True
            self.arrived.target = self.array  # memory aside can go
        return self.array

    def test(self) -> bool:
        while self.arrived is None:
            if not self._messages.pull(self._source, block=False):
                return False
        if self._is_landed or self.arrived.work.test():
            self.wait()
            return True
        return False

    def _copy(self, message: Array) -> None:
        if message.nbytes != self.array.nbytes:
            longer = message.nbytes > self.array.nbytes
            raise message_size_error(self.array, source=self._source, tag=self._tag, longer=longer)
        xp = xp_of(self.array)
        as_bytes(self.array)[...] = to_host(message) if xp is np else xp.asarray(message)
