"""Steps of several variants of one job that take turns in the same processes.

Where a difference of two variants counts, processes of their own would add the differences of the processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

STEPS_A_TURN = 4
WARMUP_STEPS = 3


def take_turns(
    variants: Mapping[str, Callable[[], object]],
    num_turns: int,
    *,
    barrier: Callable[[], object],
    gather: Callable[[Any], list[Any]],
    steps_a_turn: int = STEPS_A_TURN,
) -> dict[str, Any]:
    """Run a few steps of each variant in turn, and time them.

    Args:
        variants: by name, a function that runs one step.
        barrier, gather: of all ranks. Every step starts on all ranks together.
        steps_a_turn: fewer where steps are long, so that variants meet the same neighbours.
    Returns:
        `seconds` by variant, of each step, on the slower rank; `affinity`, the cores that each rank may use.
    """
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(num_turns + 1):
        for name, step in variants.items():
            for _ in range(steps_a_turn if turn else WARMUP_STEPS):
                barrier()
                start = time.perf_counter()
                step()
                if turn:
                    taken[name].append(time.perf_counter() - start)
    by_rank = gather(taken)
    seconds = {name: [max(steps) for steps in zip(*(rank[name] for rank in by_rank), strict=True)] for name in taken}
    return {"seconds": seconds, "affinity": gather(sorted(os.sched_getaffinity(0)))}
