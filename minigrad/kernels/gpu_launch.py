"""How the kernels of gpu.cu are compiled and launched, and what their families share.

Nothing here asks the device anything, so a step may be captured in a CUDA graph. Kernels are compiled when first
called, for one dtype and where they hold a row for one width, and kept on disk by CuPy.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from minigrad.backend import Array, address, cupy, outside_pools

SOURCE = Path(__file__).with_name("gpu.cu")
MACROS = {"float32": "-DFLOAT32", "bfloat16": "-DBF16", "float16": "-DF16"}
WIDEST_ROW = 4096  # numbers that a warp holds in registers
THREADS = 256
# In so many parts the rows of a sum over columns are added up: as many blocks as an H100 runs at a time, five on each
# multiprocessor, where rows are wide enough for that.
_FEWEST_PARTS, _MOST_PARTS, _PART_BLOCKS = 32, 128, 660
_PART_COLUMNS = 256  # of a block
_MOST_COUNTERS = 1 << 12
try:
    cp: Any = cupy()
except ModuleNotFoundError:  # nobody calls what is here, but it can be read
    cp = None


def compile_options(dtype: str, width: int | None, vectors: bool) -> tuple[str, ...]:
    """Return the flags that gpu.cu is compiled with."""
    row = () if width is None else (f"-DN={width}",)
    return ("-std=c++17", MACROS[dtype], f"-DVECTORS={int(vectors)}", *row)


@functools.cache
def _kernel(name: str, dtype: str, width: int | None, vectors: bool, device: int) -> Any:
    return _module(dtype, width, vectors, device).get_function(name)


@functools.cache
def _module(dtype: str, width: int | None, vectors: bool, device: int) -> Any:
    return cp.RawModule(code=SOURCE.read_text(), options=compile_options(dtype, width, vectors))


def launch(name: str, dtype: Any, blocks: int | tuple[int, ...], args: tuple[Any, ...], **how: Any) -> None:
    """Launch a kernel of gpu.cu on the current stream.

    Args:
        how: `threads` of a block, 256 by default, and `shared_bytes` that it gets; `width` of a row; `vectors`: whether
            16 bytes are read at a time.
    """
    threads = how.get("threads", THREADS)
    kernel = _kernel(name, dtype.name, how.get("width"), how.get("vectors", True), cp.cuda.Device().id)
    grid = blocks if isinstance(blocks, tuple) else (blocks,)
    kernel(grid, threads if isinstance(threads, tuple) else (threads,), args, shared_mem=how.get("shared_bytes", 0))


def ceil_div(n: int, m: int) -> int:
    return -(-n // m)


def aligned(*arrays: Array) -> bool:
    """Return whether 16 bytes of each array can be read at a time, from its first byte on."""
    return all(address(x) % 16 == 0 for x in arrays)


def rows_aligned(n: int, *arrays: Array) -> bool:
    """Return whether that is so in each row of n numbers."""
    return n % 8 == 0 and aligned(*arrays)


def contiguous(x: Array) -> Array:
    return x if x.flags.c_contiguous else cp.ascontiguousarray(x)  # which makes one number an array of one


def new_rows(rows: int, columns: int, dtype: Any) -> Array:
    """Return an uninitialised matrix whose rows begin at multiples of 16 bytes: unaligned products are slow."""
    unit = 16 // np.dtype(dtype).itemsize
    return cp.empty((rows, ceil_div(columns, unit) * unit), dtype)[:, :columns]


def add_up_columns(
    name: str, dtype: Any, inputs: tuple[Any, ...], shape: tuple[int, int], out: Array | None, add: bool, vectors: bool
) -> Array:
    """Launch a kernel that adds up (rows, n) numbers over rows.

    Args:
        name: of the kernel.
        dtype: that it is compiled for.
        inputs: its first arguments.
        shape: rows and n.
        out: where sums are written, or added with `add`; if None a new array.
        vectors: whether 16 bytes are read at a time.
    Returns:
        `out`, or (n,) float32.
    """
    rows, n = shape
    strips = ceil_div(max(1, n), _PART_COLUMNS)
    most = min(_MOST_PARTS, max(_FEWEST_PARTS, _PART_BLOCKS // strips))
    count = min(most, max(1, ceil_div(rows, 8)))
    wide = out is not None and out.dtype == np.float32 and out.flags.c_contiguous
    total = out if out is not None and wide else cp.empty(n, np.float32)
    if not rows and not (wide and add):
        total.fill(0)
    if rows and n:
        device, stream = cp.cuda.Device().id, cp.cuda.get_current_stream().ptr
        done = _counters(device, stream, ceil_div(strips, _MOST_COUNTERS))
        args = (*inputs, cp.empty((count, n), np.float32), done, total, np.bool_(add and wide), rows, n)
        launch(name, dtype, (strips, count), args, vectors=vectors)
    return total if out is None or wide else _landed(total, out, add)


@functools.cache
def _counters(device: int, stream: int, thousands: int) -> Array:
    """Return zeros, in which blocks of one kernel count how many of them are done, and which the last one puts back.

    Kernels of one stream run one after the other. Of no pool: they outlive every graph.
    """
    counters = outside_pools(thousands * _MOST_COUNTERS, np.uint32)
    counters.fill(0)
    return counters


def _landed(total: Array, out: Array, add: bool) -> Array:
    out[...] = out + total if add else total
    return out


def add_up_parts(parts: Array, out: Array, add: bool) -> None:
    """Write the sum of the rows of float32 parts into `out`, or add it."""
    n = parts.shape[1]
    wide = out.dtype == np.float32 and out.flags.c_contiguous
    total = out if wide else cp.empty(n, np.float32)
    if n:
        args = (parts, total, len(parts), n, np.bool_(add and wide))
        launch("sum_parts", parts.dtype, ceil_div(n, 32), args, threads=(32, 32))
    if not wide:
        _landed(total, out, add)


def workspace(num_bytes: int) -> Array:
    """Return memory of the current stream for a library to scribble in.

    Whatever runs on a stream runs one after the other, so all of it has the same. It is of no pool and never given
    back: a graph that was captured on this stream keeps the address.
    """
    blocks = _workspaces(cp.cuda.Device().id, cp.cuda.get_current_stream().ptr)
    found = next((block for block in blocks if block.nbytes >= num_bytes), None)
    if found is None:
        found = outside_pools(num_bytes, np.uint8)
        blocks.append(found)
    return found


@functools.cache
def _workspaces(device: int, stream: int) -> list[Array]:
    return []


def launch_elementwise(name: str, dtype: Any, ins: tuple[Any, ...], outs: tuple[Any, ...], n: int) -> None:
    vectors = aligned(*(x for x in (*ins, *outs) if hasattr(x, "data") and x.dtype == dtype and x.ndim))
    items = n // 8 + n % 8 if vectors else n
    launch(name, dtype, ceil_div(items, THREADS), (*ins, *outs, n), vectors=vectors)


def num_blocks(n: int, *arrays: Array) -> int:
    """Return how many blocks an elementwise kernel needs for n numbers."""
    return ceil_div(n // 8 + n % 8 if aligned(*arrays) else n, THREADS)
