"""Where memory that the ranks of a host share comes from: a window of MPI, or a file in memory.

MPI's windows end with MPI's own farewell, which a world that survives deaths does not wait for: it takes a file.

This file imports no MPI: it is given mpi4py's module.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from distributed.comm.communicator import Communicator
from distributed.comm.mpi.shared_memory import HEADER_BYTES, SharedBuffer, SharedWindow

Allocated: TypeAlias = tuple[SharedWindow | None, str | None]  # a window, or None and what is wrong

_FOLDER = Path("/dev/shm")  # where MPI libraries on Linux put the windows that ranks share


def shared_buffer(
    ranks: Communicator,
    host: Communicator,
    between: Communicator | None,
    num_bytes: int,
    *,
    deterministic: bool,
    allocate: Callable[[int], Allocated],
) -> SharedBuffer | None:
    """Make a buffer that the ranks of each host share. Collective.

    None where there is nothing to share. Where only the machine is in the way (space, unequal hosts), rank 0 warns.

    Args:
        ranks: all that reduce it.
        host: those of them on this host.
        between: those in this rank's place on every host; None where all are on one host.
        num_bytes: of the buffer of one rank.
        deterministic: sums are in rank order, which sums of hosts are not.
        allocate: (bytes of each rank's part) -> a window of the ranks of `host`, or what is wrong.
    """
    by_rank = ranks.gather_objects((host.size, lack_of_space(num_bytes * host.size)))
    host_sizes = {size for size, _ in by_rank}
    if host_sizes == {1} or not num_bytes or (between is not None and deterministic):
        return None
    obstacle = next((lack for _, lack in by_rank if lack), None)
    if len(host_sizes) > 1:
        obstacle = f"hosts have {' or '.join(map(str, sorted(host_sizes)))} ranks"
    window = None
    if obstacle is None:
        window, failure = allocate(HEADER_BYTES + num_bytes)
        obstacle = next(filter(None, ranks.gather_objects(failure)), None)
    if window is None or obstacle is not None:
        if ranks.rank == 0:
            warnings.warn(
                f"what ranks reduce and gather travels in messages, not shared memory: {obstacle}", stacklevel=5
            )
        return None
    return SharedBuffer(window, ranks.size, between)


def allocate_shared(mpi: Any, comm: Any, num_bytes: int) -> Allocated:
    """Allocate a window of MPI for ranks that are all on one host. Collective.

    It lives as long as MPI does, and may be used once every rank is back.

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


def share_file(ranks: Communicator, num_bytes: int) -> Allocated:
    """Map a file in memory for ranks that are all on one host. Collective.

    Args:
        num_bytes: of each rank's part, which is somewhat longer where cache lines end later.
    Returns:
        The window, or None and what is wrong.
    """
    num_bytes += -num_bytes % HEADER_BYTES
    path, window, failure = None, None, lack_of_shared_files()
    if ranks.rank == 0 and failure is None:
        try:
            path = new_shared_file(num_bytes * ranks.size)
        except OSError as error:
            failure = f"a file in {_FOLDER} cannot be made: {error}"
    path, failure = ranks.broadcast_object((path, failure))
    if path is None:
        return None, failure
    try:
        window = map_shared_file(path, ranks.rank, ranks.size, num_bytes)
    except OSError as error:  # in a container of its own this rank has another folder of this name
        failure = f"{path} cannot be mapped: {error}"
    failure = next(filter(None, ranks.gather_objects(failure)), None)
    if ranks.rank == 0:
        Path(path).unlink()  # it lives as long as somebody has it mapped
    return (window, None) if failure is None else (None, failure)


def lack_of_space(num_bytes: int) -> str | None:
    """Say how much is missing for a window of so many bytes, if it is too large.

    It is asked first, on every rank: MPI might fail on one, and the others would wait.
    """
    if not _FOLDER.exists():
        return None
    free = shutil.disk_usage(_FOLDER).free
    if num_bytes <= free:
        return None
    return f"{_FOLDER} has {free >> 20} MiB free, and {(num_bytes >> 20) + 1} MiB are needed"


def lack_of_shared_files() -> str | None:
    """Say what is missing for `map_shared_file` on this machine, such as a Mac."""
    if not _FOLDER.exists():
        return f"this system has no {_FOLDER}"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"shared files are for x86 processors, which keep writes in order, not for {platform.machine()}"
    return None


def new_shared_file(num_bytes: int) -> str:
    """Make a file of so many bytes, zeros, in memory; return its path."""
    descriptor, path = tempfile.mkstemp(prefix="minigrad-", dir=_FOLDER)
    os.truncate(descriptor, num_bytes)
    os.close(descriptor)
    return path


def map_shared_file(path: str, rank: int, num_ranks: int, num_bytes: int) -> SharedWindow:
    """Return a window in a shared file, with a part for each rank.

    It is for processors that make writes visible in their order (x86).
    """
    whole = np.memmap(path, np.uint8, "r+", shape=(num_ranks, num_bytes))
    return SharedWindow(rank, [np.asarray(part) for part in whole], lambda: None)
