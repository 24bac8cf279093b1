"""Kernels for CuPy arrays of float32, bfloat16 and float16: gpu.cu, cuBLASLt's products and cuDNN's attention.

Nothing here asks the device anything, so a step may be captured in a CUDA graph; `square_sum` alone returns a number.
Kernels are compiled when first called, for one dtype and where they hold a row for one width, and kept on disk by CuPy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minigrad.backend import Array, address, cupy
from minigrad.kernels import cudnn_attention, reference
from minigrad.kernels.cublaslt import CublasLt, lines_up

__all__ = [
    "adamw",
    "adamw_step",
    "add",
    "causal_attention",
    "checked_ids",
    "column_sum",
    "cross_entropy",
    "cross_entropy_dlogits",
    "embedding",
    "embedding_dtable",
    "gelu",
    "gelu_dx",
    "layer_norm",
    "layer_norm_back",
    "layer_norm_dgain",
    "layer_norm_dx",
    "linear",
    "multiply",
    "product",
    "rms_norm_dgain",
    "select",
    "square_sum",
    "sum_parts",
]

SOURCE = Path(__file__).with_name("gpu.cu")
MACROS = {"float32": "-DFLOAT32", "bfloat16": "-DBF16", "float16": "-DF16"}
WIDEST_ROW = 4096  # numbers that a warp holds in registers
_THREADS = 256
_PARTS = 64  # in which the rows of a sum over columns are added up
_FEW_CLASSES = 256  # of which a product with the one-hot matrix sums gradients
_MOST_IDS = 1 << 15  # each of which the kernel compares with all others
_SQUARE_BLOCKS = 1056
_NORM_BLOCKS = 264  # two on each of an H100's multiprocessors
_SHARED_BYTES = 48 << 10  # that a block gets without asking
_NO_TARGET = np.iinfo(np.int32).max  # of an id that is out of range: whatever is looked up with it is nan

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


def _launch(name: str, dtype: Any, blocks: int | tuple[int, ...], args: tuple[Any, ...], **how: Any) -> None:
    """Launch a kernel of gpu.cu on the current stream.

    Args:
        how: `threads` of a block, 256 by default, and `shared_bytes` that it gets; `width` of a row; `vectors`: whether
            16 bytes are read at a time.
    """
    threads = how.get("threads", _THREADS)
    kernel = _kernel(name, dtype.name, how.get("width"), how.get("vectors", True), cp.cuda.Device().id)
    grid = blocks if isinstance(blocks, tuple) else (blocks,)
    kernel(grid, threads if isinstance(threads, tuple) else (threads,), args, shared_mem=how.get("shared_bytes", 0))


def _ceil(n: int, m: int) -> int:
    return -(-n // m)


def _vectors(*arrays: Array) -> bool:
    """Return whether 16 bytes of each array can be read at a time, from its first byte on."""
    return all(address(x) % 16 == 0 for x in arrays)


def _row_vectors(n: int, *arrays: Array) -> bool:
    """Return whether that is so in each row of n numbers."""
    return n % 8 == 0 and _vectors(*arrays)


def _plain(x: Array) -> Array:
    return x if x.flags.c_contiguous else cp.ascontiguousarray(x)  # which makes one number an array of one


def _new_rows(rows: int, columns: int, dtype: Any) -> Array:
    """Return an uninitialised matrix whose rows begin at multiples of 16 bytes: unaligned products are slow."""
    unit = 16 // np.dtype(dtype).itemsize
    return cp.empty((rows, _ceil(columns, unit) * unit), dtype)[:, :columns]


# Products.


@functools.cache
def _products(device: int) -> CublasLt:
    return CublasLt()


def product(a: Array, b: Array, out: Array | None = None, add: bool = False) -> Array:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype or not (a.size and b.size):
        return reference.product(a, b, out, add)
    if out is None:
        out = _new_rows(len(a), b.shape[1], a.dtype)
    if not (out.dtype in (a.dtype, np.float32) and out.strides[1] == out.itemsize and lines_up(out)):
        return reference.product(a, b, out, add)
    _products(cp.cuda.Device().id)(_lined_up(a), _lined_up(b), out, add=add)
    return out


def linear(x: Array, w: Array, b: Array) -> Array:
    if not (x.size and w.size and address(b) % 16 == 0 and b.flags.c_contiguous):
        return reference.linear(x, w, b) if not (x.size and w.size) else product(x, w) + b
    y = _new_rows(len(x), w.shape[1], x.dtype)
    _products(cp.cuda.Device().id)(_lined_up(x), _lined_up(w), y, bias=b)
    return y


def _lined_up(x: Array) -> Array:
    return x if lines_up(x) else _plain(x)


# Sums over columns.


def column_sum(g: Array, out: Array | None = None, add: bool = False) -> Array:
    if not lines_up(g) or (g.shape[1] > 1 and g.strides[1] != g.itemsize):
        g = _plain(g)
    rows, n = g.shape
    stride = g.strides[0] // g.itemsize
    parts = _parts(rows, n)
    vectors = stride % 8 == 0 and _vectors(g)
    grid = (_ceil(n, 256), len(parts))
    if g.size:
        _launch("column_sum", g.dtype, grid, (g, np.int64(stride), parts, rows, n), vectors=vectors)
    return _sum_parts(parts, out, add)


def layer_norm_dgain(g: Array, x: Array, mean: Array, inverse: Array) -> Array:
    return _norm_dgain(g, x, mean, inverse)


def rms_norm_dgain(g: Array, x: Array, inverse: Array) -> Array:
    return _norm_dgain(g, x, np.uintp(0), _plain(inverse).astype(np.float32, copy=False))


def _norm_dgain(g: Array, x: Array, mean: Any, inverse: Array) -> Array:
    g, x = _plain(g), _plain(x)
    rows, n = g.shape
    parts = _parts(rows, n)
    grid = (_ceil(n, 256), len(parts))
    if g.size:
        args = (g, x, mean, inverse, parts, rows, n)
        _launch("norm_dgain", g.dtype, grid, args, vectors=_row_vectors(n, g, x))
    return _sum_parts(parts, None, False)


def _parts(rows: int, n: int) -> Array:
    """Return where parts of a sum over columns go, one for each row of blocks."""
    count = min(_PARTS, max(1, _ceil(rows, 8)))
    return cp.empty((count, n), np.float32) if rows else cp.zeros((1, n), np.float32)


def _sum_parts(parts: Array, out: Array | None, add: bool) -> Array:
    n = parts.shape[1]
    wide = out is not None and out.dtype == np.float32 and out.flags.c_contiguous
    total = out if out is not None and wide else cp.empty(n, np.float32)
    if n:
        args = (parts, total, len(parts), n, np.bool_(add and wide))
        _launch("sum_parts", parts.dtype, _ceil(n, 32), args, threads=(32, 32))
    if out is None or wide:
        return total
    out[...] = out + total if add else total
    return out


# Elementwise.


def add(x: Any, y: Any) -> Array:
    if getattr(x, "shape", None) != getattr(y, "shape", ()) or x.dtype != y.dtype:
        return x + y
    return _elementwise("add", x, y)


def multiply(x: Array, y: Array) -> Array:
    return _elementwise("multiply", x, y) if x.shape == y.shape else x * y


def _elementwise(name: str, x: Array, y: Array) -> Array:
    x, y = _plain(x), _plain(y)
    z = cp.empty_like(x)
    if z.size:
        _launch_elementwise(name, x.dtype, (x, y), (z,), z.size)
    return z


def _launch_elementwise(name: str, dtype: Any, ins: tuple[Any, ...], outs: tuple[Any, ...], n: int) -> None:
    vectors = _vectors(*(x for x in (*ins, *outs) if hasattr(x, "data") and x.dtype == dtype and x.ndim))
    items = n // 8 + n % 8 if vectors else n
    _launch(name, dtype, _ceil(items, _THREADS), (*ins, *outs, n), vectors=vectors)


def select(x: Array, keep: Array, scale: float = 1.0) -> Array:
    x, keep = _plain(x), _plain(keep)
    y = cp.empty_like(x)
    if y.size:
        _launch_elementwise("select", x.dtype, (x, keep, np.float32(scale)), (y,), y.size)
    return y


def gelu(x: Array, exact: bool) -> tuple[Array, Array]:
    x = _plain(x)
    y = cp.empty_like(x)
    if x.size:
        _launch("gelu", x.dtype, _blocks(x.size, x, y), (x, y, np.bool_(exact), x.size), vectors=_vectors(x, y))
    return y, x


def gelu_dx(g: Array, kept: Array, exact: bool) -> Array:
    g = _plain(g)
    dx = cp.empty_like(g)
    if g.size:
        args = (g, kept, dx, np.bool_(exact), g.size)
        _launch("gelu_dx", g.dtype, _blocks(g.size, g, kept, dx), args, vectors=_vectors(g, kept, dx))
    return dx


def _blocks(n: int, *arrays: Array) -> int:
    """Return how many blocks an elementwise kernel needs for n numbers."""
    return _ceil(n // 8 + n % 8 if _vectors(*arrays) else n, _THREADS)


# Rows.


def layer_norm(x: Array, gain: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    rows, n = x.shape
    if n > WIDEST_ROW or not x.size:
        return reference.layer_norm(x, gain, bias, eps)
    x, gain, bias = _plain(x), _plain(gain), _plain(bias)
    y, mean, inverse = cp.empty_like(x), cp.empty((rows, 1), np.float32), cp.empty((rows, 1), np.float32)
    args = (x, gain, bias, y, mean, inverse, rows, np.float32(eps))
    _launch("layer_norm", x.dtype, _ceil(rows, 8), args, width=n, vectors=_row_vectors(n, x, gain, bias))
    return y, mean, inverse


def layer_norm_dx(g: Array, x: Array, mean: Array, inverse: Array, gain: Array) -> Array:
    rows, n = x.shape
    if n > WIDEST_ROW or not x.size:
        return reference.layer_norm_dx(g, x, mean, inverse, gain)
    g, x, gain = _plain(g), _plain(x), _plain(gain)
    dx = cp.empty_like(x)
    args = (g, x, mean, inverse, gain, dx, rows)
    _launch("layer_norm_dx", x.dtype, _ceil(rows, 8), args, width=n, vectors=_row_vectors(n, g, x, gain))
    return dx


def layer_norm_back(
    g: Array, x: Array, mean: Array, inverse: Array, gain: Array
) -> tuple[Array, Array | None, Array | None]:
    rows, n = x.shape
    shared_bytes = _THREADS // 32 * n * 4
    if not x.size or shared_bytes > _SHARED_BYTES:
        return layer_norm_dx(g, x, mean, inverse, gain), None, None
    g, x, gain = _plain(g), _plain(x), _plain(gain)
    dx, blocks = cp.empty_like(x), min(_NORM_BLOCKS, _ceil(rows, 8))
    parts = cp.empty((2, blocks, n), np.float32)
    args = (g, x, mean, inverse, gain, dx, parts[0], parts[1], rows)
    vectors = _row_vectors(n, g, x, dx)
    _launch("layer_norm_back", x.dtype, blocks, args, width=n, vectors=vectors, shared_bytes=shared_bytes)
    return dx, parts[0], parts[1]


def sum_parts(parts: Array, out: Array, add: bool) -> None:
    _sum_parts(parts, out, add)


def checked_ids(what: str, ids: Array, num_rows: int) -> Array:
    return _id_check()(ids, num_rows, _NO_TARGET)


@functools.cache
def _id_check() -> Any:
    code = "y = id >= 0 && id < num_rows ? (int)id : wrong"
    return cp.ElementwiseKernel("T id, int64 num_rows, int32 wrong", "int32 y", code, "checked_ids")


def embedding(table: Array, ids: Array) -> Array:
    num_rows, n = table.shape
    if n > WIDEST_ROW or not ids.size or not n:
        return table.take(cp.minimum(ids, num_rows - 1), axis=0)
    table = _plain(table)
    y = cp.empty((ids.size, n), table.dtype)
    args = (table, ids, y, ids.size, np.int32(num_rows))
    _launch("embedding", y.dtype, _ceil(ids.size, 8), args, width=n, vectors=_row_vectors(n, table, y))
    return y


def embedding_dtable(g: Array, ids: Array, out: Array, add: bool) -> None:
    (rows, n), num_rows = g.shape, len(out)
    if rows and n and num_rows <= _FEW_CLASSES:
        one_hot = _new_rows(rows, num_rows, g.dtype)
        stride = one_hot.strides[0] // one_hot.itemsize
        args = (ids, one_hot, rows, np.int32(num_rows), np.int64(stride))
        _launch("one_hot", g.dtype, _ceil(rows * stride, _THREADS), args)
        product(one_hot.T, g, out, add)
    elif rows and 0 < n <= WIDEST_ROW and rows <= _MOST_IDS and out.dtype == np.float32 and out.flags.c_contiguous:
        g = _plain(g)
        if not add:
            out.fill(0)
        count = np.int32(num_rows)
        _launch(
            "embedding_dtable", g.dtype, _ceil(rows, 8), (ids, g, out, rows, count), width=n, vectors=_row_vectors(n, g)
        )
    else:
        counted = (ids >= 0) & (ids < num_rows)
        reference.embedding_dtable(g * counted[:, None].astype(g.dtype), cp.where(counted, ids, 0), out, add)


def cross_entropy(logits: Array, targets: Array, smoothing: float, weight: float) -> tuple[Array, Array]:
    rows, n = logits.shape
    if not logits.size:
        return reference.cross_entropy(logits, targets, smoothing, weight)
    if logits.strides[1] != logits.itemsize:
        logits = _plain(logits)
    dlogits, losses = _new_rows(rows, n, logits.dtype), cp.empty(rows, np.float32)
    stride, dstride = (x.strides[0] // x.itemsize if rows > 1 else n for x in (logits, dlogits))
    vectors = stride % 8 == dstride % 8 == 0 and _vectors(logits, dlogits)
    targets = targets.astype(np.int32, copy=False)
    arrays = (logits, np.int64(stride), targets, losses, dlogits, np.int64(dstride))
    args = (*arrays, np.int32(n), np.float32(smoothing), np.float32(weight))
    threads = 1024 if n > 4096 else 256 if n > 512 else 32
    _launch("cross_entropy", logits.dtype, rows, args, threads=threads, vectors=vectors)
    return losses, dlogits


def cross_entropy_dlogits(dlogits: Array, g: Array, dtype: Any) -> Array:
    if dlogits.size:
        base = dlogits if dlogits.base is None else dlogits.base  # with what fills up its rows
        blocks = min(_SQUARE_BLOCKS, _ceil(base.size, 8 * _THREADS))
        args = (base, g.astype(np.float32, copy=False), base.size)
        _launch("scale_by", dtype, blocks, args, vectors=_vectors(base))
    return dlogits


def causal_attention(qkv: Array, num_heads: int) -> tuple[Array, Callable[[Array], Array]] | None:
    return cudnn_attention.causal_attention(qkv, num_heads) if cudnn_attention.takes(qkv, num_heads) else None


# Flat arrays of an optimizer.


def square_sum(g: Array) -> float:
    return float(square_parts(g).sum())


def square_parts(g: Array) -> Array:
    """Return float64 numbers whose sum is the sum of squares of g."""
    if g.dtype != np.float32 or not g.flags.c_contiguous:
        return cp.square(g.astype(np.float64)).sum().reshape(1)
    parts = cp.empty(_SQUARE_BLOCKS, np.float64)
    _launch("square_sum", g.dtype, _SQUARE_BLOCKS, (g, parts, g.size), vectors=_vectors(g))
    return parts


def adamw(
    w: Array, g: Array, m: Array, v: Array, beta1: float, beta2: float, rate: float, eps: float, keep: float
) -> None:
    if any(x.dtype != np.float32 or not x.flags.c_contiguous for x in (w, g, m, v)) or not w.size:
        reference.adamw(w, g, m, v, beta1, beta2, rate, eps, keep)
        return
    scalars = cp.asarray(np.array([0, 0, rate, eps, 1 - keep, 1, 0], np.float32))
    starts, kinds = cp.zeros(1, np.int64), cp.ones(1, np.uint8)
    _adamw(w, g, m, v, None, scalars, starts, kinds, beta1, beta2)


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
) -> None:
    dtype = w.dtype if copy is None else copy.dtype
    vectors = _vectors(w, g, m, v) and (copy is None or address(copy) % 8 == 0)
    target = np.uintp(0) if copy is None else copy
    runs = np.int32(len(starts))
    args = (w, g, m, v, target, scalars, starts, kinds, runs, np.float32(beta1), np.float32(beta2), w.size)
    _launch("adamw", dtype, _ceil(_ceil(w.size, 4), _THREADS), args, vectors=vectors)


class AdamWStep:
    """Whole steps of AdamW: the norm of all gradients, and one launch for each flat. See `reference.adamw_step`.

    What changes from step to step lies on the device, so that a captured step can be replayed with other numbers.
    """

    def __init__(self, betas: tuple[float, float], eps: float, weight_decay: float, max_norm: float | None) -> None:
        self._betas = betas
        self._constants = (*map(np.float32, (*betas, eps, weight_decay)),)
        self._max_norm = max_norm
        self._scalars = cp.zeros(7, np.float32)  # `Scalars` in gpu.cu
        self._runs: dict[Any, tuple[Array, Array]] = {}

    def advance(self, lr: float, step: int) -> None:
        """Tell the device the learning rate of the next step, and how many there were before."""
        self._scalars[:2].set(np.array([lr, step], np.float32), stream=cp.cuda.get_current_stream())

    def apply(
        self, parts: Sequence[tuple[Array, Array, Array, Array, Array | None, tuple[tuple[int, int], ...]]]
    ) -> None:
        """Clip, and update every part."""
        grads = [g for _, g, *_ in parts if g.size] if self._max_norm is not None else []
        squares = cp.concatenate([square_parts(g) for g in grads]) if grads else cp.zeros(1, np.float64)
        limit = np.float32(np.inf if self._max_norm is None else self._max_norm)
        args = (squares, squares.size, self._scalars, *self._constants, limit)
        _launch("prepare", self._scalars.dtype, 1, args)
        for w, g, m, v, copy, kinds in parts:
            if kinds not in self._runs:
                lengths, codes = zip(*kinds, strict=True)
                starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
                self._runs[kinds] = cp.asarray(starts), cp.asarray(codes, np.uint8)
            if w.size:
                _adamw(w, g, m, v, copy, self._scalars, *self._runs[kinds], *self._betas)

    def norm(self) -> float:
        """Return the norm of all gradients before clipping, as of the last step; asks the device."""
        return float(self._scalars[6])


def adamw_step(betas: tuple[float, float], eps: float, weight_decay: float, max_norm: float | None) -> AdamWStep:
    return AdamWStep(betas, eps, weight_decay, max_norm)
