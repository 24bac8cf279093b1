"""Steps of several variants of one job that take turns in the same processes, and jobs of several ranks that do.

Where a difference of two variants counts, processes of their own would add the differences of the processes. Where two
libraries are compared, each has processes of its own, and a turnstile lets them meet the same neighbours.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

STEPS_A_TURN = 4
WARMUP_STEPS = 2  # in the second one PyTorch's DDP makes its buckets anew
SECONDS_BETWEEN_LOOKS = 0.002


class Turnstile:
    """Lets jobs take turns: a file has their names, and all ranks of the first may run.

    Who waits sleeps, but for a look now and then: ranks that wait for a message would take the others' time.

    Args:
        name: of this job.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name

    @staticmethod
    def write(path: Path, names: Sequence[str]) -> None:
        """Say whose turns come next; whoever reads meanwhile sees the old names or the new ones."""
        new = path.with_suffix(".new")
        new.write_text("\n".join(names))
        new.replace(path)

    def wait(self) -> None:
        """Sleep until it is this job's turn."""
        while self.path.read_text().splitlines()[0] != self.name:
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def pass_on(self, *, comes_back: bool) -> None:
        """End this job's turn; one of its ranks calls this, once all of them are done with it."""
        own, *others = self.path.read_text().splitlines()
        self.write(self.path, [*others, own] if comes_back or not others else others)


def take_turns(
    variants: Mapping[str, Callable[[], object]],
    num_turns: int,
    *,
    barrier: Callable[[], object],
    gather: Callable[[Any], list[Any]],
    steps_a_turn: int = STEPS_A_TURN,
    turnstile: Turnstile | None = None,
) -> dict[str, Any]:
    """Run a few steps of each variant in turn, and time them.

    Args:
        variants: by name, a function that runs one step.
        barrier, gather: of all ranks. Every step starts on all ranks together.
        steps_a_turn: fewer where steps are long, so that variants meet the same neighbours.
        turnstile: where other jobs take turns with this one. A turn is one of each variant, and a first one warms up.
    Returns:
        `seconds` by variant, of each step, on the slower rank; `affinity`, the cores that each rank may use.
    """
    taken: dict[str, list[float]] = {name: [] for name in variants}
    is_first = gather(os.getpid())[0] == os.getpid()
    for turn in range(num_turns + 1):
        if turnstile is not None:
            turnstile.wait()
        for name, step in variants.items():
            for _ in range(steps_a_turn if turn else WARMUP_STEPS):
                barrier()
                start = time.perf_counter()
                step()
                if turn:
                    taken[name].append(time.perf_counter() - start)
        barrier()
        if turnstile is not None and is_first:
            turnstile.pass_on(comes_back=turn < num_turns)
    by_rank = gather(taken)
    seconds = {name: [max(steps) for steps in zip(*(rank[name] for rank in by_rank), strict=True)] for name in taken}
    return {"seconds": seconds, "affinity": gather(sorted(os.sched_getaffinity(0)))}
