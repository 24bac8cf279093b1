"""How an array gets to an operation: as it is, cut into messages that are short enough, or by way of the host.

carry       | a a a b b |            parts of one array, each an operation of its own, in place

carry_rows  | a a a b b |  rank 0    an array of rows, one for each rank: parts are blocks of columns,
            | a a a b b |  rank 1    and their results lie side by side in the whole one
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distributed.work import Array, JoinedWork, Work
from minigrad.backend import xp_of


def carry(array: Array, start: Callable[[Array], Work], *, direct: bool, longest: int, written: bool = True) -> Work:
    """Start an operation that works on `array` in place.

    Args:
        start: starts it on a part.
        direct: whether it takes the memory of `array` as it is, or by way of the host.
        longest: how many elements one message may have.
        written: whether it changes `array`.
    """
    if direct and array.size <= longest:
        return start(array)
    copy = None if direct else HostCopy(array)
    flat = (array if copy is None else copy.host).reshape(-1)
    parts = [start(flat[first : first + longest]) for first in range(0, max(flat.size, 1), longest)]

    def land(_: list[Array]) -> Array:
        return copy.land(copy.host, array) if copy is not None and written else array

    return JoinedWork(parts, land)


def carry_rows(
    array: Array,
    num_rows: int,
    start: Callable[[Array], Work],
    target: Callable[[], Array],
    *,
    direct: bool,
    longest: int,
) -> Work:
    """Start an operation that makes something of the rows of `array`.

    Args:
        array: (num_rows * n elements) of any shape.
        start: starts it on a block of columns, (num_rows, m) copied; gives (..., m). On `array` itself where it can.
        target: makes, or finds, the memory for the result of what did not go as it is.
        direct, longest: see `carry`; `longest` holds for a row.
    """
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


class HostCopy:
    """A GPU array's counterpart in pinned host memory, from which the GPU copies at full speed.

    All copies run on the stream that is current when this is made: after the kernels that write the array, and before
    those that the caller launches next.

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
        """Copy `values`, which lie on the host, into the GPU array `target`, and return that."""
        if target.size:
            target.set(values, stream=self._stream)
            self._stream.synchronize()  # or the pinned memory could serve another message while it is still read
        return target
