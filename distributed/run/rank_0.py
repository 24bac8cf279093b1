"""What rank 0 alone does for a run, with files above all, and how the others learn what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from distributed.comm.communicator import Communicator

T = TypeVar("T")


class RankZeroError(Exception):
    """What rank 0 could not do, in one line; the same on every rank."""


def on_rank_0(comm: Communicator, make: Callable[[], T]) -> T:
    """Return what rank 0 makes, on every rank. Collective.

    Raises:
        RankZeroError: it is wrong, or cannot be read or written. What else goes wrong is an error of rank 0.
    """
    made: T | None = None
    fault = None
    if comm.rank == 0:
        try:
            made = make()
        except (OSError, ValueError) as error:
            fault = in_one_line(error)
    result: tuple[T, str | None] = comm.broadcast_object((made, fault))
    if result[1] is not None:
        raise RankZeroError(result[1])
    return result[0]


def in_one_line(error: Exception) -> str:
    """Say what is wrong: of a file its name, and what the system says of it."""
    if isinstance(error, OSError) and error.strerror is not None:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
