"""What a message may be, and its way between an array and bytes."""

from __future__ import annotations

import numpy as np

from distributed.work import Array
from minigrad.backend import xp_of


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


def describe_array(array: Array) -> str:
    """Describe an array in an error: `float32[3, 4]`."""
    return f"{array.dtype}{list(array.shape)}"


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
        f"{'longer' if longer else 'shorter'} than {describe_array(array)}, {array.nbytes} bytes"
    )
