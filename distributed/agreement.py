"""What all ranks must agree on, or fail on together.

An error that only one rank raises leaves the others waiting for it. So whatever can go wrong on a single rank (bad
input, a full disk) is first told to all of them, and then each raises the same error. All of these are collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TypeVar

import numpy as np

from distributed.comm.communicator import Communicator
from distributed.comm.work import Array

T = TypeVar("T")


def first_failure(comm: Communicator, failure: str | None) -> str | None:
    """Return the first rank's failure, and which rank that is. Collective.

    The same on every rank.

    Args:
        failure: what went wrong on this rank; None where nothing did.
    """
    failures = comm.gather_objects(failure)
    return next((f"[rank {rank}] {what}" for rank, what in enumerate(failures) if what is not None), None)


def of_rank_0(comm: Communicator, make: Callable[[], T], *, failing: type[Exception] = RuntimeError) -> T:
    """Return what rank 0 makes, on every rank. Collective.

    If it cannot, all raise the same error.

    Args:
        make: called on rank 0 alone; what it returns is sent to the others.
        failing: what is raised where `make` raises.
    """
    made: T | None = None
    failure: Exception | None = None
    if comm.rank == 0:
        try:
            made = make()
        except Exception as caught:  # any: the others already wait for what is made
            failure = caught
    told = None if failure is None else f"[rank 0] {type(failure).__name__}: {failure}"
    made, told = comm.broadcast_object((made, told))
    if told is not None:
        raise failing(told) from failure
    return made


def same_on_all(comm: Communicator, noun: str, entries: Sequence[str]) -> None:
    """Check that all ranks have the same things in the same order. Collective.

    Args:
        noun: of one of them, for the error: `parameter`.
        entries: a description of each.
    Raises:
        ValueError: names the first that differs, and what two ranks have; the same message on every rank.
    """
    for place, row in enumerate(zip_longest(*comm.gather_objects(list(entries)), fillvalue="missing")):
        for rank, entry in enumerate(row):
            if entry != row[0]:
                raise ValueError(
                    f"all ranks need the same {noun}s in the same order, but {noun} {place} is "
                    f"{row[0]} on rank 0 and {entry} on rank {rank}"
                )


def agree(comm: Communicator, prepare: Callable[[], Array], *, num_columns: int) -> Array:
    """Run a check on every rank; all raise the message of the first that fails.

    Collective. One small allgather where nothing is wrong, so a training step can afford it.

    Args:
        prepare: raises ValueError or TypeError for bad input; else returns (num_columns,) int64 to tell the others.
    Returns:
        (size, num_columns) the rows of all ranks.
    Raises:
        ValueError: a check failed; the same message on every rank.
    """
    row = np.zeros(1 + num_columns, np.int64)
    error: Exception | None = None
    try:
        row[1:] = prepare()
    except (ValueError, TypeError) as caught:
        row[0], error = 1, caught
    rows = comm.allgather(row).wait()
    if rows[:, 0].any():
        raise ValueError(first_failure(comm, None if error is None else str(error))) from error
    return rows[:, 1:]
