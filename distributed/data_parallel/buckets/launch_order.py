"""In which order all ranks launch their buckets: as they are cut, until a backward has shown how they become complete.

Buckets are cut from the end of the model to its beginning. Where layers are declared as they do not run, the one that
is next in line is then complete last, and holds all others back. The order in which rank 0's backward completed them
is taken by all ranks, since collectives need one order: that of its first backward, and later another one that two of
its backwards in a row have had, where a branch was taken or a layer unfrozen for good. A model that runs another way in
every step keeps the order it has; what is complete too early waits in line. Sums are the same to the bit: no bucket
changes, only when it travels.

In a pipeline with several chunks a rank the schedule makes the order, and the replicas of each rank learn it from the
first of them. They run one program and launch a bucket at one place of it; so pipelines side by side wait for nobody
that one of them alone does not wait for, and a proof of the given order holds for this one too.
"""

from __future__ import annotations

from collections.abc import Sequence

from distributed.comm.communicator import Communicator
from distributed.data_parallel.buckets.bucket import Bucket


class LaunchOrder:
    """The order of launches on one rank, which is that of all ranks.

    Args:
        buckets: as they are cut; each one's number is its place.
        num_last: how many at the end stay there, in their order.

    Attributes:
        buckets: as they are launched.
        completed: numbers of buckets, as this rank's backward completes them; none where no backward runs.
    """

    def __init__(self, buckets: Sequence[Bucket], num_last: int, comm: Communicator) -> None:
        self.buckets = list(buckets)
        self.completed: list[int] = []
        self._first_last = len(buckets) - num_last
        self._seen: list[int] | None = None  # the order of the backward before
        self._comm = comm

    def is_outdated(self) -> bool:
        """Return whether all ranks should learn another order now: asked once a step, of rank 0."""
        if not self.completed or self._comm.rank > 0 or self._comm.size == 1:  # one alone launches what is complete
            return False
        wanted = sorted(self.completed, key=lambda number: max(number - self._first_last + 1, 0))
        is_settled = self._seen is None or self._seen == wanted
        self._seen = wanted
        return is_settled and wanted != [bucket.number for bucket in self.buckets]

    def learn(self) -> None:
        """Launch from the next step on as rank 0's backward completed the buckets.

        Collective: at the end of a step that all ranks take, and for which rank 0 has found the order outdated.
        """
        with self._comm.waiting_for("the order of buckets that rank 0 has learned"):
            order: list[int] = self._comm.broadcast_object(self._seen)
        given = {bucket.number: bucket for bucket in self.buckets}
        self.buckets = [given[number] for number in order]
