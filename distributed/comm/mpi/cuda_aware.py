"""Whether MPI reads and writes the memory of a GPU itself."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path


@cache
def is_cuda_aware() -> bool:
    """Return whether this MPI reads and writes GPU memory.

    It says so itself: MPIX_Query_cuda_support.
    """
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    for path in {line.split()[-1] for line in lines if "/libmpi" in line}:
        query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
        if query is not None:
            return bool(query())
    return False
