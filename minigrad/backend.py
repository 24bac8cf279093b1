"""NumPy or CuPy: which array module the data at hand belongs to, and how data moves.

The only importer of cupy, and only when somebody moves data to a GPU: a machine
without it never notices. Ops ask `xp_of(x)` and write the same code for both.
"""

from __future__ import annotations

import ctypes
import os
import sys
from types import ModuleType
from typing import Any

import numpy as np

DEVICES = ("cpu", "cuda")
_NO_MEMORY = 2  # of CUDA's errors
Array = np.ndarray[Any, Any]  # CuPy's ndarray has the same methods; its stubs are not needed to check ours


def xp_of(array: object) -> ModuleType:
    """Return the module, numpy or cupy, whose functions work on `array`."""
    if type(array) is np.ndarray:
        return np
    cupy = sys.modules.get("cupy")  # an array of CuPy cannot exist before CuPy is imported
    return cupy if cupy is not None and isinstance(array, cupy.ndarray) else np


def is_half(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is float16 or bfloat16."""
    return dtype.itemsize == 2 and dtype.kind in "fV"


def widened(array: Array) -> Array:
    """Return `array`, in float32 if it is of half precision.

    float16 ends at 65504, which sums and squares soon reach.
    """
    return array.astype(np.float32) if is_half(array.dtype) else array


def to_host(array: Array) -> Array:
    """Return `array` as a NumPy array: itself, or a copy from the GPU."""
    xp = xp_of(array)
    return array if xp is np else xp.asnumpy(array)


def to_device(array: Array) -> Array:
    """Return `array` as a CuPy array on the current GPU.

    Raises:
        ModuleNotFoundError: CuPy is not installed.
    """
    return cupy().asarray(array)


def place(array: Array, device: str) -> Array:
    """Return `array` on a device.

    Raises:
        ValueError: device is neither "cpu" nor "cuda".
    """
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    return to_device(array) if device == "cuda" else to_host(array)


def beside(array: Array, values: Array) -> Array:
    """Return values where an array is: on its GPU, or on the host."""
    return place(values, "cpu" if xp_of(array) is np else "cuda")


def use_gpu(index: int) -> None:
    """Make a GPU the current one of this process: number `index`, modulo how many there are.

    Raises:
        ModuleNotFoundError: CuPy is not installed.
        ValueError: CuPy finds no GPU.
    """
    cuda = cupy().cuda
    try:
        num_gpus = cuda.runtime.getDeviceCount()
    except cuda.runtime.CUDARuntimeError as error:
        raise ValueError(f"CuPy finds no GPU: {error}") from error
    cuda.Device(index % num_gpus).use()


def gpu_name() -> str:
    """Return what the current GPU calls itself: `NVIDIA H100 80GB HBM3`."""
    cuda = cupy().cuda
    return str(cuda.runtime.getDeviceProperties(cuda.Device().id)["name"].decode())


def gpu_capability() -> tuple[int, int]:
    """Return the compute capability of the current GPU: (9, 0) of an H100."""
    major, minor = divmod(int(cupy().cuda.Device().compute_capability), 10)
    return major, minor


def gpu_bus_id() -> str:
    """Return what tells the current GPU from all others of this host.

    Together with the host's name it is one of all GPUs of the job.
    """
    import platform

    cuda = cupy().cuda
    return f"{platform.node()} {cuda.runtime.deviceGetPCIBusId(cuda.Device().id)}"


def cupy() -> Any:
    """Return the module.

    Raises:
        ModuleNotFoundError: CuPy is not installed.
    """
    try:
        import cupy as module
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "GPU arrays need CuPy: pip install cupy-cuda12x (or cupy-cuda13x), or with all that a GPU wants "
            "pip install '.[cuda12]' (or cuda13) in the project's folder"
        ) from error
    return module


def nccl_module() -> Any:
    """Return CuPy's door to NCCL, or None where NCCL is not installed."""
    cupy()
    try:
        from cupy.cuda import nccl
    except ImportError:
        return None
    return nccl if nccl.available else None


def cuda_library(name: str) -> Any:
    """Return one of CUDA's libraries, `cublasLt` or `cudart`, for calls that CuPy does not offer."""
    from cuda.pathfinder import load_nvidia_dynamic_lib  # comes with CuPy, and finds what CuPy loads

    return ctypes.CDLL(load_nvidia_dynamic_lib(name).abs_path)


def uses_tf32() -> bool:
    """Return whether products of float32 on a GPU are in TF32.

    CUPY_TF32=1 says so, to CuPy too.
    """
    return os.environ.get("CUPY_TF32", "0") not in ("", "0")


def synchronize(array: Array) -> None:
    """Wait until the kernels that write `array` are done; nothing to do on the CPU."""
    xp = xp_of(array)
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()


def memory_range(array: Array) -> tuple[int, int]:
    """Return the (first, one past the last) byte address that `array` may touch."""
    if xp_of(array) is np:
        if not array.flags.c_contiguous:
            return np.lib.array_utils.byte_bounds(array)
        start: int = array.__array_interface__["data"][0]
        return start, start + array.nbytes
    first = address(array)
    if not array.size:
        return first, first
    ways = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]  # below 0 of a flipped axis
    return first + sum(way for way in ways if way < 0), first + sum(way for way in ways if way > 0) + array.itemsize


def round_to(out: Array, values: Array) -> None:
    """Write values of a wider dtype into `out`, rounded; what is too large is infinite."""
    with np.errstate(over="ignore"):
        out[...] = values


def outside_pools(size: int, dtype: Any) -> Array:
    """Return an uninitialised array on the current GPU, (size,), in memory of no pool.

    Where the GPU has none left, CuPy's own pool gives back what nobody uses.

    Raises:
        MemoryError: it has none even then.
    """
    module = cupy()
    error_type = module.cuda.runtime.CUDARuntimeError
    with module.cuda.using_allocator(None):
        try:
            return module.empty(size, dtype)
        except error_type as error:
            if error.status != _NO_MEMORY:
                raise
        module.get_default_memory_pool().free_all_blocks()
        try:
            return module.empty(size, dtype)
        except error_type as error:
            if error.status != _NO_MEMORY:
                raise
            num_bytes = size * np.dtype(dtype).itemsize
            raise MemoryError(f"the GPU has no room for {num_bytes:,} bytes outside of CuPy's pools") from error


def address(array: Array) -> int:
    """Return where in the memory of its GPU an array begins."""
    return int(array.data.ptr)  # type: ignore[attr-defined]


def scatter_add_rows(target: Array, rows: Array, values: Array) -> None:
    """Add `values[i]` to `target[rows[i]]`, repeated rows too.

    Args:
        target: (V, ...) changed in place.
        rows: (N,) integers in [0, V).
        values: (N, ...).
    """
    xp = xp_of(target)
    if xp is not np:
        xp.add.at(target, rows, values)
    elif rows.size:
        # One reduction per distinct row, after a stable sort: np.add.at is several times slower.
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        target[ordered[starts]] += np.add.reduceat(values[order], starts, axis=0)


def _keep_freed_memory() -> None:
    """Tell glibc to reuse freed blocks instead of returning them to the system.

    A training step allocates and frees the same large arrays again and again. By default
    glibc maps and unmaps each of them, and the page faults cost a quarter of a small step.
    Other C libraries do not know these calls: then nothing happens. MINIGRAD_MALLOC=default
    leaves the allocator alone. Source: mallopt(3).
    """
    if os.environ.get("MINIGRAD_MALLOC") == "default" or not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_mmap_threshold, 1 << 30)
        mallopt(m_trim_threshold, 2**31 - 1)


_keep_freed_memory()
