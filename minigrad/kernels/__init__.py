"""The few loops in which the time of a step goes, each under one name, in one folder a family, in one file a device.

    norms/reference.py    in NumPy's words: for NumPy and CuPy arrays of any floating dtype
    norms/cpu.py          the same names for float32 and float64 on a CPU, one pass each, compiled by numba
    norms/gpu.py          the same for float32, bfloat16 and float16 on a GPU: gpu.cu, cuBLASLt, cuDNN's attention

and so for activations, softmax, attention, losses, embedding, decoding, products, updates and quantization.
`reference.py`, `cpu.py` and `gpu.py` of this folder put each device's families together.

A kernel is a plain function on arrays; it knows neither the tape nor parameters. The docstrings of the references are
the contract. An op asks once, in its forward, and its vjps use the same table, so what a forward keeps
for its backward is a matter between two kernels of one file:

    kernels = kernels_of(x, gain, bias)
    y, mean, inverse = kernels.layer_norm(x, gain, bias, eps)

MINIGRAD_KERNELS=numpy keeps to the reference; without numba it is all there is.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from minigrad.backend import Array, is_half, uses_tf32, xp_of
from minigrad.kernels import reference

_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
_GPU_DTYPES = (np.dtype(np.float32),)  # and those of half precision
# Elements from which a call of a compiled kernel is worth it. Who computes with fewer never waits for numba's import.
_LARGE = 4096


def kernels_of(x: Array, *others: Array) -> Any:
    """Return the kernels for floating point arrays that meet in one op: every name of `reference.py`.

    Which ones depends on the type of the arrays, on their dtypes and on the size of the first alone, so that the same
    arrays give the same bits on every rank and in every run.
    """
    if type(x) is not np.ndarray:
        return _of_gpu_arrays(x, *others)
    return _REFERENCE if x.size < _LARGE else _of_large_arrays(x, *others)


def _of_large_arrays(x: Array, *others: Array) -> Any:
    """Return the kernels for an array of NumPy's that is worth a call of a compiled one."""
    if x.dtype not in _DTYPES:
        return _REFERENCE
    for other in others:
        if type(other) is not np.ndarray or other.dtype != x.dtype:
            return _REFERENCE
    return _cpu()


def kernels_of_runs(x: Array, *others: Array) -> Any:
    """Return the kernels for runs of larger arrays, which a caller goes through piece by piece: an optimizer's.

    Of a large array the short runs get the compiled ones too. Only for kernels that have the bits of the reference:
    how memory is cut into runs changes no number.
    """
    if type(x) is not np.ndarray or x.size >= _LARGE or getattr(x.base, "nbytes", 0) < 16 * _LARGE * x.itemsize:
        return kernels_of(x, *others)
    return _of_large_arrays(x, *others)  # what it is a view of may be bytes: memory that ranks share


def _of_gpu_arrays(*arrays: Any) -> Any:
    """Return the kernels for arrays of which the first is none of NumPy's."""
    dtype = getattr(arrays[0], "dtype", None)
    if dtype not in _GPU_DTYPES and not (dtype is not None and is_half(dtype)):
        return _REFERENCE
    if any(xp_of(x) is np or x.dtype != dtype for x in arrays):
        return _REFERENCE
    return _gpu()


@contextmanager
def replaced(name: str, replacement_of: Callable[[Any], Any]) -> Iterator[None]:
    """Let something else stand for a kernel of the CPU in every thread, to watch it.

    Args:
        replacement_of: given the kernel of a table, returns what takes its place.
    """
    tables = [_REFERENCE, _cpu()] if _cpu() is not _REFERENCE else [_REFERENCE]
    before = [getattr(table, name) for table in tables]
    try:
        for table, kernel in zip(tables, before, strict=True):
            setattr(table, name, replacement_of(kernel))
        yield
    finally:
        for table, kernel in zip(tables, before, strict=True):
            setattr(table, name, kernel)


def describe() -> str:
    """Return which kernels large arrays on the CPU get, and why if it is the reference: for a start line."""
    reason = _why_reference()
    return f"NumPy kernels ({reason})" if reason else "numba kernels"


def describe_gpu() -> str:
    """Return what GPU arrays get that machines differ in: for a start line."""
    from minigrad.kernels.attention import cudnn_attention

    reason = cudnn_attention.why_not()
    attention = f"products ({reason})" if reason else "cuDNN"
    half = f"half precision attention by {attention}"
    return half + (", float32 products and attention in TF32" if uses_tf32() else "")


def _why_reference() -> str:
    choice = os.environ.get("MINIGRAD_KERNELS", "")
    if choice not in ("", "numba", "numpy"):
        raise ValueError(f"MINIGRAD_KERNELS must be numba or numpy, got {choice!r}")
    if choice == "numpy":
        return "MINIGRAD_KERNELS=numpy"
    return "" if importlib.util.find_spec("numba") else "numba is not installed"


@functools.cache
def _cpu() -> SimpleNamespace:
    """Return the kernels of large arrays on the CPU."""
    if _why_reference():
        return _REFERENCE
    try:
        from minigrad.kernels import cpu
    except ImportError as error:  # numba itself says so when it is too old for this NumPy
        warnings.warn(f"numba is installed but does not work, so NumPy's kernels are used: {error}", stacklevel=2)
        return _REFERENCE
    return _table(cpu)


@functools.cache
def _gpu() -> SimpleNamespace:
    """Return the kernels of CuPy arrays."""
    if os.environ.get("MINIGRAD_KERNELS") == "numpy":
        return _REFERENCE
    from minigrad.kernels import gpu

    return _table(gpu)


def _table(module: ModuleType) -> SimpleNamespace:
    """Return the kernels of a device's module, and for names that it lacks the reference."""
    return SimpleNamespace(**names(reference) | names(module))


def names(module: ModuleType) -> dict[str, Any]:
    """Return the kernels of `reference`, `cpu` or `gpu` by name."""
    return {name: kernel for name, kernel in vars(module).items() if not name.startswith("_")}


_REFERENCE = _table(reference)
