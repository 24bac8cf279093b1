"""Reductions as MPI makes them, with what it leaves open settled: half precision, means, and nan.

This file imports no MPI: it is given mpi4py's module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from distributed.comm.mpi.progress import Request, Steps, until_done
from distributed.comm.reduction import ReduceOp, divide_mean, is_comparison
from distributed.comm.work import Array
from minigrad.backend import synchronize, widened, xp_of

Launch: TypeAlias = Callable[[Array, Any], tuple[Request, Array]]  # values, MPI's operation -> its request and result


class MPIReduction:
    """The reductions of one communicator.

    Args:
        mpi: mpi4py.MPI.
        comm: mpi4py's communicator.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self._comm = comm
        self._rank, self._size = comm.Get_rank(), comm.Get_size()

    def allreduce(self, array: Array, op: ReduceOp) -> Steps:
        """Reduce `array` in place."""

        def launch(values: Array, how: Any) -> tuple[Request, Array]:
            return self._comm.Iallreduce(self._mpi.IN_PLACE, values, how), values

        return (yield from self._reduce(array, array, op, launch))

    def reduce_own_slice(self, flat: Array, op: ReduceOp) -> Steps:
        """Reduce this rank's slice of `flat`, in its place."""
        n = flat.size // self._size
        own = flat[self._rank * n : (self._rank + 1) * n]

        def launch(values: Array, how: Any) -> tuple[Request, Array]:
            reduced = np.empty(n, values.dtype)  # MPI forbids that the slice itself, part of the input, is the output
            return self._comm.Ireduce_scatter_block(values, reduced, how), reduced

        return (yield from self._reduce(flat, own, op, launch))

    def _reduce(self, array: Array, out: Array, op: ReduceOp, launch: Launch) -> Steps:
        """Let MPI combine the values of all ranks, and write the result of `op` into `out`."""
        values = widened(array)
        if values is not array:
            synchronize(values)
        how, is_nan = self._mpi.SUM, None
        if is_comparison(op):
            how = self._mpi.MIN if op is ReduceOp.MIN else self._mpi.MAX
            if values.dtype.kind == "f":
                # Whether a comparison sees nan, each MPI decides for itself. It wins here, as in np.maximum.
                flags = xp_of(values).isnan(values.reshape(-1))
                synchronize(flags)
                is_nan = launch(flags, self._mpi.LOR)
        request, total = launch(values, how)
        yield from until_done(request, total)
        if is_nan is not None:
            total.reshape(-1)[(yield from until_done(*is_nan))] = np.nan
        return divide_mean(total, out, op, self._size)
