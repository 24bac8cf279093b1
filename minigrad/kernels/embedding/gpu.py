"""Rows of a table, looked up by ids, for float32, bfloat16 and float16 on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from minigrad.backend import Array
from minigrad.kernels.embedding import reference
from minigrad.kernels.gpu_launch import (
    THREADS,
    WIDEST_ROW,
    aligned,
    ceil_div,
    contiguous,
    cp,
    launch,
    new_rows,
    rows_aligned,
)
from minigrad.kernels.products.gpu import product

__all__ = ["checked_ids", "embedding", "embedding_dtable"]


_FEW_CLASSES = 256  # of which a product with the one-hot matrix sums gradients
_MOST_IDS = 1 << 15  # each of which the kernel compares with all others
_NO_TARGET = np.iinfo(np.int32).max  # of an id that is out of range: whatever is looked up with it is nan


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
    table = contiguous(table)
    y = cp.empty((ids.size, n), table.dtype)
    args = (table, ids, y, ids.size, np.int32(num_rows))
    launch("embedding", y.dtype, ceil_div(ids.size, 8), args, width=n, vectors=rows_aligned(n, table, y))
    return y


def embedding_dtable(g: Array, ids: Array, out: Array, add: bool) -> None:
    (rows, n), num_rows = g.shape, len(out)
    if rows and n and num_rows <= _FEW_CLASSES:
        one_hot = new_rows(rows, num_rows, g.dtype)
        stride = one_hot.strides[0] // one_hot.itemsize
        args = (ids, one_hot, rows, np.int32(num_rows), np.int64(stride))
        launch("one_hot", g.dtype, ceil_div(rows * stride, THREADS), args)
        product(one_hot.T, g, out, add)
    elif rows and 0 < n <= WIDEST_ROW and rows <= _MOST_IDS and out.dtype == np.float32 and out.flags.c_contiguous:
        g = contiguous(g)
        ids = ids if aligned(ids) else ids.copy()  # it reads four at a time
        if not add:
            out.fill(0)
        count = np.int32(num_rows)
        launch(
            "embedding_dtable",
            g.dtype,
            ceil_div(rows, 8),
            (ids, g, out, rows, count),
            width=n,
            vectors=rows_aligned(n, g),
        )
    else:
        counted = (ids >= 0) & (ids < num_rows)
        reference.embedding_dtable(g * counted[:, None].astype(g.dtype), cp.where(counted, ids, 0), out, add)
