"""The Optimizer, which applies an update rule to a model's parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from minigrad import habits
from minigrad.backend import Array
from minigrad.flat import FlatBuffer, zero_grad
from minigrad.flat_range import FlatRange, TensorSlice, slices_in
from minigrad.optim.clipping import (
    NormOver,
    check_max_norm,
    check_whole,
    clip_by_global_norm,
    norm_of_parts,
    scale_to_norm,
)
from minigrad.optim.update_rules import AdamW, DividingRule, LearningRate, Rule, divided
from minigrad.parameter import Parameter, check_usable
from minigrad.precision import LossScale

FROZEN = 2  # a kind of parameter to a whole step on a GPU; 1: with weight decay, 0: without


def _at(lr: LearningRate, step: int) -> float:
    """Return the learning rate of a step."""
    if not callable(lr):
        return lr
    rate = lr(step)
    if not isinstance(rate, (int, float, np.number)) or not 0 <= rate < math.inf:
        raise ValueError(f"the learning rate of step {step} must be a number of at least 0 and finite, got {rate!r}")
    return rate


def _checked(params: Iterable[Parameter]) -> Iterator[Parameter]:
    if hasattr(params, "parameters"):
        raise TypeError(f"Optimizer takes parameters, got a {type(params).__name__}: give its .parameters()")
    for p in params:
        if isinstance(p, dict):
            raise TypeError(f"Optimizer takes parameters, got a dict; groups are the rule's: write {habits.GROUPS}")
        if not isinstance(p, Parameter):
            raise TypeError(f"Optimizer takes parameters, got {type(p).__name__}: name it, Parameter(array, name)")
        yield p


def is_matrix(p: Parameter) -> bool:
    """Return whether a parameter has two or more axes.

    Biases have not, and neither have gains of norms.
    """
    return p.ndim >= 2


class Piece(NamedTuple):
    """Memory that one rule updates, and the rule's state for it."""

    range: FlatRange
    rule: Rule
    state: dict[str, Array]


