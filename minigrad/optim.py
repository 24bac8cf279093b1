"""Update rules on flat arrays, and the Optimizer that applies one to a model's parameters.

A rule is elementwise and works in place on any slice: it knows nothing of layers, which is why a
sharded optimizer needs no second implementation. Its state is at least float32: in float16 an eps of 1e-8
is 0, and so are squares of small gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np

from minigrad import habits
from minigrad.backend import Array, widened, xp_of
from minigrad.flat import FlatBuffer, FlatRange, TensorSlice, grads_of, slices_in, zero_grad
from minigrad.kernels import kernels_of
from minigrad.parameter import Parameter, check_usable

if not TYPE_CHECKING:  # a type checker knows what is there
    __getattr__ = habits.missing_name(__name__)

FROZEN = 2  # a kind of parameter to a whole step on a GPU; 1: with weight decay, 0: without
_DIVIDES = "tells parameters apart: give it to an Optimizer, which divides the memory"
LearningRate = float | Callable[[int], float]


class Rule(Protocol):
    """How values change, given gradients. `lr` is a number or a function of the step (from 0)."""

    @property
    def lr(self) -> LearningRate: ...

    def init(self, data: Array) -> dict[str, Array]:
        """Return the state for `data`: arrays of its shape, by name."""

    def update(self, data: Array, grad: Array, state: dict[str, Array], *, lr: float, step: int, decay: bool) -> None:
        """Change `data` and `state` in place.

        Args:
            data, grad: (n,); state: arrays (n,).
            lr: learning rate of this step.
            step: number of updates before this one.
            decay: whether weight decay applies here.
        """


class TakesALearningRate:
    """What rules have in common: parameters belong to the optimizer, and are no learning rate."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        lr = args[0] if args else kwargs.get("lr", 0.0)
        if not callable(lr) and not isinstance(lr, (int, float, np.number)):
            has_groups = isinstance(lr, (list, tuple)) and isinstance((*lr, None)[0], dict)
            way = habits.GROUPS if has_groups else f"Optimizer(parameters, {cls.__name__}(lr=...))"
            raise TypeError(
                f"{cls.__name__} takes a learning rate, a number or a function of the step, got {type(lr).__name__}; "
                f"parameters belong to the optimizer: write {way}"
            )
        return super().__new__(cls)


@dataclass(frozen=True)
class SGD(TakesALearningRate):
    """Stochastic gradient descent: v = momentum v + g + weight_decay w; w -= lr v.

    Source: Sutskever et al. 2013, as commonly implemented (lr outside the velocity).
    """

    lr: LearningRate
    momentum: float = 0.0
    weight_decay: float = 0.0

    def init(self, data: Array) -> dict[str, Array]:
        return {"velocity": _zeros(data)} if self.momentum else {}

    def update(self, data: Array, grad: Array, state: dict[str, Array], *, lr: float, step: int, decay: bool) -> None:
        weight_decay = self.weight_decay if decay else 0.0
        kernels_of(data, grad, *state.values()).sgd(data, grad, state.get("velocity"), lr, self.momentum, weight_decay)


@dataclass(frozen=True)
class AdamW(TakesALearningRate):
    """Adam with decoupled weight decay.

    m += (1 - b1)(g - m); v += (1 - b2)(g^2 - v); w -= lr (m' / (sqrt(v') + eps) + weight_decay w),
    m' = m / (1 - b1^t), v' = v / (1 - b2^t).

    Source: Loshchilov and Hutter 2019, algorithm 2.
    """

    lr: LearningRate
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def init(self, data: Array) -> dict[str, Array]:
        return {"m": _zeros(data), "v": _zeros(data)}

    def update(self, data: Array, grad: Array, state: dict[str, Array], *, lr: float, step: int, decay: bool) -> None:
        beta1, beta2 = self.betas
        correction1, correction2 = 1 - beta1 ** (step + 1), (1 - beta2 ** (step + 1)) ** 0.5
        # w -= lr/c1 m / (sqrt(v)/c2 + eps), with both corrections folded into two numbers
        rate, eps = lr / correction1 * correction2, self.eps * correction2
        keep = 1 - lr * self.weight_decay if decay else 1.0
        m, v = state["m"], state["v"]
        kernels_of(data, grad, m, v).adamw(data, grad, m, v, beta1, beta2, rate, eps, keep)

    def whole_step(self, data: Array, max_norm: float | None) -> Any:
        """Return what does whole steps on the device that `data` is on, or None; see `reference.adamw_step`."""
        return kernels_of(data).adamw_step(self.betas, self.eps, self.weight_decay, max_norm)


