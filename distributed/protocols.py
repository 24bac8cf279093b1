"""What checkpoints, recovery and runs ask of the objects of a training loop: a model's tensors, a position in data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from minigrad.nn import Buffer
from minigrad.parameter import Parameter


class HasTensors(Protocol):
    """A model, or this rank's part of one: a Module, or the stages of a pipeline."""

    def parameters(self) -> Iterable[Parameter]: ...

    def buffers(self) -> Iterable[Buffer]: ...


@runtime_checkable
class HasMemories(HasTensors, Protocol):
    """A model with what belongs to the layout that it is trained in.

    It can begin anew in another one.
    """

    def memories(self) -> Iterable[Buffer]: ...

    def forget(self) -> None: ...

    def pack(self) -> None:
        """Put what is to be saved where it is saved from. Collective."""

    def unpack(self) -> None:
        """Go on from what `pack` has put there, or what was loaded there. Collective."""


@runtime_checkable
class Packs(Protocol):
    """A memory that must be packed to be saved; see `HasMemories`."""

    def pack(self) -> None: ...

    def unpack(self) -> None: ...


class HasParameters(Protocol):
    """A module, or the stages of a pipeline: these have `buffers()` too."""

    def parameters(self) -> Sequence[Parameter]: ...


class HasState(Protocol):
    """Data with a position in it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