class Optimizer:
    """Applies a rule to parameters, wherever their memory lies.

    Args:
        params: distinct parameters in model order; those without an owner get a FlatBuffer.
        rule: SGD, AdamW, Muon, your own `Rule`, or `Groups` of several.
        decays: which parameters weight decay applies to; by default those with two or more axes. Asked once.
        max_norm: clip by the norm of all gradients of `params` in each step, and take no step where it is infinite or
            nan; None: neither. On a GPU this waits for nothing, as `clip_by_global_norm` would; `was_taken` asks.
        loss_scale: of float16: gradients are those of a loss times its factor, and each step updates it. Needs
            max_norm, which may be infinite.
        norm_over: of parameters of a part of a model: the whole, by whose norm it clips. `step` is collective then.
        parts: of the parameters' memory, what this optimizer updates; all of it by default.

    Attributes:
        is_captured: a captured step is under way (`cuda_graph.py`), which calls `advance` itself.
    Raises:
        TypeError: rule is no rule, or params are groups of them, as PyTorch has them.
        ValueError: max_norm is not positive, or there is a loss_scale or a norm_over without it.
        RuntimeError: max_norm is given for parameters of a part of a model, without norm_over.
    """

    @habits.own_options
    def __init__(
        self,
        params: Iterable[Parameter],
        rule: Rule,
        *,
        decays: Callable[[Parameter], bool] = is_matrix,
        max_norm: float | None = None,
        loss_scale: LossScale | None = None,
        norm_over: NormOver | None = None,
        parts: Sequence[FlatRange] | None = None,
    ) -> None:
        if not hasattr(rule, "update") or isinstance(rule, type):
            got = f"the class {rule.__name__}" if isinstance(rule, type) else type(rule).__name__
            raise TypeError(f"Optimizer takes a rule, such as SGD(lr=0.1), got {got}")
        self.params = list(dict.fromkeys(_checked(params)))
        if isinstance(rule, DividingRule):
            rule.check(self.params)
        if max_norm is not None:
            check_max_norm(max_norm)
            if norm_over is None:
                check_whole(self.params)
        elif loss_scale is not None:
            raise ValueError("a loss_scale needs max_norm, by which steps are skipped: infinity does not clip")
        elif norm_over is not None:
            raise ValueError("norm_over is for clipping: give max_norm too")
        self.rule = rule
        self._decaying = frozenset(filter(decays, self.params))
        self.max_norm = max_norm
        self.loss_scale = loss_scale
        self.norm_over = norm_over
        self.num_steps = 0
        self.is_captured = False
        adopted = FlatBuffer.adopt(self.params)
        self._parts = list(adopted if parts is None else parts)
        self._pieces = {
            part: [Piece(own, each, each.init(own.data)) for own, each in divided(part, rule)] for part in self._parts
        }
        self._known_runs: dict[FlatRange, tuple[Any, list[tuple[FlatRange, bool]]]] = {}
        if loss_scale is not None and self._parts:
            loss_scale.move_to(self._parts[0].data)
        self._norm = 0.0
        self._was_taken = True
        self._whole_step = self._new_whole_step()

    @property
    def grad_norm(self) -> float:
        """The norm of all gradients before clipping, as of the last step.

        0 without `max_norm`. Asks a GPU.
        """
        return self._norm if self._whole_step is None else float(self._whole_step.norm())

    def was_taken(self) -> bool:
        """Return whether the last step changed anything.

        A step that did not is not counted. Asks a GPU. With `max_norm` a step changes nothing where the norm is
        infinite or nan. A GPU takes its own account of steps that were; `num_steps` and so the learning rate have heard
        of others when this was last called.

        Raises:
            FloatingPointError: the loss scale has skipped too many steps in a row.
        """
        if self._whole_step is None:
            return self._was_taken
        taken, num_missed = self._whole_step.outcome()
        self.num_steps -= num_missed
        if self.loss_scale is not None and not taken:
            self.loss_scale.check(self.grad_norm)
        return bool(taken)

    @property
    def asks_nothing(self) -> bool:
        """Whether `step` waits for no answer of a GPU: needed to capture it."""
        return self._whole_step is not None

    def trained(self) -> tuple[bool, ...]:
        """Return of each parameter whether it requires a gradient.

        A captured step trains those that did when it was captured.
        """
        return tuple([p.requires_grad for p in self.params])

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return _at(self.rule.lr, self.num_steps)

    def step(self) -> None:
        """Update every parameter that requires a gradient.

        A gradient that no backward reached counts as zero.

        Raises:
            RuntimeError: somebody holds one of the gradients.
            FloatingPointError: the loss scale has skipped too many steps in a row; on a GPU `was_taken` says so.
        """
        check_usable(self.params, "optimizer.step() with")
        if self._whole_step is not None:
            if not self.is_captured:
                self.advance()
            arrays = [arrays for part in self._parts for arrays in self._on_device(part, part.grad)]
            self._prepare_whole_step()
            for each in arrays:
                self._whole_step.update(*each)
            for part in self._parts:
                part.note_step("the optimizer", copied=True)
            return
        if not self._may_step():
            return
        for part in self._parts:
            self._update(part, part.data, part.grad, self.num_steps)
            part.note_step("the optimizer")
        self.num_steps += 1

    def _may_step(self) -> bool:
        """Clip on the host, if at all; return whether the norm allows a step."""
        if self.max_norm is not None:
            if self.loss_scale is not None:
                self.loss_scale.unscale(self.params)
            self._norm = self._clip(self.norm_over, self.max_norm)
            allows = math.isfinite if self.loss_scale is None else self.loss_scale.update
            self._was_taken = allows(self._norm)
        return self._was_taken

    def _clip(self, norm_over: NormOver | None, max_norm: float) -> float:
        """Clip all gradients; return their norm before."""
        if norm_over is None:
            return clip_by_global_norm(self.params, max_norm)
        norm = norm_of_parts(norm_over)
        scale_to_norm(self.params, norm, max_norm)
        return norm

    def _update(self, part: FlatRange, values: Array, grad: Array, step: int) -> None:
        """Update `values`, those of a part of the memory, by their gradients; the change is for the caller to note."""
        for piece, rule, state in self._pieces[part]:
            lr = _at(rule.lr, step)
            for run, decay in self._runs(piece):
                own = slice(run.start - part.start, run.stop - part.start)
                of_piece = slice(run.start - piece.start, run.stop - piece.start)
                own_state = {name: array[of_piece] for name, array in state.items()}
                rule.update(values[own], grad[own], own_state, lr=lr, step=step, decay=decay)

    def advance(self) -> None:
        """Tell a GPU the numbers of the next step, and count it.

        `step` does so, unless it is being captured.
        """
        assert self._whole_step is not None
        self._whole_step.advance(self.lr, self.num_steps)
        self.num_steps += 1

    def _prepare_whole_step(self) -> None:
        """Make the numbers of a step on a GPU, of all gradients where it clips."""
        if self.max_norm is None:
            self._whole_step.prepare([])
        elif self.norm_over is None:
            self._whole_step.prepare([part.grad for part in self._parts])
        else:
            self._whole_step.prepare(self.norm_over.counted_grads(), self.norm_over.add_up)

    def _new_whole_step(self) -> Any:
        """Return what does a whole step on a GPU, or None where parts are updated one by one."""
        if not self._parts or not isinstance(self.rule, AdamW):
            return None
        if any(part.data.dtype != np.float32 or part.flat.is_widened for part in self._parts):
            return None
        return self.rule.whole_step(self._parts[0].data, self.max_norm, self.loss_scale)

    def _on_device(self, part: FlatRange, grad: Array) -> Iterator[tuple[Any, ...]]:
        """Yield a part of the memory, whose gradients are given, as a whole step takes it."""
        for piece, _, state in self._pieces[part]:
            kinds = groupby(piece.params, lambda p: FROZEN if not p.requires_grad else int(p in self._decaying))
            runs = [(piece.over_run(run), kind) for kind, run in kinds]
            lengths = tuple([(run.stop - run.start, kind) for run, kind in runs])
            own_grad = grad[piece.start - part.start : piece.stop - part.start]
            yield piece.data, own_grad, state["m"], state["v"], piece.copy, lengths

    def state_arrays(self) -> Iterator[tuple[str, Array]]:
        """Yield the rule's state as (name, view).

        They look like `("m/fc.weight", ...)`, each of its parameter's shape.

        Raises:
            ValueError: a parameter has no name.
        """
        return ((name, held.array) for name, held in self.state_slices())

    def state_slices(self) -> Iterator[tuple[str, TensorSlice]]:
        """Yield what there is here of the rule's state, by the names of `state_arrays`.

        Raises:
            ValueError: a parameter has no name.
        """
        for piece, _, state in (piece for pieces in self._pieces.values() for piece in pieces):
            for key, array in state.items():
                for p, held in slices_in(piece, array):
                    if not p.name:
                        raise ValueError(f"state is told apart by the names of parameters, but {p.label} has none")
                    yield f"{key}/{p.name}", held

    def master_slices(self) -> Iterator[tuple[Parameter, TensorSlice]]:
        """Yield what there is here of the values of parameters that have a master."""
        return iter(())

    def whole_masters(self) -> dict[str, Array]:
        """Return the values of parameters that have a master, by name. Collective."""
        return {}

    def master_dtype(self, p: Parameter) -> np.dtype[Any] | None:
        """Return the dtype of a parameter's master, which has its values in full; None where it has them itself."""
        return None

    def value_slices(self) -> Iterator[tuple[Parameter, TensorSlice]]:
        """Yield what there is here of the parameters' values in full.

        It waits for none that are on their way.
        """
        return ((p, TensorSlice.whole(p.data)) for p in self.params)

    def finish(self) -> None:
        """Block until nothing of a step is on its way: a subclass may let `step` return earlier."""

    def __dir__(self) -> list[str]:
        return habits.own_names(self)

    @habits.own_options
    def zero_grad(self) -> None:
        """Mark all gradients fresh, in place: a bucket may own the memory."""
        zero_grad(self.params)

    def _runs(self, part: FlatRange) -> list[tuple[FlatRange, bool]]:
        """Cut a range where weight decay begins or ends, and leave frozen parameters out."""
        requires_grad = tuple([p.requires_grad for p in part.params])
        known = self._known_runs.get(part)
        if known is None or known[0] != requires_grad:
            runs = [
                (part.over_run(run), decay)
                for (trainable, decay), run in groupby(part.params, lambda p: (p.requires_grad, p in self._decaying))
                if trainable
            ]
            known = self._known_runs[part] = requires_grad, runs
        return known[1]


habits.teach(Optimizer, habits.OPTIMIZER)
