"""What the ranks of all replicas do in a step, as plain data for the proof that none waits for ever.

What reduces gradients is known here by what it does alone: `distributed.DistributedDataParallel` is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from distributed.agreement import agree
from distributed.comm.communicator import Communicator
from minigrad.backend import Array
from minigrad.parameter import Parameter
from pipeline.runtime.local_stages import LocalStages
from pipeline.schedules.action import Action
from pipeline.schedules.whole_step import Bucket, Replica


class Reduces(Protocol):
    """Reduces gradients over replicas, bucket after bucket.

    Attributes:
        comm: the ranks that hold replicas of this rank's parameters.
        bucket_params: the parameters of each bucket, in the order of launches.
    """

    comm: Communicator

    @property
    def bucket_params(self) -> Sequence[Sequence[Parameter]]: ...


def replicas_of(
    stages: LocalStages, comm: Communicator, ddp: Reduces, orders: Sequence[Sequence[Action]]
) -> list[Replica]:
    """Return what each replica does in a step, by rank of `ddp`.

    Collective over `comm` and over the ranks of `ddp`. Of replicas that are all alike, two stand for all: side by side
    they do the same, so no more of them wait for what two do not.

    Args:
        comm: the ranks of this pipeline.
        orders: of these ranks.
    Raises:
        ValueError: a bucket has a parameter of none of these stages; the same message on every rank of the pipeline.
    """
    own: list[Bucket] = []

    def prepare() -> Array:
        own.extend(_stages_of(stages, params) for params in ddp.bucket_params)
        return np.empty(0, np.int64)

    agree(comm, prepare, num_columns=0)
    replica = Replica([list(order) for order in orders], comm.gather_objects(own), list(stages.tied_groups))
    with ddp.comm.waiting_for("the other replicas, in pipe.check_deadlock_free"):
        replicas: list[Replica] = ddp.comm.gather_objects(replica)
    return replicas if any(other != replicas[0] for other in replicas) else replicas[:2]


def _stages_of(stages: LocalStages, params: Sequence[Parameter]) -> Bucket:
    """Return the stages on this rank whose backwards make a bucket final; none where a sum over ranks does."""
    holders = {p: [stage.stage_id for stage in stages if p in stage.parameters()] for p in params}
    for p, own in holders.items():
        if not own:
            raise ValueError(f"a bucket of gradients has {p.label}, which is on no stage of this rank")
    if not holders.keys().isdisjoint(stages.tied):
        return ()
    return tuple(sorted({stage for own in holders.values() for stage in own}))
