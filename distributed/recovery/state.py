"""What a training run is at the beginning of a step, by name, and how it gets to ranks that do not have it.

A step is a pure function of this state and the step's number: random numbers are keyed, data has a position. So whoever
has the state can do the step again, in any layout, and nobody can tell from the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from distributed.comm.communicator import Array, Communicator, Work
from distributed.protocols import HasState, HasTensors
from minigrad.backend import xp_of
from minigrad.nn import Buffer
from minigrad.optim import Optimizer
from minigrad.parameter import Parameter


class Training(Protocol):
    """What `build` makes for a layout: these three, and whatever else a step needs."""

    @property
    def model(self) -> HasTensors: ...

    @property
    def optimizer(self) -> Optimizer: ...

    @property
    def data(self) -> HasState: ...


class Snapshot(NamedTuple):
    """What one rank has of a run at one moment.

    Attributes:
        step: number of steps that are done.
        num_updates: of the optimizer.
        data: the position in the data.
        arrays: by name.
    """

    step: int
    num_updates: int
    data: dict[str, Any]
    arrays: Mapping[str, Array]


def arrays_of(training: Training) -> dict[str, Array]:
    """Return all arrays that steps change, by name, as they lie in memory.

    Raises:
        ValueError: a tensor has no name, or two have the same.
    """
    named: dict[str, Array] = {}
    kinds: list[tuple[str, Iterable[Parameter | Buffer]]] = [
        ("parameter", training.model.parameters()),
        ("buffer", training.model.buffers()),
    ]
    for kind, tensors in kinds:
        for tensor in dict.fromkeys(tensors):
            name = f"{kind}/{tensor.name}"
            if not tensor.name or name in named:
                raise ValueError(f"recovery needs a name of its own for every tensor, {tensor.label} has none")
            named[name] = tensor.data
    return named | {f"optimizer/{name}": array for name, array in training.optimizer.state_arrays()}


class MissingError(Exception):
    """Tensors that no living rank holds; the same on every rank."""


def hand_over(comm: Communicator, held: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
    """Fill `wanted` on every rank, from this rank's own `held` or from the first rank that holds it. Collective.

    Args:
        held: arrays by name; empty on a rank that has lost them, or is new.
        wanted: arrays to write into, by name; of another layout, perhaps.
    Raises:
        MissingError: somebody wants what nobody holds; nothing was written.
    """
    rows = comm.gather_objects((sorted(held), sorted(wanted.keys() - held.keys())))
    first_holder = {name: rank for rank in reversed(range(comm.size)) for name in rows[rank][0]}
    lost = sorted({name for _, lacking in rows for name in lacking} - first_holder.keys())
    if lost:
        raise MissingError(f"no living rank holds {', '.join(lost[:3])}{' ...' * (len(lost) > 3)}")
    for name in wanted.keys() & held.keys():
        wanted[name][...] = held[name]
    messages = _messages([lacking for _, lacking in rows], first_holder)
    works: list[Work] = []
    for tag, (name, source, dest) in enumerate(messages):
        if comm.rank == source:
            works.append(
                comm.isend(
                    np.ascontiguousarray(held[name]) if xp_of(held[name]) is np else held[name].copy(),
                    dest=dest,
                    tag=tag % comm.max_tag,
                )
            )
        elif comm.rank == dest:
            works.append(comm.irecv(wanted[name], source=source, tag=tag % comm.max_tag))
    for work in works:
        work.wait()


def _messages(lacking: Sequence[Sequence[str]], holder: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """List (name, source, destination), in one order on every rank."""
    return [(name, holder[name], dest) for dest, names in enumerate(lacking) for name in names]
