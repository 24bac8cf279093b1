"""SyncBatchNorm: batch normalisation over the samples of all replicas."""

from __future__ import annotations

from collections.abc import Callable

from distributed.comm.communicator import Communicator
from minigrad.backend import Array
from minigrad.nn import BatchNorm, ParamGetter


class SyncBatchNorm(BatchNorm):
    """Normalise over the batch of all ranks, as `BatchNorm` does in one process.

    Making one is collective. Value, gradient and running statistics are those of one process up to rounding, and have
    the same bits on all ranks. In training each call is collective, forward and backward: one message of 2 C + 1 and
    one of 2 C numbers.

    Args:
        comm: the ranks that hold replicas.
        loss_weight: gives what this rank's loss weighs in the mean over ranks, as of its backward. The number of its
            values a channel by default, which is right where losses are means over as many samples as this layer sees.
            `lambda: ddp.share` elsewhere: with `weight=` in `ddp.hooks`, or micro-batches in a pipeline.
    """

    def __init__(
        self,
        param: ParamGetter,
        num_channels: int,
        comm: Communicator,
        *,
        loss_weight: Callable[[], float] | None = None,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> None:
        super().__init__(param, num_channels, momentum=momentum, eps=eps)
        self.loss_weight = loss_weight
        self._comm = comm.duplicate()  # a bucket may be launched between two of these calls

    def gather(self, own: Array) -> Array:
        with self._comm.waiting_for(f"the other ranks' part of the batch, in {self.gain.label}"):
            return self._comm.allgather(own).wait()
