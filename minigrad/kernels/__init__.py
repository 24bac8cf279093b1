"""The few loops in which the time of a step goes, each under one name, in one file a device.

    reference.py    every kernel, in NumPy's words: for NumPy and CuPy arrays of any floating dtype
    cpu.py          the same names for float32 and float64 on a CPU, one pass each, compiled by numba

A kernel is a plain function on arrays; it knows neither the tape nor parameters. The docstrings of `reference.py` are
the contract. An op asks once, in its forward, and its vjps use the same table, so what a forward keeps
for its backward is a matter between two kernels of one file:

    kernels = kernels_of(x, gain, bias)
    y, mean, inverse = kernels.layer_norm(x, gain, bias, eps)
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from minigrad.backend import Array
from minigrad.kernels import reference


def kernels_of(*arrays: Array) -> Any:
    """Return the kernels for floating point arrays that meet in one op: every name of `reference.py`.

    Which ones depends on the type of the arrays and on their dtypes.
    """
    return _REFERENCE


def _table(module: ModuleType) -> SimpleNamespace:
    """Return the kernels of a device's module, and for names that it lacks the reference."""
    return SimpleNamespace(**_names(reference) | _names(module))


def _names(module: ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


_REFERENCE = _table(reference)
