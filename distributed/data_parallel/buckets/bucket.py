"""One bucket: what it holds, and what may be done with its gradients.

What may be done is said by the hold on each parameter, which goes once around in each step:

    UNREDUCED --start--> REDUCING --wait--> REDUCED --zero_grad--> UNREDUCED        on several ranks
                             |---- cancel, after an exception ---->|

A step with gradients that no wait() has averaged is so an error, and replicas do not drift apart in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from distributed.comm.communicator import Work
from distributed.data_parallel.comm_hooks import CommHook
from distributed.trace.recorder import Recorder
from minigrad.flat_range import FlatRange
from minigrad.optim.clipping import NormOver
from minigrad.parameter import Hold, Parameter

UNREDUCED = Hold(
    "its grad is this rank's own, and replicas would drift apart; run the backward with the hooks, then wait()",
    open=True,
)
REDUCING = Hold("its grad is being reduced over ranks; call wait() first")
BROKEN = Hold("its backward ended with an exception while other ranks wait for this one; call cancel() first")


@dataclass
class Bucket:
    """A contiguous range of gradients that travels as one message.

    Attributes:
        number: its place among the buckets as cut, which is that of its launch until another order is learned.
        name: for messages: its number, and the first parameter in it.
        range: the slice of a flat.
        pending: parameters whose gradient is not final yet.
        work: the reduction, once launched.
        is_landed: it is over, and this rank has its part of the result.
    """

    number: int
    name: str
    range: FlatRange
    pending: set[Parameter] = field(default_factory=set)
    work: Work | None = None
    is_landed: bool = False


class BucketOptions(TypedDict, total=False):
    """What every kind of buckets can be told; see `GradientBucketManager`."""

    bucket_bytes: int | None
    last: Sequence[Parameter]
    comm_hook: CommHook
    recorder: Recorder | None


class OptimizerOptions(TypedDict, total=False):
    """What an optimizer of buckets can be told; see `Optimizer`."""

    decays: Callable[[Parameter], bool]
    max_norm: float | None
    norm_over: NormOver | None
