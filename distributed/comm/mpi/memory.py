"""What MPI can do with memory: windows that the ranks of a host share, and arrays on a GPU.

This file imports no MPI: it is given mpi4py's module.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from distributed.comm.mpi.shared_memory import SharedWindow


def allocate_shared(mpi: Any, comm: Any, num_bytes: int) -> tuple[SharedWindow | None, str | None]:
    """Allocate memory that the ranks of a communicator share.

    They are all on one host. It lives as long as MPI does. Collective. The window may be used once every rank is back.

    Args:
        mpi: mpi4py.MPI.
        num_bytes: of each rank's part.
    Returns:
        The window, or None and what is wrong.
    """
    info = mpi.Info.Create({"alloc_shared_noncontig": "true"})  # each rank's part begins a page, near its own core
    try:
        window = mpi.Win.Allocate_shared(num_bytes, 1, info, comm=comm)
    except mpi.Exception as error:
        return None, error.Get_error_string()
    finally:
        info.Free()
    window.Lock_all(mpi.MODE_NOCHECK)  # the epoch in which Sync is allowed
    rank = comm.Get_rank()
    parts = [np.asarray(window.Shared_query(other)[0], np.uint8) for other in range(comm.Get_size())]
    parts[rank][:] = 0
    window.Sync()
    return SharedWindow(rank, parts, window.Sync), None


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
