"""Copies in memory of what only one rank holds, a stage without a replica or a shard: kept by the next rank, its buddy.

    rank 0 holds a     keeps a, c of step 20        Every few steps each rank copies all that it holds, and sends what
    rank 1 holds b     keeps b, a of step 20        nobody else holds to the rank after it. If a rank dies with the
    rank 2 holds c     keeps c, b of step 20        only living copy of something, all go back to that step.

Messages are under way while training goes on; a round of copies counts once a commit after it has been agreed on, which
all ranks know alike. Until then the round before it counts, so memory for two rounds is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from distributed.comm.communicator import Array, Communicator, Work
from distributed.recovery.state import Extent, Snapshot
from minigrad.backend import to_host


class Buddies:
    """One rank's part in keeping copies. Making one is collective.

    Args:
        comm: all ranks of the run.
        arrays: what this rank holds, as at each `begin`.
    Attributes:
        complete: the last round that every rank has: this rank's own arrays, and what it keeps for the one before it.
    """

    def __init__(self, comm: Communicator, arrays: Mapping[Extent, Array]) -> None:
        self._comm = comm.duplicate()
        dtypes = {extent: str(array.dtype) for extent, array in arrays.items()}
        rows: list[dict[Extent, str]] = self._comm.gather_objects(dtypes)
        times = Counter(extent for row in rows for extent in row)
        self._sent = [extent for extent in sorted(arrays) if times[extent] == 1] if comm.size > 1 else []
        before = rows[comm.rank - 1]
        self._kept = {extent: before[extent] for extent in sorted(before) if times[extent] == 1 and comm.size > 1}
        self.complete: Snapshot | None = None
        self._under_way: tuple[Snapshot, list[Work]] | None = None

    def begin(self, snapshot: Snapshot) -> None:
        """Copy everything as it is now, and launch what goes to the buddy. Collective."""
        copies = {extent: np.array(to_host(array)) for extent, array in snapshot.arrays.items()}
        kept = {extent: np.empty(extent.stop - extent.start, dtype) for extent, dtype in self._kept.items()}
        size, rank, max_tag = self._comm.size, self._comm.rank, self._comm.max_tag
        works = [self._comm.irecv(kept[each], source=(rank - 1) % size, tag=i % max_tag) for i, each in enumerate(kept)]
        works += [
            self._comm.isend(copies[each], dest=(rank + 1) % size, tag=i % max_tag) for i, each in enumerate(self._sent)
        ]
        self._under_way = snapshot._replace(arrays=copies | kept), works

    def wait(self) -> None:
        """Block until this rank has its part of the round under way, if there is one."""
        if self._under_way is not None:
            for work in self._under_way[1]:
                work.wait()

    def agreed(self) -> None:
        """Let the round that all ranks have waited for take the place of the one before it."""
        if self._under_way is not None:
            self.complete, self._under_way = self._under_way[0], None
