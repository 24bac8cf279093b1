"""Update rules and norms of flat arrays for float32, bfloat16 and float16 on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minigrad.backend import Array, address
from minigrad.kernels.gpu_launch import THREADS, aligned, ceil_div, contiguous, cp, launch
from minigrad.kernels.updates import reference

__all__ = ["adamw", "adamw_step", "exact_square_sums", "square_sum"]


_SQUARE_BLOCKS = 1056
_EXACT_BLOCK, _EXACT_THREADS = 1 << 15, 1024  # of gpu.cu
_NORM, _TAKEN, _DONE = 6, 7, 8  # places in `Scalars` of gpu.cu


def square_sum(g: Array) -> float:
    return float(square_parts(g).sum())


def square_parts(*grads: Array) -> Array:
    """Return float64 numbers whose sum is the sum of all squares, in an array that asks the host nothing."""
    parts = cp.empty((max(1, len(grads)), _SQUARE_BLOCKS), np.float64)
    if not grads:
        parts.fill(0)
    for row, g in zip(parts, grads, strict=False):
        if g.dtype == np.float32 and g.flags.c_contiguous:
            launch("square_sum", g.dtype, _SQUARE_BLOCKS, (g, row, g.size), vectors=aligned(g))
        else:
            row.fill(0)
            row[0] = cp.square(g.astype(np.float64)).sum()
    return parts.reshape(-1)


def exact_square_sums(g: Array) -> list[float]:
    if g.dtype != np.float32:
        return reference.exact_square_sums(g)
    g = contiguous(g)
    sums = cp.empty((ceil_div(g.size, _EXACT_BLOCK), 3), np.float64)
    if g.size:
        launch("exact_square_sums", g.dtype, len(sums), (g, sums, g.size), threads=_EXACT_THREADS, vectors=aligned(g))
    parts: list[float] = sums.get().reshape(-1).tolist()
    return parts


def adamw(
    w: Array, g: Array, m: Array, v: Array, beta1: float, beta2: float, rate: float, eps: float, keep: float
) -> None:
    if any(x.dtype != np.float32 or not x.flags.c_contiguous for x in (w, g, m, v)) or not w.size:
        reference.adamw(w, g, m, v, beta1, beta2, rate, eps, keep)
        return
    scalars = cp.asarray(np.array([0, 0, rate, eps, 1 - keep, 1, 0, 1, 0], np.float32))
    starts, kinds = cp.zeros(1, np.int64), cp.ones(1, np.uint8)
    _adamw(w, g, m, v, None, scalars, starts, kinds, beta1, beta2, follows=False)


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
    *,
    follows: bool,
) -> None:
    dtype = w.dtype if copy is None else copy.dtype
    vectors = aligned(w, g, m, v) and (copy is None or address(copy) % 8 == 0)
    target = np.uintp(0) if copy is None else copy
    runs = np.int32(len(starts))
    args = (w, g, m, v, target, scalars, starts, kinds, runs, np.float32(beta1), np.float32(beta2), follows, w.size)
    launch("adamw", dtype, ceil_div(ceil_div(w.size, 4), THREADS), args, vectors=vectors)


class AdamWStep:
    """Whole steps of AdamW: the norm of all gradients, and one launch for each flat. See `reference.adamw_step`.

    What changes from step to step lies on the device, so that a captured step can be replayed with other numbers. It
    decides there whether a step is taken, and counts those that were.
    """

    def __init__(
        self,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_norm: float | None,
        loss_scale: Any,
    ) -> None:
        self._betas = betas
        self._constants = (*map(np.float32, (*betas, eps, weight_decay)),)
        self._max_norm = max_norm
        self._scalars = cp.array([0, 0, 0, 0, 0, 0, 0, 1, 0], np.float32)  # `Scalars` in gpu.cu
        self._num_launched = 0
        self._num_missed = 0  # as far as the host knows
        if loss_scale is None:
            self._scale = (np.uintp(0), np.float32(0), np.float32(0))
        else:
            state = loss_scale.move_to(self._scalars)
            self._scale = (state, np.float32(loss_scale.growth_steps), np.float32(loss_scale.most))
        self._runs: dict[Any, tuple[Array, Array]] = {}

    def advance(self, lr: float, step: int) -> None:
        """Tell the device the learning rate of the next step, and how many were taken before, as the host knows."""
        before = step - (self._num_launched - self._num_missed)  # of another run: the device counts its own
        self._scalars[:2].set(np.array([lr, before], np.float32), stream=cp.cuda.get_current_stream())
        self._num_launched += 1

    def prepare(self, grads: Sequence[Array], add_up: Callable[[Array], None] | None = None) -> None:
        """Make the numbers of this step, of all gradients where it clips by them."""
        squares = square_parts(*(g for g in grads if g.size))
        if add_up is not None:
            squares = squares.sum(keepdims=True)
            add_up(squares)
        limit = np.float32(np.inf if self._max_norm is None else self._max_norm)
        args = (squares, squares.size, self._scalars, *self._scale, *self._constants, limit)
        launch("prepare", self._scalars.dtype, 1, args)

    def update(
        self,
        w: Array,
        g: Array,
        m: Array,
        v: Array,
        copy: Array | None,
        kinds: tuple[tuple[int, int], ...],
        *,
        follows: bool = False,
    ) -> None:
        """Update one part by the numbers of this step.

        Args:
            follows: take over first what somebody assigned to the copy, which is what others see of w.
        """
        if not w.size:  # a shard of a bucket with fewer numbers than ranks
            return
        if kinds not in self._runs:
            lengths, codes = zip(*kinds, strict=True)
            starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
            self._runs[kinds] = cp.asarray(starts), cp.asarray(codes, np.uint8)
        _adamw(w, g, m, v, copy, self._scalars, *self._runs[kinds], *self._betas, follows=follows)

    def norm(self) -> float:
        """Return the norm of all gradients before clipping, as of the last step; asks the device."""
        return float(self._scalars[_NORM])

    def outcome(self) -> tuple[bool, int]:
        """Return whether the last step was taken, and how many were not since this was last asked; asks the device."""
        taken, num_done = self._scalars[_TAKEN : _DONE + 1].get().tolist()
        num_missed = self._num_launched - int(num_done) - self._num_missed
        self._num_missed += num_missed
        return bool(taken), num_missed


def adamw_step(
    betas: tuple[float, float], eps: float, weight_decay: float, max_norm: float | None, loss_scale: Any
) -> AdamWStep:
    return AdamWStep(betas, eps, weight_decay, max_norm, loss_scale)
