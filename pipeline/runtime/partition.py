"""How a list of layers is cut into stages.

A partition decides where the cuts are; a StageSpec says what one stage got, and whoever builds a stage reads only
that. Each way to cut is a function that returns specs:

    cut                  blocks of equal count, embedding and head on top of the first and the last
    cut_by_sizes         as many layers a stage as you say
    cut_by_weights       the best cut for a weight of every layer: its parameters, or its measured time
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

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


def check_layers(layers: Sequence[Any]) -> None:
    """Refuse what is no list of named layers.

    Raises:
        TypeError: one is no pair of a name and a factory.
    """
    for layer in layers:
        if not isinstance(layer, (tuple, list)) or len(layer) != 2 or not callable(layer[1]):
            example = "('fc', lambda param: nn.Linear(param.at('fc'), 4, 2))"
            raise TypeError(f"a pipeline's layers are (name, factory), such as {example}, got {layer!r}")


def check_specs(specs: Sequence[Any]) -> None:
    """Refuse what is no cut of a model.

    Raises:
        TypeError: one of them is no StageSpec.
    """
    for spec in specs:
        if not isinstance(spec, StageSpec):
            raise TypeError(f"specs are what cut_by_sizes and cut_by_weights return, got {spec!r:.80} among them")


def partition_by_count(num_blocks: int, num_stages: int) -> list[tuple[int, int]]:
    """Cut blocks into stages of equal count, the remainder on the first ones.

    The last stage has the head and the loss on top of its blocks, so it is the one to spare.

    Args:
        num_blocks: how many there are.
        num_stages: that they are cut into.
    Returns:
        (start, stop) of every stage.
    Raises:
        ValueError: num_stages is below 1, or a stage would be empty.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages must be at least 1, got {num_stages}")
    if num_stages > num_blocks:
        raise ValueError(f"num_stages must be at most the number of layers, got {num_stages} and {num_blocks}")
    size, remainder = divmod(num_blocks, num_stages)
    starts = [stage * size + min(stage, remainder) for stage in range(num_stages + 1)]
    return list(pairwise(starts))


def count_blocks(names: Sequence[str]) -> int:
    """Return how many blocks a model has: its layers, but for an embedding and a head."""
    return len(names) - sum(_ends(names))


def cut(names: Sequence[str], num_stages: int) -> list[StageSpec]:
    """Cut a model, a list of named layers, into stages by count of blocks.

    A first layer named "embed" belongs to the first stage and a last layer named "head" to the last; neither
    counts as a block.

    Raises:
        ValueError: as `partition_by_count`, of the blocks.
    """
    has_embedding, has_lm_head = _ends(names)
    sizes = [stop - start for start, stop in partition_by_count(count_blocks(names), num_stages)]
    sizes[0] += has_embedding
    sizes[-1] += has_lm_head
    return cut_by_sizes(names, sizes)


def cut_by_sizes(names: Sequence[str], sizes: Sequence[int]) -> list[StageSpec]:
    """Cut a model into stages of so many layers each, embedding and head counted.

    Raises:
        TypeError: a name is no string, or a size no integer.
        ValueError: a size is below 1, or they do not add up to the number of layers.
    """
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"names are those of the layers, [name for name, _ in layers], got {name!r:.80} among them")
    for size in sizes:
        if not hasattr(size, "__index__"):
            raise TypeError(f"sizes must be integers, got {list(sizes)}")
    if not sizes or min(sizes) < 1 or sum(sizes) != len(names):
        raise ValueError(
            f"sizes must be at least 1 and add up to the number of layers, {len(names)}, got {list(sizes)}"
        )
    has_embedding, has_lm_head = _ends(names)
    num_blocks = count_blocks(names)

    def block(layer: int) -> int:
        return min(max(layer - has_embedding, 0), num_blocks)

    return [
        StageSpec(
            stage_id=stage,
            num_stages=len(sizes),
            layer_start=start,
            layer_stop=stop,
            block_start=block(start),
            block_end=block(stop),
            has_embedding=has_embedding and stage == 0,
            has_lm_head=has_lm_head and stage == len(sizes) - 1,
        )
        for stage, (start, stop) in enumerate(pairwise(accumulate(sizes, initial=0)))
    ]


def cut_by_weights(names: Sequence[str], weights: Sequence[float], num_stages: int) -> list[StageSpec]:
    """Cut a model so that the heaviest stage is as light as can be.

    Of the cuts with that heaviest stage it takes the most even one: the least sum of squares.

    Args:
        weights: of every layer, embedding and head too: its number of parameters, or the time it takes.
    Raises:
        TypeError: a name is no string.
        ValueError: there is not one weight a layer, a weight is negative or not finite, or a stage would be empty.
    Cost: num_stages * layers ** 2 steps.
    """
    if len(weights) != len(names):
        raise ValueError(f"weights must be one for each layer, got {len(weights)} and {len(names)}")
    if not all(0 <= weight < math.inf for weight in weights):
        raise ValueError(f"weights must be at least 0 and finite, got {list(weights)}")
    partition_by_count(len(names), num_stages)  # for its errors
    total = list(accumulate(weights, initial=0))
    heaviest, _ = _best_cut(total, num_stages, max, lambda weight: weight)

    def square(weight: float) -> float:
        return weight * weight if weight <= heaviest else math.inf

    _, stops = _best_cut(total, num_stages, operator.add, square)
    return cut_by_sizes(names, [stop - start for start, stop in pairwise([0, *stops])])


def _best_cut(
    total: Sequence[float],
    num_stages: int,
    combine: Callable[[float, float], float],
    cost: Callable[[float], float],
) -> tuple[float, list[int]]:
    """Return the least combined cost of contiguous stages, and where each stops.

    Dynamic programming over stages: the best cut of the first n layers into k stages goes on from that of the first
    start layers into k - 1.

    Args:
        total: total[n] is the weight of the first n layers.
    """
    num_layers = len(total) - 1
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # layers so far -> cost, stops
    for stage in range(num_stages):
        stops = range(stage + 1, num_layers - (num_stages - stage - 1) + 1)  # every stage after this needs a layer
        best = {
            stop: min(
                (combine(before, cost(total[stop] - total[start])), [*cuts, stop])
                for start, (before, cuts) in best.items()
                if start < stop
            )
            for stop in stops
        }
    return best[num_layers]


def _ends(names: Sequence[str]) -> tuple[bool, bool]:
    """Tell whether a model begins with an embedding and ends with a head."""
    return len(names) > 0 and names[0] == EMBEDDING, len(names) > 0 and names[-1] == LM_HEAD
