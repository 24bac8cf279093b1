"""The step of a run that was recorded: its events, and what they say of the gradients' way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from distributed.comm.communicator import Communicator
from distributed.data_parallel.ddp import DistributedDataParallel
from distributed.data_parallel.overlap import overlap_report
from distributed.trace.perfetto import Event
from distributed.trace.recorder import Recorder


class HasRecorder(Protocol):
    """A PipelineExecutor, a DistributedDataParallel."""

    @property
    def recorder(self) -> Recorder: ...


class RecordedStep(NamedTuple):
    """What was noted; nothing, where no step was recorded.

    Attributes:
        events: of all ranks, on rank 0.
        overlap: which buckets were late, and why, in words, on rank 0.
    """

    events: Sequence[Event] = ()
    overlap: Sequence[str] = ()

    @staticmethod
    def of(whose: HasRecorder, ddp: DistributedDataParallel | None, comm: Communicator) -> RecordedStep:
        """Gather what all ranks have noted. Collective.

        Args:
            whose: the pipeline, or the DistributedDataParallel of a model that is in none.
            ddp: of the pipeline, where it has replicas.
            comm: all ranks.
        """
        replicas = whose if isinstance(whose, DistributedDataParallel) else ddp
        events = whose.recorder.gather(comm)
        return RecordedStep(events, overlap_report(replicas) if replicas is not None and replicas.comm.size > 1 else ())
