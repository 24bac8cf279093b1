"""Update rules and norms of flat arrays for float32, bfloat16 and float16 on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minigrad.backend import Array, address
from minigrad.kernels.gpu_launch import THREADS, aligned, ceil_div, cp, launch
from minigrad.kernels.updates import reference

__all__ = ["adamw", "adamw_step", "square_sum"]


_SQUARE_BLOCKS = 1056


def square_sum(g: Array) -> float:
    return float(square_parts(g).sum())


def square_parts(g: Array) -> Array:
    """Return float64 numbers whose sum is the sum of squares of g."""
    if g.dtype != np.float32 or not g.flags.c_contiguous:
        return cp.square(g.astype(np.float64)).sum().reshape(1)
    parts = cp.empty(_SQUARE_BLOCKS, np.float64)
    launch("square_sum", g.dtype, _SQUARE_BLOCKS, (g, parts, g.size), vectors=aligned(g))
    return parts


def adamw(
    w: Array, g: Array, m: Array, v: Array, beta1: float, beta2: float, rate: float, eps: float, keep: float
) -> None:
    if any(x.dtype != np.float32 or not x.flags.c_contiguous for x in (w, g, m, v)) or not w.size:
        reference.adamw(w, g, m, v, beta1, beta2, rate, eps, keep)
        return
    scalars = cp.asarray(np.array([0, 0, rate, eps, 1 - keep, 1, 0, 1], np.float32))
    starts, kinds = cp.zeros(1, np.int64), cp.ones(1, np.uint8)
    _adamw(w, g, m, v, None, scalars, starts, kinds, beta1, beta2)


def _adamw(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    copy: Array | None,
    scalars: Array,
    starts: Array,
    kinds: Array,
    beta1: float,
    beta2: float,
) -> None:
    dtype = w.dtype if copy is None else copy.dtype
    vectors = aligned(w, g, m, v) and (copy is None or address(copy) % 8 == 0)
    target = np.uintp(0) if copy is None else copy
    runs = np.int32(len(starts))
    args = (w, g, m, v, target, scalars, starts, kinds, runs, np.float32(beta1), np.float32(beta2), w.size)
    launch("adamw", dtype, ceil_div(ceil_div(w.size, 4), THREADS), args, vectors=vectors)


class AdamWStep:
    """Whole steps of AdamW: the norm of all gradients, and one launch for each flat. See `reference.adamw_step`.

    What changes from step to step lies on the device, so that a captured step can be replayed with other numbers.
    """

    def __init__(self, betas: tuple[float, float], eps: float, weight_decay: float, max_norm: float | None) -> None:
        self._betas = betas
        self._constants = (*map(np.float32, (*betas, eps, weight_decay)),)
        self._max_norm = max_norm
        self._scalars = cp.zeros(8, np.float32)  # `Scalars` in gpu.cu
        self._runs: dict[Any, tuple[Array, Array]] = {}

    def advance(self, lr: float, step: int) -> None:
        """Tell the device the learning rate of the next step, and how many there were before."""
        self._scalars[:2].set(np.array([lr, step], np.float32), stream=cp.cuda.get_current_stream())

    def apply(
        self, parts: Sequence[tuple[Array, Array, Array, Array, Array | None, tuple[tuple[int, int], ...]]]
    ) -> None:
        """Clip, and update every part."""
        grads = [g for _, g, *_ in parts if g.size] if self._max_norm is not None else []
        squares = cp.concatenate([square_parts(g) for g in grads]) if grads else cp.zeros(1, np.float64)
        limit = np.float32(np.inf if self._max_norm is None else self._max_norm)
        args = (squares, squares.size, self._scalars, *self._constants, limit)
        launch("prepare", self._scalars.dtype, 1, args)
        for w, g, m, v, copy, kinds in parts:
            if kinds not in self._runs:
                lengths, codes = zip(*kinds, strict=True)
                starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
                self._runs[kinds] = cp.asarray(starts), cp.asarray(codes, np.uint8)
            if w.size:
                _adamw(w, g, m, v, copy, self._scalars, *self._runs[kinds], *self._betas)

    def norm(self) -> float:
        """Return the norm of all gradients before clipping, as of the last step; asks the device."""
        return float(self._scalars[6])


def adamw_step(betas: tuple[float, float], eps: float, weight_decay: float, max_norm: float | None) -> AdamWStep:
    return AdamWStep(betas, eps, weight_decay, max_norm)
