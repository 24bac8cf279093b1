"""How values of several ranks become one: which operations and dtypes, in which order, and with which rounding.

Sums are taken in rank order, ((r0 + r1) + r2) + ..., wherever this project adds them up itself, so that the bits
depend on the values alone. float16 and bfloat16 are added up in float32 and rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np

from distributed.comm.work import Array
from minigrad.backend import is_half, round_to, widened

_HALVES = ("float16", "bfloat16")  # by name: bfloat16 comes from ml_dtypes, which need not be installed
_BLOCK_ELEMENTS = 1 << 16  # at most 512 KiB: a running sum stays in the cache, and NumPy's calls cost little


class ReduceOp(Enum):
    """How a reduction combines the values of all ranks.

    MEAN is the sum, divided once at the end.
    """

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"


_UFUNCS = {ReduceOp.SUM: np.add, ReduceOp.MEAN: np.add, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}


def is_comparison(op: ReduceOp) -> bool:
    """Return whether an operation picks one of the values.

    Where one of them is nan, that is the result.
    """
    return op in (ReduceOp.MIN, ReduceOp.MAX)


def check_reducible(call: str, dtype: np.dtype[Any], op: ReduceOp) -> None:
    """Refuse a dtype that some communicator could not reduce.

    Raises:
        TypeError: `dtype` is no native number, is complex, or is an integer whose mean is asked for.
    """
    floating = dtype.kind == "f" or (is_half(dtype) and dtype.name in _HALVES)  # a dtype's name takes time to make
    if not (floating or dtype.kind in "iu") or not dtype.isnative:
        raise TypeError(f"{call} reduces native integers and floats, got {dtype}")
    if op is ReduceOp.MEAN and not floating:
        raise TypeError(f"{call} by MEAN needs floats, got {dtype}")


def divide_mean(total: Array, out: Array, op: ReduceOp, size: int) -> Array:
    """Turn the sum over `size` ranks into the result of `op`, in `out`.

    `out` may be `total` itself.
    """
    if op is ReduceOp.MEAN:
        total /= size
    if out is not total:
        out[...] = total
    return out


def combine(parts: Sequence[Array], op: ReduceOp, out: Array) -> Array:
    """Combine what the ranks hold into `out`, in rank order.

    A mean is not divided yet.

    Args:
        parts: (n,) by rank.
        out: (n,) in the dtype of `widened`.
    """
    ufunc = _UFUNCS[op]
    first, *rest = (widened(part) for part in parts)
    if not rest:
        out[...] = first
    for part in rest:
        ufunc(first, part, out=out)
        first = out
    return out


def sum_widely(parts: Sequence[Array], outs: Sequence[Array], dtype: Any) -> None:
    """Add up what the ranks hold in a wider dtype, in rank order, and write it rounded into every array of `outs`.

    Two numbers of the narrow dtype have the same sum without the wider one: rounded twice is rounded once where the
    wider one has at least two bits more than twice as many.

    Args:
        parts: (n,) by rank, each of `dtype` or of the dtype of `outs`.
        outs: see `reduce_in_rank_order`.
        dtype: of the sums.
    Source: Figueroa 1995, When is double rounding innocuous?
    """
    narrow = outs[0].dtype
    if len(parts) == 2 and all(part.dtype == narrow for part in parts):
        reduce_in_rank_order(parts, ReduceOp.SUM, outs)
        return
    first, *rest = parts
    scratch = np.empty(min(first.size, _BLOCK_ELEMENTS), dtype)
    for start in range(0, first.size, _BLOCK_ELEMENTS):
        block = slice(start, start + _BLOCK_ELEMENTS)
        total = scratch[: len(first[block])]
        total[...] = first[block]
        for part in rest:
            total += part[block]
        for out in outs:
            round_to(out[block], total)


def reduce_in_rank_order(parts: Sequence[Array], op: ReduceOp, outs: Sequence[Array]) -> None:
    """Reduce what the ranks hold and write the result into every array of `outs`.

    Args:
        parts: (n,) by rank.
        outs: (n,) arrays of the same dtype; each may be one of `parts`, or none may overlap with them.
    """
    scratch = widened(np.empty(min(parts[0].size, _BLOCK_ELEMENTS), parts[0].dtype))
    for start in range(0, parts[0].size, _BLOCK_ELEMENTS):
        block = slice(start, start + _BLOCK_ELEMENTS)
        total = scratch[: len(parts[0][block])]
        divide_mean(combine([part[block] for part in parts], op, total), total, op, len(parts))
        for out in outs:
            out[block] = total