@dataclass(frozen=True)
class Adam(AdamW):
    """Adam: `AdamW`, but weight decay, 0 by default, is added to the gradient: g + weight_decay w.

    Source: Kingma and Ba 2015, algorithm 1.
    """

    weight_decay: float = 0.0

    def update(self, data: Array, grad: Array, state: dict[str, Array], *, lr: float, step: int, decay: bool) -> None:
        if decay and self.weight_decay:
            grad = grad + self.weight_decay * data
        super().update(data, grad, state, lr=lr, step=step, decay=False)

    def whole_step(self, data: Array, max_norm: float | None) -> Any:
        """Return what does whole steps, if there is no weight decay: on a GPU those decay as AdamW does."""
        return None if self.weight_decay else super().whole_step(data, max_norm)


def _at(lr: LearningRate, step: int) -> float:
    """Return the learning rate of a step."""
    return lr(step) if callable(lr) else lr


def divided(part: FlatRange, rule: Rule) -> Iterator[tuple[FlatRange, Rule]]:
    """Cut a part of the memory into what one rule each updates."""
    if isinstance(rule, DividingRule):
        for own_part, own in rule.divide(part):
            yield from divided(own_part, own)
    else:
        yield part, rule


def _zeros(data: Array) -> Array:
    return xp_of(data).zeros_like(widened(data[:0]), shape=data.shape)


def _checked(params: Iterable[Parameter]) -> Iterator[Parameter]:
    for p in params:
        if isinstance(p, dict):
            raise TypeError(f"Optimizer takes parameters, got a dict; groups are the rule's: write {habits.GROUPS}")
        yield p


_requires_grad = attrgetter("requires_grad")


def _inside(part: FlatRange, run: Iterable[Parameter]) -> FlatRange:
    """Return what adjacent parameters have of a range."""
    params = tuple(run)
    return FlatRange(part.flat, max(params[0].start, part.start), min(params[-1].stop, part.stop), params)


def is_matrix(p: Parameter) -> bool:
    """Return whether a parameter has two or more axes: not so biases, and gains of norms."""
    return p.ndim >= 2


