"""What a training run is at the beginning of a step, by name, and how it gets to ranks that do not have it.

A step is a pure function of this state and the step's number: random numbers are keyed, data has a position. So whoever
has the state can do the step again, in any layout, and nobody can tell from the result.

    name, start, stop       which elements of which tensor
    held on rank 0          |m/fc.weight 0:6 |
    held on rank 1                           |m/fc.weight 6:12|
    wanted on the new one            |m/fc.weight 4:8|                 4:6 from rank 0, 6:8 from rank 1

Replicas hold whole tensors, shards (ZeRO) slices, cut differently in each layout; whoever wants something gets it out
of whatever covers it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from distributed.comm.communicator import Array, Communicator, Work
from distributed.protocols import HasMemories, HasState, HasTensors
from minigrad.backend import beside, xp_of
from minigrad.flat_range import TensorSlice
from minigrad.nn import Buffer
from minigrad.optim import Optimizer
from minigrad.parameter import Parameter

T = TypeVar("T", Parameter, Buffer)


class Training(Protocol):
    """What `build` makes for a layout: these three, and whatever else a step needs."""

    @property
    def model(self) -> HasTensors: ...

    @property
    def optimizer(self) -> Optimizer: ...

    @property
    def data(self) -> HasState: ...


class Extent(NamedTuple):
    """The elements of a tensor, in C order, from `start` to `stop`."""

    name: str
    start: int
    stop: int


class Snapshot(NamedTuple):
    """What one rank has of a run at one moment.

    Attributes:
        step: number of steps that are done.
        num_updates: of the optimizer.
        data: the position in the data.
        memories: what comm hooks keep between steps, on all ranks of the layout: another layout has others.
        arrays: what is here.
    """

    step: int
    num_updates: int
    data: dict[str, Any]
    memories: frozenset[Extent]
    arrays: Mapping[Extent, Array]


def state_of(training: Training) -> dict[Extent, Array]:
    """Return all that steps change and this rank has, as it lies in memory. Waits for nothing.

    Raises:
        ValueError: a tensor has no name, or two have the same.
    """
    held: dict[Extent, Array] = {}
    parts = _values(training)
    for name, p in _named("parameter", training.model.parameters()):
        for part in parts[p] if p in parts else [TensorSlice.whole(p.data)]:
            held[Extent(name, part.start, part.stop)] = part.array
    return held | changing_of(training) | _optimizer_state(training.optimizer)


def changing_of(training: Training) -> dict[Extent, Array]:
    """Return of this what an attempt changes before all ranks have agreed on the step: buffers, and memories."""
    return {_whole(name, b.size): b.data for name, b in [*_buffers(training.model), *_memories(training.model)]}


def memories_of(training: Training) -> list[Extent]:
    """Return what a comm hook keeps here between steps."""
    return [_whole(name, b.size) for name, b in _memories(training.model)]


def room_for(training: Training, *, memories: bool) -> dict[Extent, Array]:
    """Return memory for all of a training's state: the optimizer's own, and beside the tensors' theirs.

    Args:
        memories: whether what comm hooks keep is wanted too.
    """
    optimizer, model = training.optimizer, training.model
    room = {}
    for name, p in _named("parameter", model.parameters()):
        room[_whole(name, p.size)] = xp_of(p.data).empty(p.shape, optimizer.master_dtype(p) or p.dtype)
    for name, buffer in [*_buffers(model), *(_memories(model) if memories else ())]:
        room[_whole(name, buffer.size)] = xp_of(buffer.data).empty_like(buffer.data)
    return room | _optimizer_state(optimizer)


def fill(training: Training, room: Mapping[Extent, Array], num_updates: int, data: dict[str, Any]) -> None:
    """Let a training go on from what was written into the room for it."""
    optimizer, model = training.optimizer, training.model
    values = {p: room[_whole(name, p.size)] for name, p in _named("parameter", model.parameters())}
    for p, value in values.items():
        p.data = value  # not in place: what ops see may be a copy in another precision
    for p, master in optimizer.master_slices():
        master.array[...] = values[p].reshape(-1)[master.start : master.stop].reshape(master.array.shape)
    for name, buffer in [*_buffers(model), *_memories(model)]:
        if (extent := _whole(name, buffer.size)) in room:
            buffer.data = room[extent]
    optimizer.num_steps = num_updates
    training.data.load_state_dict(data)


class MissingError(Exception):
    """Elements that no living rank holds; the same on every rank."""


class _Move(NamedTuple):
    """A part of what a rank holds, and where it is wanted."""

    source: int
    held: Extent
    dest: int
    wanted: Extent
    start: int
    stop: int


def hand_over(comm: Communicator, held: Mapping[Extent, Array], wanted: Mapping[Extent, Array]) -> None:
    """Fill `wanted` on every rank, from this rank's own `held` or from the first rank that holds it. Collective.

    Args:
        held: contiguous arrays; nothing on a rank that has lost them, or is new.
        wanted: contiguous arrays to write into; of another layout, perhaps.
    Raises:
        MissingError: somebody wants what nobody holds; nothing was written.
    """
    rows = comm.gather_objects((list(held), list(wanted)))
    holders: defaultdict[str, list[tuple[int, Extent]]] = defaultdict(list)
    for rank, (extents, _) in enumerate(rows):
        for extent in extents:
            holders[extent.name].append((rank, extent))
    moves = [
        move
        for dest, (_, extents) in enumerate(rows)
        for extent in extents
        for move in _cover(extent, dest, holders[extent.name])
    ]
    works: list[Work] = []
    for number, move in enumerate(moves):
        tag = number % comm.max_tag
        if move.dest == comm.rank:
            to = _part(wanted[move.wanted], move.wanted, move)
            if move.source == comm.rank:
                to[...] = beside(to, _part(held[move.held], move.held, move))
            else:
                works.append(comm.irecv(to, source=move.source, tag=tag))
        elif move.source == comm.rank:
            works.append(comm.isend(_part(held[move.held], move.held, move), dest=move.dest, tag=tag))
    for work in works:
        work.wait()


def _cover(wanted: Extent, dest: int, holders: Sequence[tuple[int, Extent]]) -> Iterator[_Move]:
    """Yield what covers an extent, in one way on every rank: what is there already, else of the first rank."""
    start = wanted.start
    while start < wanted.stop:
        found = [(rank, extent) for rank, extent in holders if extent.start <= start < extent.stop]
        if not found:
            raise MissingError(f"no living rank holds {wanted.name}[{start}:{wanted.stop}]")
        source, extent = min(found, key=lambda place: (place[0] != dest, place[0]))
        stop = min(extent.stop, wanted.stop)
        yield _Move(source, extent, dest, wanted, start, stop)
        start = stop


def _part(array: Array, extent: Extent, move: _Move) -> Array:
    """Return what of an extent's elements a message has."""
    return array.reshape(-1)[move.start - extent.start : move.stop - extent.start]


