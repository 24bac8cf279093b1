"""Text from a GPT whose layers are spread over the ranks of a pipeline, each with the keys and values of its own.

One token is too little to fill a pipeline with, so stages take turns; what passes between them is small and goes to
all ranks, and so do the logits: every rank draws the same token, and yields it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minigrad.backend import Array, beside, to_host
from minigrad.models.generation import Reader, Sampling, go_on
from minigrad.tensor import Tensor
from pipeline.runtime.local_stages import LocalStages
from pipeline.schedules.schedule import Schedule


def generate(
    stages: LocalStages,
    schedule: Schedule,
    prompt: Sequence[int] | Array,
    *,
    context: int,
    sampling: Sampling | None = None,
) -> Iterator[int]:
    """Yield the tokens that the model writes after `prompt`, on every rank.

    Without end. Collective, as each token is.

    Args:
        stages: of a GPT, this rank's; they are asked without dropout, and left as they were.
        prompt: token ids, at least one, the same on every rank; of a longer one the last `context` are read.
        context: of the model.
    Raises:
        ValueError: the prompt is empty.
    """
    return go_on(PipelineReader(stages, schedule, context).read, prompt, sampling or Sampling())


class PipelineReader(Reader):
    """A `Reader` whose layers are those of all ranks; see `generate`."""

    def __init__(self, stages: LocalStages, schedule: Schedule, context: int) -> None:
        super().__init__([layer for stage in stages for layer in stage], context)
        self._comm = stages.comm
        self._stages = {stage.stage_id: stage for stage in stages}
        self._owners = [schedule.rank_of(s, self._comm.size) for s in range(schedule.num_stages(self._comm.size))]

    def _logits(self, window: Array, start: int) -> Array:
        passed = window
        for stage_id, owner in enumerate(self._owners):
            output = None
            if owner == self._comm.rank:
                stage = self._stages[stage_id]
                arrived = window if stage_id == 0 else Tensor(beside(stage.parameters()[0].data, passed))
                output = to_host(self.through(stage, arrived, start).data)
            passed = self._comm.broadcast_object(output, root=owner)
        return passed[0, 0]