class DividingRule:
    """A rule that is several: it says which part of the memory each is for (`Groups`, `Muon`)."""

    @property
    def lr(self) -> LearningRate:
        raise NotImplementedError

    def divide(self, part: FlatRange) -> Iterable[tuple[FlatRange, Rule]]:
        """Cut a range of memory into parts, each with its rule, which may divide it further."""
        raise NotImplementedError

    def check(self, params: Sequence[Parameter]) -> None:
        """Raise ValueError if it does not fit all parameters of an optimizer, of which `divide` may see a share."""

    def init(self, data: Array) -> dict[str, Array]:
        raise TypeError(f"{type(self).__name__} {_DIVIDES}")

    def update(self, data: Array, grad: Array, state: dict[str, Array], *, lr: float, step: int, decay: bool) -> None:
        raise TypeError(f"{type(self).__name__} {_DIVIDES}")


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
        parts: of the parameters' memory, what this optimizer updates; all of it by default.

    Attributes:
        is_captured: a captured step is under way (`cuda_graph.py`), which calls `advance` itself.
    Raises:
        ValueError: max_norm is not positive.
        RuntimeError: max_norm is given for parameters of a part of a model.
    """

    @habits.own_options
    def __init__(
        self,
        params: Iterable[Parameter],
        rule: Rule,
        *,
        decays: Callable[[Parameter], bool] = is_matrix,
        max_norm: float | None = None,
        parts: Sequence[FlatRange] | None = None,
    ) -> None:
        if not hasattr(rule, "update"):
            raise TypeError(f"Optimizer takes a rule, such as SGD(lr=0.1), got {type(rule).__name__}")
        self.params = list(dict.fromkeys(_checked(params)))
        if isinstance(rule, DividingRule):
            rule.check(self.params)
        if max_norm is not None:
            check_max_norm(max_norm)
            _check_whole(self.params)
        self.rule = rule
        self.decays = decays
        self.max_norm = max_norm
        self.num_steps = 0
        self.is_captured = False
        adopted = FlatBuffer.adopt(self.params)
        self._parts = list(adopted if parts is None else parts)
        self._pieces = {
            part: [Piece(own, each, each.init(own.data)) for own, each in divided(part, rule)] for part in self._parts
        }
        self._known_runs: dict[FlatRange, tuple[Any, list[tuple[FlatRange, bool]], list[FlatRange]]] = {}
        self._norm = 0.0
        self._is_counted = False  # whether `num_steps` has the last step
        self._whole_step = self._new_whole_step()

    @property
    def grad_norm(self) -> float:
        """The norm of all gradients before clipping, as of the last step; 0 without `max_norm`. Asks a GPU."""
        return self._norm if self._whole_step is None else float(self._whole_step.norm())

    def was_taken(self) -> bool:
        """Return whether the last step changed anything, and where it did not, let nobody count it. Asks a GPU.

        With `max_norm` a step changes nothing where the norm is infinite or nan.
        """
        taken = math.isfinite(self.grad_norm)
        if not taken and self._is_counted:
            self.num_steps -= 1
            self._is_counted = False
        return taken

    @property
    def asks_nothing(self) -> bool:
        """Whether `step` waits for no answer of a GPU: needed to capture it."""
        return self._whole_step is not None

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return _at(self.rule.lr, self.num_steps)

    def step(self) -> None:
        """Update every parameter that requires grad; a gradient that no backward reached counts as zero.

        Raises:
            RuntimeError: somebody holds one of the gradients.
        """
        check_usable(self.params, "optimizer.step() with")
        if self._whole_step is not None:
            if not self.is_captured:
                self.advance()
            self._whole_step.apply([self._on_device(piece) for pieces in self._pieces.values() for piece in pieces])
            for part in self._parts:
                part.note_change("the optimizer", copied=True)
            return
        if self.max_norm is not None:
            self._norm = clip_by_global_norm(self.params, self.max_norm)
            self._is_counted = math.isfinite(self._norm)
            if not self._is_counted:
                return
        for part in self._parts:
            self._update(part, part.data, part.grad, self.num_steps)
        self.num_steps += 1

    def _update(self, part: FlatRange, values: Array, grad: Array, step: int) -> None:
        """Update `values`, those of a part of the memory, by their gradients."""
        if grad.dtype != values.dtype:
            grad = grad.astype(values.dtype)  # added up in a wider one
        for piece, rule, state in self._pieces[part]:
            lr = _at(rule.lr, step)
            runs, changed = self._runs(piece)
            for run, decay in runs:
                own = slice(run.start - part.start, run.stop - part.start)
                of_piece = slice(run.start - piece.start, run.stop - piece.start)
                own_state = {name: array[of_piece] for name, array in state.items()}
                rule.update(values[own], grad[own], own_state, lr=lr, step=step, decay=decay)
            for trainable in changed:
                trainable.note_change("the optimizer")

    def advance(self) -> None:
        """Tell a GPU the numbers of the next step, and count it. `step` does so, unless it is being captured."""
        assert self._whole_step is not None
        self._whole_step.advance(self.lr, self.num_steps)
        self.num_steps += 1
        self._is_counted = True

    def _new_whole_step(self) -> Any:
        """Return what does a whole step on a GPU, or None where parts are updated one by one."""
        if not self._parts or not isinstance(self.rule, AdamW):
            return None
        if any((part.data.dtype, part.flat.grad.dtype) != (np.float32, np.float32) for part in self._parts):
            return None
        return self.rule.whole_step(self._parts[0].data, self.max_norm)

    def _on_device(self, piece: Piece) -> tuple[Any, ...]:
        """Return a piece as a whole step takes it."""
        part, _, state = piece
        kinds = groupby(part.params, lambda p: FROZEN if not p.requires_grad else int(self.decays(p)))
        lengths = tuple([(sum(p.size for p in run), kind) for kind, run in kinds])
        return part.data, part.grad, state["m"], state["v"], part.copy, lengths

    def state_arrays(self) -> Iterator[tuple[str, Array]]:
        """Yield the rule's state as (name, view): `("m/fc.weight", ...)`, each of its parameter's shape.

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

    def has_master(self, p: Parameter) -> bool:
        """Return whether some optimizer has a parameter's values in full, and the parameter only in less precision."""
        return False

    def __dir__(self) -> list[str]:
        return habits.own_names(self)

    @habits.own_options
    def zero_grad(self) -> None:
        """Mark all gradients fresh, in place: a bucket may own the memory."""
        zero_grad(self.params)

    def _runs(self, part: FlatRange) -> tuple[list[tuple[FlatRange, bool]], list[FlatRange]]:
        """Cut a range where weight decay begins or ends, and leave frozen parameters out; return the trainable too."""
        requires_grad = tuple([p.requires_grad for p in part.params])
        known = self._known_runs.get(part)
        if known is None or known[0] != requires_grad:
            runs = [
                (_inside(part, run), decay)
                for (trainable, decay), run in groupby(part.params, lambda p: (p.requires_grad, self.decays(p)))
                if trainable
            ]
            changed = [_inside(part, run) for trainable, run in groupby(part.params, _requires_grad) if trainable]
            known = self._known_runs[part] = requires_grad, runs, changed
        return known[1:]


