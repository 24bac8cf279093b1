"""In which order all ranks launch their buckets: as they are cut, until a backward has shown how they become complete.

Buckets are cut from the end of the model to its beginning. Where layers are declared as they do not run, the one that
is next in line is then complete last, and holds all others back. The order in which rank 0's first backward completed
them is taken by all ranks, since collectives need one order. Sums are the same to the bit: no bucket changes, only when
it travels.

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
        is_final: there is nothing to learn any more.
    """

    def __init__(self, buckets: Sequence[Bucket], num_last: int, comm: Communicator) -> None:
        self.buckets = list(buckets)
        self.completed: list[int] = []
        self.is_final = comm.size == 1  # nobody has to agree: what is complete may go
        self._first_last = len(buckets) - num_last
        self._comm = comm

    def learn(self) -> None:
        """Launch from the next step on as rank 0's backward completed the buckets, if it had one.

        Collective: at the end of a step that all ranks take.
        """
        with self._comm.waiting_for("the order of buckets that rank 0 has learned"):
            order: list[int] = self._comm.broadcast_object(self.completed)
        if order:
            given = {bucket.number: bucket for bucket in self.buckets}
            self.buckets = [given[i] for i in sorted(order, key=lambda i: max(i - self._first_last + 1, 0))]
            self.is_final = True
