"""Memory of a sum that is taken in a wider dtype: see `Communicator.sum_widely`."""

from __future__ import annotations

import numpy as np

from distributed.comm.communicator import Array


def wide_bytes(size: int, num_flags: int = 1) -> int:
    """Return how much memory `size` values take in both dtypes, with a byte for each operation on them."""
    return 12 * size + num_flags


def in_both_dtypes(memory: Array, size: int) -> tuple[Array, Array, Array]:
    """Return float64 and float32 values, `size` of each, and what is left, as views of one memory."""
    wide, narrow, flags = np.split(memory, [8 * size, 12 * size])
    return wide.view(np.float64), narrow.view(np.float32), flags
