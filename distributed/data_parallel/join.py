"""Ranks with different numbers of batches: those that are through take part until the last one is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from distributed.comm.communicator import Communicator
from distributed.data_parallel.shares import NEXT_BATCH, check_all_in_step, count

T = TypeVar("T")


def until_all_are_through(batches: Iterable[T], comm: Communicator) -> Iterator[T | None]:
    """Yield this rank's batches, then None while other ranks have some left.

    Collective; see `ddp.join`. What a rank says has the shape of what it says of its samples in a step, so that a rank
    that left a step out is found by those that are in it.

    Raises:
        RuntimeError: a rank did; the same message on every rank.
    """
    left = iter(batches)
    while True:
        batch = next(left, None)
        with comm.waiting_for("whether other ranks have batches left, in ddp.join"):
            told = comm.allgather(count(batch is not None, NEXT_BATCH)).wait()
        check_all_in_step(told)
        if not told[:, 0].any():
            return
        yield batch
