"""What goes on with a run beside tensors, as one state: the position in the data, and what else steps change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed.protocols import HasState


class JoinedState:
    """Several objects with a state as one.

    It is the state of the data, with the others in it by name.

        training.data = JoinedState(batches, loss_scale=scale)

    So it is saved, and given to whoever takes the place of a rank that died, as a position alone would be. A run may
    begin or cease to have one of the others: what a saved state lacks goes on as it is, what it has too many is left.

    Args:
        data: its state is a dictionary, without these names.
        others: by their names; None where a run has no such thing.
    """

    def __init__(self, data: HasState, **others: HasState | None) -> None:
        self._data = data
        self._others = others

    def state_dict(self) -> dict[str, Any]:
        held = {name: other.state_dict() for name, other in self._others.items() if other is not None}
        return self._data.state_dict() | held

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, also of a run that had others of these, or none."""
        state = dict(state)
        for name, other in self._others.items():
            saved = state.pop(name, None)
            if other is not None and saved is not None:
                other.load_state_dict(saved)
        self._data.load_state_dict(state)
