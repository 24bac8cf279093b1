"""When a parameter's gradient is final, over the micro-batches and chunks of a step.

Each micro-batch has a tape of its own, and a parameter may be on any number of them. Tapes are counted per parameter
as the forwards make them. From the first backward after this rank's last forward the counts are complete, so the
hooks of the whole step start there: parameters already at zero are ready at once, each other one as its last tape is
walked. No schedule needs a special case.

Where several weight halves stand in a row, as at the end of a zero-bubble step, they run side by side: each parameter
is ready when the last of them has passed it, and not only in the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minigrad.autodiff.hooks import Hooks
from minigrad.parameter import Parameter
from pipeline.schedules.action import Action, Kind


def side_by_side(program: Sequence[Action]) -> list[list[Action]]:
    """Group a program into what runs as one.

    W's of one stage in a row, messages in a row; any other action alone.
    """

    def together(last: Action, action: Action) -> bool:
        if last.kind is action.kind is Kind.W:
            return last.stage == action.stage
        return not (last.kind.is_compute or action.kind.is_compute)

    groups: list[list[Action]] = []
    for action in program:
        if groups and together(groups[-1][-1], action):
            groups[-1].append(action)
        else:
            groups.append([action])
    return groups


class StepHooks:
    """Turns the hooks of single backwards into the hooks of one step.

    Args:
        num_forwards: how many forwards this rank runs in the step.
        late: parameters that are final only after `finish`: tied over ranks.
    """

    def __init__(self, num_forwards: int, late: Sequence[Parameter]) -> None:
        self._num_forwards_left = num_forwards
        self._late = tuple(p for p in late if p.requires_grad)
        self._pending: dict[Parameter, int] = {}
        self._hooks = Hooks()
        self._started = False

    def use(self, hooks: Hooks) -> None:
        """Fire these hooks; call it before the first backward."""
        self._hooks = hooks

    def forward_done(self, reached: Iterable[Parameter]) -> None:
        """Count the tape of one forward."""
        self._num_forwards_left -= 1
        for p in reached:
            self._pending[p] = self._pending.get(p, 0) + 1

    def backward_hooks(self) -> Hooks:
        """Return the hooks for the next backward of one micro-batch."""
        if self._num_forwards_left == 0 and not self._started:
            self._start()
        return Hooks(on_grad_ready=self._tape_done, between_ops=self._hooks.between_ops)

    def finish(self) -> None:
        """Fire what is left, once late parameters are final."""
        if not self._started:
            self._start()
        for p in self._late:
            self._fire(p)

    def _start(self) -> None:
        self._started = True
        if self._hooks.on_start is not None:
            self._hooks.on_start(tuple(dict.fromkeys([*self._pending, *self._late])))
        for p, count in self._pending.items():
            if count == 0 and p not in self._late:
                self._fire(p)

    def _tape_done(self, p: Parameter) -> None:
        self._pending[p] -= 1
        if self._started and self._pending[p] == 0 and p not in self._late:
            self._fire(p)

    def _fire(self, p: Parameter) -> None:
        if self._hooks.on_grad_ready is not None:
            self._hooks.on_grad_ready(p)
