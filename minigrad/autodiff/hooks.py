"""Hooks: what somebody else wants to do while a backward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from minigrad.parameter import Parameter


@dataclass(frozen=True)
class Hooks:
    """What somebody else wants to do while a backward runs.

    Hooks add: `a + b` calls a's, then b's.

    Attributes:
        on_start: called once, before the first vjp, with the parameters that this backward will reach.
        on_grad_ready: called once for each of them, at the moment its grad is final.
        between_ops: called after every op, for example to let messages progress.
        on_error: called once if an exception ends the backward, Ctrl-C included: what it had begun will not be done.
        weight, mean_over: where set, the backward starts from its cotangent times weight / mean_over, and whoever
            reduces gradients adds them up as they are: the weight of this loss in the mean over all losses, and the
            sum of all their weights.
    """

    on_start: Callable[[Sequence[Parameter]], None] | None = None
    on_grad_ready: Callable[[Parameter], None] | None = None
    between_ops: Callable[[], None] | None = None
    on_error: Callable[[], None] | None = None
    weight: float | None = None
    mean_over: float | None = None

    def __post_init__(self) -> None:
        for name in ("on_start", "on_grad_ready", "between_ops", "on_error"):
            hook = getattr(self, name)
            if hook is not None and not callable(hook):
                raise TypeError(f"{name} must be a function, got {hook!r}")

    @property
    def share(self) -> float:
        """What a backward's cotangent is multiplied by."""
        return 1.0 if self.weight is None or self.mean_over is None else self.weight / self.mean_over

    @staticmethod
    def of(hooks: Hooks | None) -> Hooks:
        """Return hooks, none at all for None.

        Raises:
            TypeError: they are something else.
        """
        if hooks is not None and not isinstance(hooks, Hooks):
            raise TypeError(f"hooks must be Hooks, got {hooks!r}; a function of your own is Hooks(on_grad_ready=...)")
        return hooks or Hooks()

    def __add__(self, other: Hooks) -> Hooks:
        return Hooks(
            _both(self.on_start, other.on_start),
            _both(self.on_grad_ready, other.on_grad_ready),
            _both(self.between_ops, other.between_ops),
            _both(self.on_error, other.on_error),
            other.weight if self.weight is None else self.weight,
            other.mean_over if self.mean_over is None else self.mean_over,
        )

    @contextmanager
    def told_of_errors(self) -> Iterator[None]:
        """Call `on_error` if what runs inside the `with` ends with an exception.

        The exception goes on to the caller.
        """
        try:
            yield
        except BaseException:
            if self.on_error is not None:
                self.on_error()
            raise


def _both(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return first or second

    def both(*args: Any) -> None:
        first(*args)
        second(*args)

    return both
