"""Ranks with different numbers of batches: those that are through take part until the last one is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np

from distributed.comm.communicator import Communicator, ReduceOp

T = TypeVar("T")


def until_all_are_through(batches: Iterable[T], comm: Communicator) -> Iterator[T | None]:
    """Yield this rank's batches, then None while other ranks have some left.

    Collective; see `ddp.join`.
    """
    left = iter(batches)
    while True:
        batch = next(left, None)
        with comm.waiting_for("whether other ranks have batches left, in ddp.join"):
            if not comm.allreduce(np.array([batch is not None], np.uint8), op=ReduceOp.MAX).wait()[0]:
                return
        yield batch
