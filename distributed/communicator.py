"""The contract between a training script and whatever carries its messages.

`Communicator` is a group of ranks with collectives and point-to-point messages, named after MPI. Everything that
moves an array returns a `Work` and does not block; blocking is `.wait()`. The public methods check their arguments
once, here, before anything is sent; a subclass supplies the methods that start with an underscore. `SoloCommunicator`
is the group of one, so that a script needs no other code path outside mpirun.

Rules that hold for every subclass: all ranks call collectives in the same order; an array handed over must not be
touched until its Work is complete; the communicator itself keeps unfinished Work and its arrays alive, so dropping a
Work is safe; one thread at a time uses a communicator. NumPy arrays only.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from enum import Enum
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

PORTABLE_MAX_TAG = (
    32767  # every MPI offers tags up to here (MPI 4.1, section 9.1.2), so this is what other communicators promise
)


class ReduceOp(Enum):
    """How a reduction combines the values of two ranks. A mean is the caller's division."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"


class Work(ABC):
    """An operation under way."""

    @abstractmethod
    def wait(self) -> Array:
        """Block until the operation is complete and return its result; later calls return it again."""

    @abstractmethod
    def test(self) -> bool:
        """Return whether the operation is complete, without blocking.

        Once it has returned True the result is there, and wait() does not block.
        """


class CompletedWork(Work):
    """An operation that was over at once."""

    def __init__(self, result: Array) -> None:
        self._result = result

    def wait(self) -> Array:
        return self._result

    def test(self) -> bool:
        return True


