"""The least that the calls of ops need, measured on this machine: their matrix products alone, and their bytes.

    products   each matrix product again, alone, in memory that it has just used: what BLAS needs at best
    bytes      reading each input and writing each output once, as fast as a copy of a large array

What an op takes beyond its products is passes over memory, of which the products' own operands are a part: in a step
they come from further away.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from minigrad import kernels
from minigrad.backend import Array
from minigrad.profiling.calls import Calls, Operand

COPY_BYTES = 64 << 20  # of the array whose copying gives the speed of memory
SECONDS_A_PRODUCT = 0.02  # that are spent on the fastest run of one


def table(calls: Calls) -> Iterator[str]:
    """Yield lines: of each op its times, beside its floors, in milliseconds.

    These are its time forward and backward, and its share.
    """
    products, seconds_a_byte = product_seconds(calls), copy_seconds()
    rows = {
        name: (forward, backward, products.get(name, 0.0), moved * seconds_a_byte)
        for name, (forward, backward, moved) in calls.by_op().items()
    }
    total = sum(forward + backward for forward, backward, *_ in rows.values())
    yield f"{kernels.describe()}; ms; each kind of call at its median"
    yield f"{'':<32}{'forward':>10}{'backward':>10}{'share':>8}{'products':>10}{'bytes':>9}"
    ordered = sorted(rows.items(), key=lambda item: -item[1][0] - item[1][1])
    if rows:
        ordered.append(("all", tuple(map(sum, zip(*rows.values(), strict=True)))))  # type: ignore[arg-type]
    for name, (forward, backward, alone, memory) in ordered:
        share = (forward + backward) / total if total else 0.0
        floors = f"{1e3 * alone:>10.2f}{1e3 * memory:>9.2f}"
        yield f"{name:<32}{1e3 * forward:>10.2f}{1e3 * backward:>10.2f}{share:>8.1%}{floors}"
    elsewhere = calls.wall_seconds - sum(sum(seconds) for seconds in calls.seconds.values())
    yield f"{calls.wall_seconds:.2f} s in all, of which {elsewhere:.2f} s outside of ops and updates"


def product_seconds(calls: Calls) -> dict[str, float]:
    """Return of each op the seconds of its matrix products alone, each at its fastest."""
    seconds: dict[str, float] = defaultdict(float)
    for (op, left, right), count in calls.products.items():
        a, b = _ones(left), _ones(right)
        seconds[op] += count * _fastest(lambda a=a, b=b, out=a @ b: np.matmul(a, b, out))  # type: ignore[misc]
    return seconds


def copy_seconds() -> float:
    """Return the seconds a byte that is read or written takes."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.ones(COPY_BYTES, np.uint8)
    return _fastest(lambda: np.copyto(target, source)) / (2 * COPY_BYTES)


def _fastest(call: Callable[[], object]) -> float:
    best, until = float("inf"), time.perf_counter() + SECONDS_A_PRODUCT
    while True:
        start = time.perf_counter()
        call()
        end = time.perf_counter()
        best = min(best, end - start)
        if end > until:
            return best


def _ones(operand: Operand) -> Array:
    """Return an array as BLAS would see this operand; half precision goes through float32 on the CPU."""
    dtype = operand.dtype if operand.dtype in ("float32", "float64") else "float32"
    if operand.transposed:
        *stack, rows, columns = operand.shape
        return np.ones((*stack, columns, rows), dtype).swapaxes(-1, -2)
    return np.ones(operand.shape, dtype)
