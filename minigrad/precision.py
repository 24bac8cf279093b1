"""In which dtype ops see parameters, and what float16's narrow range asks for.

    what is trained     float32     values, gradients and the optimizer's state, in the flat buffers
    what ops see        half        one copy of the values, which the optimizer keeps up

Activations take the dtype of the weights that they meet, so a model needs no other change. Inside ops sums, softmaxes,
norms and losses are computed in float32, and gradients of weights arrive in float32: docs/design.md has the table.
A checkpoint holds what is trained, so a run may go on in another precision.

bfloat16 has float32's range and needs no more than this. float16 reaches from 6e-8 to 65504:
a `LossScale` keeps gradients inside.

Source: Micikevicius et al. 2018, Mixed precision training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from minigrad.backend import Array, gpu_capability, is_half, to_host, xp_of
from minigrad.extras import needs
from minigrad.flat import FlatBuffer
from minigrad.kernels import kernels_of
from minigrad.parameter import Parameter
from minigrad.step_guard import MAX_SKIPPED_IN_A_ROW, StepGuard

PRECISIONS = ("float32", "bfloat16", "float16")
MAX_SCALE = 2.0**24
_OLDEST_GPU = (8, 0)  # whose conversions gpu.cu has


def dtype_of(precision: str) -> np.dtype[Any]:
    """Return the dtype that ops see in this precision.

    Raises:
        ValueError: there is no such precision.
        ModuleNotFoundError: bfloat16 needs ml_dtypes, which is not installed.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if precision != "bfloat16":
        return np.dtype(precision)
    try:
        import ml_dtypes
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(needs("bfloat16", "ml_dtypes", "bfloat16")) from error
    return np.dtype(ml_dtypes.bfloat16)


def use_precision(params: Iterable[Parameter], precision: str) -> None:
    """Let ops see float32 parameters in this precision from now on.

    `data` and `grad` stay float32.

    Args:
        params: all that lie in the same flat buffers; those without an owner get one.
    Raises:
        ValueError: there is no such precision, a parameter is not float32, others share its flat buffer, or their GPU
            is too old for half precision.
        TypeError: params are no parameters.
    """
    if hasattr(params, "parameters"):
        raise TypeError(f"use_precision takes parameters, got a {type(params).__name__}: give its .parameters()")
    dtype, params = dtype_of(precision), list(params)
    for p in params:
        if p.dtype != np.float32:
            raise ValueError(f"a precision is for float32 parameters, but {p.label} is {p.dtype}")
    if is_half(dtype) and any(xp_of(p.data) is not np for p in params):
        check_half_precision(precision)
    chosen = set(params)
    flats = dict.fromkeys(part.flat for part in FlatBuffer.adopt(params))
    for flat in flats:
        for p in flat.params:
            if p not in chosen:
                raise ValueError(f"parameters of one flat buffer have one precision, but {p.label} is left out")
    for flat in flats:
        flat.keep_copy(dtype)


def check_half_precision(precision: str) -> None:
    """Refuse half precision where the current GPU has no instructions for it, before a kernel fails to compile.

    Raises:
        ValueError: it is older than Ampere.
    """
    capability = gpu_capability()
    if capability < _OLDEST_GPU:
        needed, got = (".".join(map(str, numbers)) for numbers in (_OLDEST_GPU, capability))
        raise ValueError(
            f"{precision} needs a GPU of compute capability {needed} or newer, got {got}: take float32 there"
        )