class Communicator(ABC):
    """A group of ranks, 0 to size - 1, of which this process is `rank`."""

    rank: int
    size: int

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @property
    @abstractmethod
    def library(self) -> str:
        """What carries the messages, for a start line: `Open MPI v5.0.11`, `no MPI`."""

    @property
    @abstractmethod
    def max_tag(self) -> int:
        """The largest tag that a point-to-point message may have."""

    # Collectives: every rank calls them, in the same order.

    def broadcast(self, array: Array, *, root: int = 0) -> Work:
        """Overwrite `array` with that of rank `root`, on every rank.

        Collective. Any dtype; the same shape and dtype on every rank.

        Returns:
            Work whose wait() gives `array`.
        Raises:
            ValueError: root is no rank, or `array` is not contiguous or not writeable.
        """
        self._check_rank("broadcast", "root", root)
        _check_array("broadcast", array, written=True)
        return self._broadcast(array, root)

    def allreduce(self, array: Array, *, op: ReduceOp = ReduceOp.SUM) -> Work:
        """Overwrite `array` with its reduction over all ranks, on every rank.

        Collective; the same shape and dtype on every rank. The order of summation is the subclass's own: bits may
        differ from one communicator to another.

        Returns:
            Work whose wait() gives `array`.
        Raises:
            ValueError: `array` is not contiguous or not writeable.
        Cost: 2 (size - 1) / size * array.nbytes sent per rank (ring).
        """
        _check_array("allreduce", array, written=True)
        return self._allreduce(array, op)

    def reduce_scatter(self, flat: Array, *, op: ReduceOp = ReduceOp.SUM) -> Work:
        """Reduce `flat` over ranks and leave this rank its own slice.

        Collective: every rank calls it, same order, same size and dtype.

        Args:
            flat: (size * n,) contiguous; overwritten, and only the own slice is defined afterwards.
            op: elementwise reduction.
        Returns:
            Work whose wait() gives the (n,) slice [rank * n : (rank + 1) * n] of `flat`, a view.
        Raises:
            ValueError: `flat` is not 1-D, contiguous and writeable, or flat.size is not divisible by size.
        Cost: (size - 1) / size * flat.nbytes sent per rank (ring).
        Source: MPI 4.1, section 6.10; Rajbhandari et al. 2020 (ZeRO), section 5.
        """
        _check_array("reduce_scatter", flat, written=True)
        if flat.ndim != 1 or flat.size % self.size:
            raise ValueError(
                f"reduce_scatter needs a 1-D array whose size is divisible by the number of ranks, "
                f"got shape {flat.shape} and {self.size} ranks"
            )
        return self._reduce_scatter(flat, op)

    def allgather(self, array: Array) -> Work:
        """Collect the arrays of all ranks, in rank order, on every rank.

        Collective. Any dtype; the same shape and dtype on every rank.

        Returns:
            Work whose wait() gives a new array, (size, *array.shape).
        Raises:
            ValueError: `array` is not contiguous.
        Cost: (size - 1) * array.nbytes received per rank.
        """
        _check_array("allgather", array, written=False)
        return self._allgather(array)

    @abstractmethod
    def gather_objects(self, obj: object) -> list[Any]:
        """Collect one small Python object of each rank, in rank order, on every rank.

        Collective, blocking, and pickled: for start-up and errors, never in a training step.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Block until every rank has called it."""

    def split(self, color: int, key: int = 0) -> Communicator:
        """Make a communicator of the ranks that give the same color, ordered by key, then by rank.

        Collective, blocking. Its messages never meet those of any other communicator.

        Raises:
            ValueError: color is negative.
        """
        if color < 0:
            raise ValueError(f"split needs color >= 0, got {color}")
        return self._split(color, key)

    def duplicate(self) -> Communicator:
        """Make a communicator of the same ranks with messages of its own. Collective, blocking."""
        return self.split(color=0, key=self.rank)

    # Point to point: two ranks. The k-th send of a (source, dest, tag) meets the k-th receive.

    def isend(self, array: Array, *, dest: int, tag: int) -> Work:
        """Send the bytes of `array` to rank `dest`.

        May complete before the message is received, or only once the receive is posted: a correct program allows for
        both.

        Returns:
            Work whose wait() gives `array`, which must not be written to until then.
        Raises:
            ValueError: dest is no rank, tag is not in 0..max_tag, or `array` is not contiguous.
        """
        self._check_message("isend", "dest", dest, tag)
        _check_array("isend", array, written=False)
        return self._isend(array, dest, tag)

    def irecv(self, array: Array, *, source: int, tag: int) -> Work:
        """Receive a message of exactly array.nbytes bytes from rank `source` into `array`.

        Returns:
            Work whose wait() gives `array`; it raises ValueError where the message has another size.
        Raises:
            ValueError: source is no rank, tag is not in 0..max_tag, or `array` is not contiguous or not writeable.
        """
        self._check_message("irecv", "source", source, tag)
        _check_array("irecv", array, written=True)
        return self._irecv(array, source, tag)

    def send(self, array: Array, *, dest: int, tag: int) -> None:
        """Send and block until `array` may be written to again; see isend."""
        self.isend(array, dest=dest, tag=tag).wait()

    def recv(self, array: Array, *, source: int, tag: int) -> Array:
        """Receive and block until `array` holds the message; see irecv."""
        return self.irecv(array, source=source, tag=tag).wait()

    def progress(self) -> None:
        """Let unfinished work move; cheap enough to call between any two ops of a backward."""
        return  # where work moves by itself

    @abstractmethod
    def abort(self, message: str) -> NoReturn:
        """End the whole job, all ranks of it, with this message and the rank that said it."""

    # What a subclass supplies; the arguments have been checked.

    @abstractmethod
    def _broadcast(self, array: Array, root: int) -> Work: ...

    @abstractmethod
    def _allreduce(self, array: Array, op: ReduceOp) -> Work: ...

    @abstractmethod
    def _reduce_scatter(self, flat: Array, op: ReduceOp) -> Work: ...

    @abstractmethod
    def _allgather(self, array: Array) -> Work: ...

    @abstractmethod
    def _split(self, color: int, key: int) -> Communicator: ...

    @abstractmethod
    def _isend(self, array: Array, dest: int, tag: int) -> Work: ...

    @abstractmethod
    def _irecv(self, array: Array, source: int, tag: int) -> Work: ...

    def _check_rank(self, call: str, name: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{call} needs a {name} in 0..{self.size - 1}, got {rank}")

    def _check_message(self, call: str, name: str, rank: int, tag: int) -> None:
        self._check_rank(call, name, rank)
        if not 0 <= tag <= self.max_tag:
            raise ValueError(f"{call} needs a tag in 0..{self.max_tag}, got {tag}")


class SoloCommunicator(Communicator):
    """The group of one rank: every collective is over at once, and a message to itself waits in a queue.

    A receive that is waited for before its send would wait for ever, so that wait raises RuntimeError.
    """

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)
        self._messages: dict[tuple[int, int], Array] = {}  # by tag and number within the tag
        self._num_sent: defaultdict[int, itertools.count[int]] = defaultdict(itertools.count)
        self._num_posted: defaultdict[int, itertools.count[int]] = defaultdict(itertools.count)

    @property
    def library(self) -> str:
        return "no MPI"

    @property
    def max_tag(self) -> int:
        return PORTABLE_MAX_TAG

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

    def _allgather(self, array: Array) -> Work:
        return CompletedWork(array[np.newaxis].copy())

    def _split(self, color: int, key: int) -> Communicator:
        return SoloCommunicator()

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


def as_bytes(array: Array) -> Array:
    """View a contiguous array of any shape and dtype as its bytes, (nbytes,) uint8."""
    return array.reshape(-1).view(np.uint8)


def unpack(message: Array, array: Array, *, source: int, tag: int) -> Array:
    """Copy the bytes of a received message into `array`, which must be of its size."""
    if message.nbytes != array.nbytes:
        raise message_size_error(array, source=source, tag=tag, longer=message.nbytes > array.nbytes)
    as_bytes(array)[:] = message
    return array


def message_size_error(array: Array, *, source: int, tag: int, longer: bool) -> ValueError:
    """Make the error of a message that is longer or shorter than its receive."""
    return ValueError(
        f"a receive must be as large as its message, but the one from rank {source}, tag {tag}, is "
        f"{'longer' if longer else 'shorter'} than {array.dtype}{list(array.shape)}, {array.nbytes} bytes"
    )


def _check_array(call: str, array: Array, *, written: bool) -> None:
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{call} needs a NumPy array of numbers, got {kind}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{call} needs a contiguous array, got shape {array.shape} with strides {array.strides}")
    if written and not array.flags.writeable:
        raise ValueError(f"{call} writes into its array, got a read-only one of shape {array.shape}")