habits.teach(Optimizer, habits.OPTIMIZER)


def grad_square_sum(params: Iterable[Parameter]) -> float:
    """Return the sum of squares of all gradients; of ranks that hold different parameters, the sums add.

    It is added up in float64, so that it is finite for all finite gradients but the largest of float64.

    Raises:
        RuntimeError: somebody holds one of the gradients.
    """
    params = list(params)
    check_usable(params, "the norm of")
    return _square_sum(grads_of(params))


def _square_sum(grads: Iterable[Array]) -> float:
    return sum((kernels_of(grad).square_sum(grad) for grad in grads), 0.0)


def scale_to_norm(params: Iterable[Parameter], norm: float, max_norm: float) -> None:
    """Scale all gradients by max_norm / norm if the norm of the whole model's gradient is larger than max_norm.

    A norm that is infinite or nan scales nothing: gradients of 0 would hide it.

    Raises:
        ValueError: max_norm is not positive.
    """
    clip_arrays(grads_of(params), norm, max_norm)


def clip_arrays(grads: Iterable[Array], norm: float, max_norm: float) -> None:
    """Scale gradients, (n,) each, as `scale_to_norm` does those of parameters."""
    check_max_norm(max_norm)
    if norm > max_norm and math.isfinite(norm):
        for grad in grads:
            kernels_of(grad).scale(grad, max_norm / norm)


def check_max_norm(max_norm: float) -> None:
    """Raise ValueError if a norm to clip to is not positive."""
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")


def clip_by_global_norm(params: Sequence[Parameter], max_norm: float) -> float:
    """Clip the gradients of a model that lives in this process by their global norm.

    Returns:
        The norm before clipping. Gradients stay as they are where it is infinite or nan.
    Raises:
        ValueError: max_norm is not positive.
        RuntimeError: a parameter is one of a part of a model: its norm is not the model's.
    Source: Pascanu et al. 2013.
    """
    _check_whole(params)
    norm = grad_norm(params)
    scale_to_norm(params, norm, max_norm)
    return norm


def _check_whole(params: Iterable[Parameter]) -> None:
    """Raise RuntimeError if one of these parameters is of a part of a model, whose norm is not the model's."""
    for p in params:
        if p.part_of:
            raise RuntimeError(f"the norm of {p.label}: it is of {p.part_of}")


def grad_norm(params: Sequence[Parameter]) -> float:
    """Return the norm of all gradients, also where their squares overflow or vanish.

    Raises:
        RuntimeError: somebody holds one of the gradients.
    """
    params = list(params)
    check_usable(params, "the norm of")
    return norm_of(grads_of(params))


def norm_of(grads: Iterable[Array]) -> float:
    """Return the norm of some gradients together, also where their squares overflow or vanish."""
    grads = [grad for grad in grads if grad.size]
    total = _square_sum(grads)
    if 1e-280 < total < 1e280 or math.isnan(total):
        return math.sqrt(total)
    largest = max((float(abs(grad).max()) for grad in grads), default=0.0)
    if largest == 0 or math.isinf(largest):
        return largest
    # All gradients are finite, but their squares overflowed float64, or vanished.
    return largest * math.sqrt(sum(kernels_of(grad).square_sum(grad.astype(np.float64) / largest) for grad in grads))
