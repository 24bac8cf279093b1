"""How a list of layers is cut into stages.

A partition decides where the cuts are; a StageSpec says what one stage got. Whoever builds a stage reads only the
spec, so another way to cut (by parameters, by measured time) is another function that returns specs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

EMBEDDING = "embed"
LM_HEAD = "head"


@dataclass(frozen=True)
class StageSpec:
    """What one stage owns of a model: `layers[layer_start:layer_stop]`.

        layers   embed  b0  b1  b2  head        num_stages = 2
        blocks           0   1   2
        stage 0  [0            3)               layers 0:3, blocks 0:2, has_embedding
        stage 1                 [3     5)       layers 3:5, blocks 2:3, has_lm_head

    Layers count everything; blocks count what lies between the embedding and the head.
    """

    stage_id: int
    num_stages: int
    layer_start: int
    layer_stop: int
    block_start: int
    block_end: int
    has_embedding: bool
    has_lm_head: bool

    @property
    def num_blocks(self) -> int:
        """Number of blocks, without embedding and head."""
        return self.block_end - self.block_start

    @property
    def is_first(self) -> bool:
        """Whether this stage reads the batch."""
        return self.stage_id == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.stage_id == self.num_stages - 1


def partition_by_count(num_blocks: int, num_stages: int) -> list[tuple[int, int]]:
    """Cut blocks into stages of equal count, the remainder on the first ones.

    The last stage has the head and the loss on top of its blocks, so it is the one to spare.

    Returns:
        (start, stop) of every stage.
    Raises:
        ValueError: num_stages is below 1, or a stage would be empty.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages must be at least 1, got {num_stages}")
    if num_stages > num_blocks:
        raise ValueError(
            f"num_stages must be at most the number of layers, got {num_stages} stages and {num_blocks} layers"
        )
    size, remainder = divmod(num_blocks, num_stages)
    starts = [stage * size + min(stage, remainder) for stage in range(num_stages + 1)]
    return list(pairwise(starts))


def cut(names: Sequence[str], num_stages: int) -> list[StageSpec]:
    """Cut a model, a list of named layers, into stages by count of blocks.

    A first layer named "embed" belongs to the first stage and a last layer named "head" to the last; neither
    counts as a block.

    Raises:
        ValueError: as `partition_by_count`, of the blocks.
    """
    has_embedding = len(names) > 0 and names[0] == EMBEDDING
    has_lm_head = len(names) > 0 and names[-1] == LM_HEAD
    first_block = int(has_embedding)
    last = num_stages - 1
    return [
        StageSpec(
            stage_id=stage,
            num_stages=num_stages,
            layer_start=first_block + start if stage > 0 else 0,
            layer_stop=first_block + stop if stage < last else len(names),
            block_start=start,
            block_end=stop,
            has_embedding=has_embedding and stage == 0,
            has_lm_head=has_lm_head and stage == last,
        )
        for stage, (start, stop) in enumerate(partition_by_count(len(names) - has_embedding - has_lm_head, num_stages))
    ]
