"""What a message may be, and how an array becomes messages: as it is, cut into parts, or by way of the host.

carry       | a a a b b |            parts of one array, each an operation of its own, in place

carry_rows  | a a a b b |  rank 0    an array of rows, one for each rank: parts are blocks of columns,
            | a a a b b |  rank 1    and their results lie side by side in the whole one
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from distributed.comm.calls import describe_array
from distributed.comm.work import Array, CompletedWork, JoinedWork, Work
from minigrad.backend import xp_of
from minigrad.words import counted

MAX_MESSAGE_BYTES = 2**31 - 1  # MPI counts in C ints, which may count bytes, whatever the dtype


_NOTHING_ALONE = ("broadcast", "allreduce")  # leave the array of a single rank as it is


class Carrier(Protocol):
    """What the way of an array depends on; every communicator is one."""

    size: int
    max_message_elements: int

    def _reads_gpu_memory(self, call: str) -> bool: ...

    def _finish_writing(self, array: Array) -> None: ...


def check_array(call: str, array: Array, *, written: bool) -> None:
    """Refuse what cannot be handed to a communicator as it lies in memory.

    Raises:
        TypeError: `array` is neither a NumPy nor a CuPy array, or holds objects.
        ValueError: it is not contiguous, or is `written` into and read-only.
    """
    on_host = isinstance(array, np.ndarray)
    if (on_host and array.dtype.hasobject) or (not on_host and xp_of(array) is np):
        kind = array.dtype if on_host else type(array).__name__
        raise TypeError(f"{call} needs a NumPy or CuPy array of numbers, got {kind}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{call} needs a contiguous array, got shape {array.shape} with strides {array.strides}")
    if written and on_host and not array.flags.writeable:
        raise ValueError(f"{call} writes into its array, got a read-only one of shape {array.shape}")


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
        f"{'longer' if longer else 'shorter'} than {describe_array(array)}, {counted(array.nbytes, 'byte')}"
    )


def longest_message(carrier: Carrier, array: Array) -> int:
    """Return how many elements of `array` may go in one message."""
    return min(carrier.max_message_elements, MAX_MESSAGE_BYTES // max(array.itemsize, 1))


def carry(carrier: Carrier, call: str, array: Array, start: Callable[[Array], Work], *, written: bool = True) -> Work:
    """Start an operation that works on `array` in place.

    Args:
        call: the operation's name.
        array: as `check_array` allows it.
        start: starts it on a part.
        written: whether it changes `array`.
    """
    direct, longest = _goes_directly(carrier, call, array), longest_message(carrier, array)
    if direct and array.size <= longest:
        return start(array)
    if not direct and carrier.size == 1 and call in _NOTHING_ALONE:
        return CompletedWork(array)  # a captured step cannot bring it to the host
    copy = None if direct else HostCopy(array)
    flat = (array if copy is None else copy.host).reshape(-1)
    parts = [start(flat[first : first + longest]) for first in range(0, max(flat.size, 1), longest)]

    def land(_: list[Array]) -> Array:
        return copy.land(copy.host, array) if copy is not None and written else array

    return JoinedWork(parts, land)


def carry_rows(
    carrier: Carrier,
    call: str,
    array: Array,
    num_rows: int,
    start: Callable[[Array], Work],
    target: Callable[[], Array],
) -> Work:
    """Start an operation that makes something of the rows of `array`.

    Args:
        call: the operation's name.
        array: (num_rows * n elements) of any shape.
        start: starts it on a block of columns, (num_rows, m) copied; gives (..., m). On `array` itself where it can.
        target: makes, or finds, the memory for the result of what did not go as it is.
    """
    direct, longest = _goes_directly(carrier, call, array), longest_message(carrier, array)  # of a row
    num_columns = array.size // num_rows
    if direct and num_columns <= longest:
        return start(array)
    copy = None if direct else HostCopy(array)
    rows = (array if copy is None else copy.host).reshape(num_rows, num_columns)
    parts = [start(rows[:, first : first + longest].copy()) for first in range(0, max(num_columns, 1), longest)]

    def land(results: list[Array]) -> Array:
        result = target()
        values = xp_of(results[0]).concatenate(results, axis=-1).reshape(result.shape)
        if copy is not None:
            return copy.land(values, result)
        result[...] = values
        return result

    return JoinedWork(parts, land)


def _goes_directly(carrier: Carrier, call: str, array: Array) -> bool:
    """Return whether `array` goes as it is; a GPU array that does is finished first."""
    if xp_of(array) is np:
        return True
    if carrier._reads_gpu_memory(call):
        carrier._finish_writing(array)
        return True
    return False


class HostCopy:
    """A GPU array's counterpart in pinned host memory.

    From there the GPU copies at full speed. All copies run on the stream that is current when this is made: after the
    kernels that write the array, and before those that the caller launches next.

    Args:
        array: a CuPy array.
    """

    def __init__(self, array: Array) -> None:
        cuda = xp_of(array).cuda
        gpu: Any = array
        self._stream = cuda.get_current_stream()
        self.host: Array = np.frombuffer(cuda.alloc_pinned_memory(max(array.nbytes, 1)), array.dtype, array.size)
        self.host = self.host.reshape(array.shape)
        if array.size:
            gpu.get(stream=self._stream, out=self.host)
            self._stream.synchronize()

    def land(self, values: Array, target: Any) -> Array:
        """Copy `values` from the host into the GPU array `target`.

        Returns `target`.
        """
        if target.size:
            target.set(values, stream=self._stream)
            self._stream.synchronize()  # or the pinned memory could serve another message while it is still read
        return target
