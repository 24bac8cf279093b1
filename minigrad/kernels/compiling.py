"""How numba compiles a kernel for the CPU: at its first call, or once a machine.

A kernel of a `cpu.py` is a loop and a function around it, which makes room for the result and brings the arrays into
the one layout that the loop takes: contiguous. What numba compiles is kept on disk, beside the loop's file or in the
user's cache folder, so that it costs seconds once a machine and milliseconds a process.

Two things to know about numba: a number that stands in a loop is a float64, and widens all that it meets, so constants
are brought to the dtype of the data first (`T(0.5)`); and sums may be reordered only where that is allowed (`SUMS`).
No flag lets the compiler assume that there are no nan and no infinity.
"""

from __future__ import annotations

import fcntl
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# With colours for its errors, numba lets colorama (where that is installed) write codes to stdout as a program ends.
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")

import numba
import numpy as np
from llvmlite import binding
from numba.core import codegen, sigutils
from numba.extending import overload

from minigrad.backend import Array

EXACT: set[str] = set()  # each operation rounded by itself, as NumPy does
FUSED = {"contract"}  # products and sums fused
SUMS = {"reassoc", "contract"}  # that, and sums in an order that vectors like


def _take_whole_vectors() -> None:
    """Let LLVM use vectors of 512 bits where there are some: by itself it takes 256, and GELU takes 1.5 times as long.

    It is wary of processors whose clock falls with wide vectors. BLAS, whose products are most of a step, uses them
    anyway. This is for all that numba compiles in the process from now on.
    """
    config: Any = codegen.config
    features = codegen.get_host_cpu_features()
    if config.CPU_FEATURES is None and "+avx512f" in features.split(","):
        config.CPU_FEATURES = f"{features},-prefer-256-bit"


_take_whole_vectors()
_SHARED_STAMP = [(path.name, path.stat().st_mtime_ns) for path in sorted(Path(__file__).parent.glob("*.py"))]


def compiled(flags: set[str]) -> Callable[[Callable[..., Any]], Any]:
    """Let numba compile a loop at its first call, or fetch what it compiled in an earlier process."""
    options: dict[str, Any] = {"fastmath": flags, "error_model": "numpy", "nogil": True}

    def decorate(loop: Callable[..., Any]) -> Callable[..., Any]:
        try:
            dispatcher: Any = numba.njit(cache=True, **options)(loop)
        except RuntimeError:  # no folder that can be written to
            _warn_of_no_cache()
            dispatcher = numba.njit(**options)(loop)
        _keep_with_shared_files(dispatcher)
        compile_loop = dispatcher.compile

        def compile_in_turn(signature: Any) -> Any:
            with _turn(dispatcher.stats.cache_path):
                return compile_loop(signature)

        dispatcher.compile = compile_in_turn
        return dispatcher

    return decorate


def _keep_with_shared_files(dispatcher: Any) -> None:
    """Let what is kept on disk be out of date also when a file changes whose functions loops of other files inline.

    numba looks at the loop's own file only.
    """
    index = getattr(dispatcher._cache, "_cache_file", None)  # None where nothing is kept
    if index is not None:
        index._source_stamp = (index._source_stamp, *_SHARED_STAMP)


def _warn_of_no_cache() -> None:
    warnings.warn(
        "numba finds no folder to keep compiled kernels in, so every process compiles them again: "
        "set NUMBA_CACHE_DIR, or MINIGRAD_KERNELS=numpy to do without",
        RuntimeWarning,
        stacklevel=1,
    )


@contextmanager
def _turn(folder: str | None) -> Iterator[None]:
    """Hold the lock of a cache folder: ranks that start together compile in turn, and the second finds it done.

    numba itself writes whole files only, but two processes may give two kernels the same file name.
    """
    try:
        lock = os.open(os.path.join(folder or "", "compiling.lock"), os.O_RDWR | os.O_CREAT) if folder else None
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # a file system without locks
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def inlined(flags: set[str]) -> Callable[[Callable[..., Any]], Any]:
    """Let loops of other files call a function, as part of themselves; the flags are those of its own lines."""
    decorate: Callable[[Callable[..., Any]], Any] = numba.njit(fastmath=flags, error_model="numpy")
    return decorate


def c_function(name: str, address: int, signature: str) -> Any:
    """Return a function of C as a loop calls it.

    Args:
        name: that stands for the address in what is kept on disk, which other processes load with theirs.
        signature: in numba's words, "void(int32, float64)".
    """
    binding.add_symbol(name, address)
    parameters, result = sigutils.normalize_signature(signature)
    return numba.types.ExternalFunction(name, result(*parameters))


def contiguous(x: Array) -> Array:
    """Return x, or a copy, in the layout that the loops are compiled for."""
    return x if x.flags.carray else np.array(x, order="C")


def flattened(x: Array) -> Array:
    return contiguous(x).reshape(-1)


def overloading(stub: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function, given the types of its arguments, choose what stands for a call of `stub` inside a loop."""
    inside: Any = {"fastmath": FUSED, "error_model": "numpy"}
    return overload(stub, jit_options=inside, strict=False)


def is_single(kind: Any) -> bool:
    """Return whether this numba type is float32, or int32, which has the bits of one."""
    return kind in (numba.float32, numba.int32)
