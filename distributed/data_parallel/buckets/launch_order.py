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

from collections.abc import Iterable, Sequence

from distributed.comm.communicator import Communicator
from distributed.data_parallel.buckets.bucket import Bucket


class LaunchOrder:
    """The order of launches on one rank, which is that of all ranks.

    Args:
        buckets: as they are cut; each one's number is its place.
        num_last: how many at the end stay there, in their order.

    Attributes:
        buckets: as they are launched.
    """

    def __init__(self, buckets: Sequence[Bucket], num_last: int, comm: Communicator) -> None:
        self.buckets = list(buckets)
        self._first_last = len(buckets) - num_last
        self._comm = comm
        self._completed: list[int] = []  # numbers of buckets, as this rank's backward completes them; none without one
        self._is_final = comm.size == 1  # nobody has to agree: what is complete may go
        self._is_shown = False  # all ranks have taken a step, and so all know that there is an order to learn

    def begin(self, completed: Iterable[Bucket] = ()) -> None:
        """Begin a backward, before which some buckets are complete."""
        self._completed = [bucket.number for bucket in completed]

    def note(self, bucket: Bucket) -> None:
        """Note that a backward has completed a bucket."""
        self._completed.append(bucket.number)

    def end(self) -> None:
        """Note that all ranks take the step."""
        self._is_shown = True

    def learn(self) -> None:
        """Launch from now on as rank 0's last backward completed the buckets. Collective; between two backwards.

        Does something once, after the first step that all ranks took and rank 0 had a backward for.
        """
        if self._is_final or not self._is_shown:
            return
        with self._comm.waiting_for("the order of buckets that rank 0 has learned"):
            order: list[int] = self._comm.broadcast_object(self._completed)
        self._is_shown = False
        if order:
            given = {bucket.number: bucket for bucket in self.buckets}
            self.buckets = [given[i] for i in sorted(order, key=lambda i: max(i - self._first_last + 1, 0))]
            self._is_final = True
