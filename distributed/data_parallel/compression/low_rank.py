"""PowerSGD: of each matrix of gradients only what a few directions show of it is sent, with error feedback.

    M_w    (n, m)   own gradients + kept         Q   (m, r) from the step before, the same on every rank
    P_w  = M_w Q                    --sum-->     P,  whose columns are made orthonormal
    Q_w  = M_w^T P                  --sum-->     Q,  the step's, and where the next one begins
    kept = M_w - P Q_w^T                         P Q^T  is what everybody takes for the sum of all M_w

A matrix of n x m so costs r (n + m) numbers, in two allreduces; biases, gains and small matrices go as they are. One
multiplication by Q a step is a step of the power method: over steps P comes to span the strongest directions.

Ranks compute P's directions and the product each for themselves, from the same numbers: on different CPUs or BLAS
libraries the last bits may differ, and `check_every` would say so.

Source: Vogels, Karimireddy and Jaggi 2019 (arXiv 1905.13727), algorithm 1 (compression) and 2 (error feedback), which
orthogonalize by Gram-Schmidt: a QR factorization here, with the same P P^T, and sound where columns depend on others.
"""

from __future__ import annotations

import math
from itertools import accumulate

import numpy as np

from distributed.comm.communicator import Array, Communicator
from distributed.comm.sequence import MessageSteps, Turn
from distributed.data_parallel.compression.feedback import FeedbackHook, own_buffer
from minigrad import rng
from minigrad.backend import xp_of
from minigrad.flat_range import FlatRange
from minigrad.nn import Buffer
from minigrad.parameter import Parameter


class PowerSGD(FeedbackHook):
    """A comm hook that sends a few columns for each matrix of gradients.

    The difference is kept for the next step. A parameter of more than two axes is a matrix of its first axis by all
    others. Where one gradient of a bucket is not finite on some rank, all of the bucket arrives as nan.

    Args:
        rank: number of columns, r above; 4 by default, as in most of the paper's results.
        seed: of the first directions, the same on every rank.

    Raises:
        ValueError: rank is below 1.
    """

    def __init__(self, rank: int = 4, *, seed: int = 0) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"PowerSGD sends at least 1 column, got {rank}")
        self.rank = rank
        self._seed = seed

    def _new_memory(self, part: FlatRange, rank: int, size: int) -> list[Buffer]:
        error = own_buffer(part, "error", (part.stop - part.start,), rank, size)
        return [error, *(self._first_directions(p, error) for p in part.params if self._is_compressed(p))]

    def _first_directions(self, p: Parameter, like: Buffer) -> Buffer:
        shape = (_as_matrix(p)[1], self.rank)
        drawn = rng.named_generator("powersgd", self._seed, p.name).standard_normal(shape)
        return Buffer(xp_of(like.data).asarray(drawn.astype(like.dtype)), f"{p.name}.powersgd")

    def _is_compressed(self, p: Parameter) -> bool:
        n, m = _as_matrix(p)
        return self.rank * (n + m) < n * m

    def _steps(self, grad: Array, part: FlatRange, kept: list[Buffer], comm: Communicator, turn: Turn) -> MessageSteps:
        error, *directions = kept
        xp = xp_of(grad)
        grad += error.data
        matrices, plain = self._views(grad, part)
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite shows in the sum
            columns = [m @ q.data for m, q in zip(matrices, directions, strict=True)]
        message = _packed([*columns, *plain])
        self._count(message, comm.size)
        summed = yield comm.allreduce(message)
        error.data = xp.zeros_like(grad)
        if not xp.isfinite(summed).all():  # the same on every rank
            yield turn
            turn.take()
            grad[...] = np.nan
            return grad
        arrived = _unpacked(summed, [*columns, *plain])
        bases = [_orthonormal(p) for p in arrived[: len(matrices)]]
        for view, values in zip(plain, arrived[len(matrices) :], strict=True):
            view[...] = values
        own = [m.T @ p for m, p in zip(matrices, bases, strict=True)]
        for missing, m, p, q in zip(self._views(error.data, part)[0], matrices, bases, own, strict=True):
            missing[...] = m - p @ q.T
        yield turn
        turn.take()
        if matrices:
            message = _packed(own)
            self._count(message, comm.size)
            summed = yield self._later.allreduce(message)
            for m, p, q, held in zip(matrices, bases, _unpacked(summed, own), directions, strict=True):
                m[...] = p @ q.T
                held.data = q.copy()
        return grad

    def _views(self, values: Array, part: FlatRange) -> tuple[list[Array], list[Array]]:
        """Return what of a bucket's numbers are compressed matrices, and the rest, parameter by parameter."""
        matrices, plain = [], []
        for p in part.params:
            view = values[p.start - part.start : p.stop - part.start]
            if self._is_compressed(p):
                matrices.append(view.reshape(_as_matrix(p)))
            else:
                plain.append(view)
        return matrices, plain


def _as_matrix(p: Parameter) -> tuple[int, int]:
    """Return the sides of the matrix that a parameter is; a vector has one row."""
    return (p.shape[0], math.prod(p.shape[1:])) if len(p.shape) > 1 else (1, p.size)


def _orthonormal(columns: Array) -> Array:
    """Return (n, r) orthonormal columns that span these."""
    return xp_of(columns).linalg.qr(columns)[0]


def _packed(arrays: list[Array]) -> Array:
    return xp_of(arrays[0]).concatenate([array.reshape(-1) for array in arrays])


def _unpacked(packed: Array, like: list[Array]) -> list[Array]:
    """Return arrays of these shapes."""
    ends = list(accumulate(array.size for array in like))
    return [packed[end - array.size : end].reshape(array.shape) for end, array in zip(ends, like, strict=True)]
