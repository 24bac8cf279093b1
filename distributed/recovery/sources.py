"""Where the state comes from after a failure.

In this order: from whoever lives and has it; from a buddy's copy, with the steps since done again; from what ranks left
for this job before theirs was lost; from the `restore` function; or it is what `build` made, the beginning.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from distributed.comm.communicator import Communicator
from distributed.recovery.rescue import Rescue
from distributed.recovery.state import Extent, MissingError, Snapshot, Training, fill, hand_over, room_for

T = TypeVar("T", bound=Training)

RESTORED = "the restore function"
"""The source of a state that `restore` loaded."""


class Found(NamedTuple):
    """Where a training has its state from."""

    step: int
    source: str
    forgets: bool = False


def fetch(
    world: Communicator,
    training: T | None,
    memories: frozenset[Extent],
    *,
    mine: Snapshot | None,
    copied: Snapshot | None,
    rescue: Rescue | None,
    restore: Callable[[T], int] | None,
) -> Found | None:
    """Fill a new training with the run's state. Collective over all ranks.

    Args:
        training: None on a spare.
        memories: what comm hooks keep between steps in the new layout, on all ranks.
        mine: what this rank has of the beginning of the step.
        copied: what it keeps for its buddy, of an earlier step perhaps.
        rescue: what ranks left before the last job was lost.
        restore: loads a saved state; see `recovering`.
    Returns:
        Where the state came from; None on a spare that is not told.
    """
    for source, held in (("a living rank", mine), ("a buddy's copy", copied)):
        found = _take_from(world, source, held, training, memories)
        if found is not None:
            return found
    left = {} if rescue is None else _left_behind(world, rescue)
    steps = {step for row in world.gather_objects(list(left)) for step in row}
    for step in sorted(steps, reverse=True):
        found = _take_from(world, "the job before", left.get(step), training, memories)
        if found is not None:
            return found
    if restore is not None:
        return None if training is None else Found(restore(training), RESTORED)
    return Found(0, "the beginning")


def _take_from(
    world: Communicator, source: str, held: Snapshot | None, training: T | None, memories: frozenset[Extent]
) -> Found | None:
    """Fill a training from snapshots of one moment; return None, and leave it, if they have not all of it."""
    heads = [head for head in world.gather_objects(None if held is None else held[:4]) if head is not None]
    if not heads:
        return None
    step, num_updates, data, memories_then = heads[0]
    forgets = memories_then != memories
    room = {} if training is None else room_for(training, memories=not forgets)
    try:
        hand_over(world, {} if held is None else held.arrays, room)
    except MissingError:
        return None
    if training is not None:
        fill(training, room, num_updates, data)
    return Found(int(step), source, forgets)


def _left_behind(world: Communicator, rescue: Rescue) -> dict[int, Snapshot]:
    """Read this rank's share of what ranks left on its host before they were lost; by step. Collective."""
    hosts = world.gather_objects(socket.gethostname())
    here = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
    left: dict[int, Snapshot] = {}
    for snapshot in rescue.read(here.index(world.rank), len(here)):
        arrays = {**left[snapshot.step].arrays} if snapshot.step in left else {}
        left[snapshot.step] = snapshot._replace(arrays=arrays | {**snapshot.arrays})
    return left