def _values(training: Training) -> dict[Parameter, list[TensorSlice]]:
    """Return what there is here of the values of each parameter that the optimizer has, nothing of some perhaps."""
    parts: dict[Parameter, list[TensorSlice]] = {p: [] for p in training.optimizer.params}
    for p, part in training.optimizer.value_slices():
        parts[p].append(part)
    return parts


def _optimizer_state(optimizer: Optimizer) -> dict[Extent, Array]:
    slices = optimizer.state_slices()
    return {Extent(f"optimizer/{name}", part.start, part.stop): part.array for name, part in slices}


def _buffers(model: HasTensors) -> list[tuple[str, Buffer]]:
    return _named("buffer", model.buffers())


def _memories(model: HasTensors) -> list[tuple[str, Buffer]]:
    return _named("memory", model.memories()) if isinstance(model, HasMemories) else []


def _named(kind: str, tensors: Iterable[T]) -> list[tuple[str, T]]:
    """Return tensors by the names that they have in a state."""
    named: dict[str, T] = {}
    for tensor in dict.fromkeys(tensors):
        name = f"{kind}/{tensor.name}"
        if not tensor.name or name in named:
            raise ValueError(f"recovery needs a name of its own for every tensor, {tensor.label} has none")
        named[name] = tensor
    return list(named.items())


def _whole(name: str, size: int) -> Extent:
    return Extent(name, 0, size)