class LossScale(StepGuard):
    """A factor on the loss that keeps float16 gradients from 0 and infinity.

    It is the guard of its steps too. An optimizer that is given it does the rest, and on a GPU asks nothing: factor and
    counts lie there.

        optimizer = Optimizer(params, AdamW(1e-3), max_norm=1.0, loss_scale=scale)
        mg.backward(loss * scale.factor)
        optimizer.step()

    By hand, and where the norm is one of several ranks, which must all see the same:

        scale.move_to(params[0].data)
        mg.backward(loss * scale.factor)
        scale.unscale(params)
        norm = clip_by_global_norm(stages, 1.0)
        if scale.update(norm):
            optimizer.step()

    Args:
        value: of the factor at first; a power of two from 1 to `MAX_SCALE`, so that it rounds nothing.
        growth_steps: so many good steps in a row double it.
        max_in_a_row: see `StepGuard`; by default as many more as it takes to halve the largest factor down to 1.
    Raises:
        ValueError: value is no such power, growth_steps is below 1, or as `StepGuard`.
    """

    most = MAX_SCALE

    def __init__(
        self,
        value: float = 2.0**16,
        growth_steps: int = 2000,
        *,
        max_in_a_row: int = MAX_SKIPPED_IN_A_ROW + int(math.log2(MAX_SCALE)),
    ) -> None:
        super().__init__(max_in_a_row)
        if not 1 <= value <= MAX_SCALE or math.frexp(value)[0] != 0.5:
            raise ValueError(f"the factor of a loss must be a power of two from 1 to 2**24, got {value}")
        if growth_steps < 1:
            raise ValueError(f"growth_steps must be at least 1, got {growth_steps}")
        self.growth_steps = growth_steps
        self._state: Array = np.array([value, 0, 0, 0], np.float32)  # `LossScale` in gpu.cu

    @property
    def factor(self) -> Array:
        """What a loss is multiplied by: () float32, which follows the steps.

        It is where `move_to` or an optimizer has put it.
        """
        return self._state[:1].reshape(())

    @property
    def value(self) -> float:
        """The factor now, as a number. Asks a GPU."""
        return float(self._state[0])

    @property
    def num_skipped(self) -> int:
        """Steps skipped so far. Asks a GPU."""
        return int(self._state[2])

    @property
    def num_in_a_row(self) -> int:
        """Of the skipped steps, the last ones with no step taken since. Asks a GPU."""
        return int(self._state[3])

    def move_to(self, like: Array) -> Array:
        """Let factor and counts lie where an array does; return their memory.

        It is (4,) float32.
        """
        if xp_of(self._state) is not xp_of(like):
            self._state = xp_of(like).asarray(self._state)
        return self._state

    def unscale(self, params: Iterable[Parameter]) -> None:
        """Divide all gradients by the factor, in place."""
        for part in FlatBuffer.adopt(params):
            grad = part.grad
            kernels_of(grad).scale(grad, 1 / self.value)

    def update(self, norm: float) -> bool:
        """Return whether a step may be taken with gradients of this norm.

        If not, the factor is halved.

        Args:
            norm: of the unscaled gradients, infinite or nan where one of them is.
        Raises:
            FloatingPointError: see `StepGuard.allows`.
        """
        return self.allows(norm)

    def state_dict(self) -> dict[str, float]:
        """Return what a run needs to go on. Asks a GPU."""
        value, num_good, num_skipped, num_in_a_row = to_host(self._state).tolist()
        return {
            "value": value,
            "num_skipped": int(num_skipped),
            "num_good": int(num_good),
            "num_in_a_row": int(num_in_a_row),
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a `state_dict`.

        Raises:
            ValueError: it is no such state.
        """
        names = ("value", "num_good", "num_skipped", "num_in_a_row")
        if not isinstance(state, Mapping) or state.keys() != set(names):
            raise ValueError(f"a state of a loss scale must have {', '.join(names)}, got {state!r}")
        self._state[...] = xp_of(self._state).asarray([state[name] for name in names], np.float32)

    def _count(self, good: bool) -> None:
        value, num_good, num_skipped, num_in_a_row = to_host(self._state).tolist()
        if not good:
            new = (max(value / 2, 1.0), 0, num_skipped + 1, num_in_a_row + 1)
        elif num_good + 1 >= self.growth_steps:  # more, where a run goes on with another number
            new = (min(value * 2, self.most), 0, num_skipped, 0)
        else:
            new = (value, num_good + 1, num_skipped, 0)
        self._state[...] = xp_of(self._state).asarray(new, np.float32)
