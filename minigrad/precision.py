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
from collections.abc import Iterable
from typing import Any

import numpy as np

from minigrad.extras import needs
from minigrad.flat import FlatBuffer
from minigrad.kernels import kernels_of
from minigrad.parameter import Parameter
from minigrad.step_guard import MAX_SKIPPED_IN_A_ROW, StepGuard

PRECISIONS = ("float32", "bfloat16", "float16")
MAX_SCALE = 2.0**24


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
    """Let ops see float32 parameters in this precision from now on; `data` and `grad` stay float32.

    Args:
        params: all that lie in the same flat buffers; those without an owner get one.
    Raises:
        ValueError: there is no such precision, a parameter is not float32, or others share its flat buffer.
    """
    dtype, params = dtype_of(precision), list(params)
    for p in params:
        if p.dtype != np.float32:
            raise ValueError(f"a precision is for float32 parameters, but {p.label} is {p.dtype}")
    chosen = set(params)
    flats = dict.fromkeys(part.flat for part in FlatBuffer.adopt(params))
    for flat in flats:
        for p in flat.params:
            if p not in chosen:
                raise ValueError(f"parameters of one flat buffer have one precision, but {p.label} is left out")
    for flat in flats:
        flat.keep_copy(dtype)


class LossScale(StepGuard):
    """A factor on the loss that keeps float16 gradients away from 0, and from infinity; and the guard of its steps.

        mg.backward(loss * scale.value)
        scale.unscale(params)
        norm = clip_by_global_norm(params, 1.0)
        if scale.update(norm):
            optimizer.step()

    Of several ranks, all must see the same norm: that of the whole model, after gradients were reduced.

    Args:
        max_in_a_row: see `StepGuard`; by default as many more as it takes to halve the largest factor down to 1.

    Attributes:
        value: of the factor now; a power of two from 1 to `MAX_SCALE`, so that it rounds nothing.
        growth_steps: so many good steps in a row double it.
    """

    def __init__(
        self,
        value: float = 2.0**16,
        growth_steps: int = 2000,
        *,
        max_in_a_row: int = MAX_SKIPPED_IN_A_ROW + int(math.log2(MAX_SCALE)),
    ) -> None:
        super().__init__(max_in_a_row)
        self.value = value
        self.growth_steps = growth_steps
        self._num_good = 0

    def unscale(self, params: Iterable[Parameter]) -> None:
        """Divide all gradients by the factor, in place."""
        for part in FlatBuffer.adopt(params):
            grad = part.grad
            kernels_of(grad).scale(grad, 1 / self.value)

    def allows(self, *values: float) -> bool:
        """Return whether a step may be taken, as `StepGuard` does; if not, halve the factor.

        Args:
            values: the norm of the unscaled gradients, infinite or nan where one of them is; the loss.
        """
        good = super().allows(*values)
        self._num_good = self._num_good + 1 if good else 0
        if not good:
            self.value = max(self.value / 2, 1.0)
        elif self._num_good == self.growth_steps:
            self.value, self._num_good = min(self.value * 2, MAX_SCALE), 0
        return good

    def update(self, norm: float) -> bool:
        """Return whether a step may be taken with gradients of this norm, as `allows` does."""
        return self.allows(norm)

    def state_dict(self) -> dict[str, float]:
        """Return what a run needs to go on."""
        return {"value": self.value, "num_skipped": self.num_skipped, "num_good": self._num_good}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a `state_dict`."""
        self.value, self.num_skipped = float(state["value"]), int(state["num_skipped"])
        self._num_good = int(state["num_good"])
