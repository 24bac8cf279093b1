"""Rows of a table, looked up by ids, for float32 and float64 on a CPU, compiled by numba."""

from __future__ import annotations

import numpy as np

from minigrad.backend import Array
from minigrad.kernels.compiling import EXACT, compiled, contiguous
from minigrad.kernels.embedding import reference

__all__ = ["embedding_dtable"]


@compiled(EXACT)
def _add_rows(g: Array, ids: Array, dtable: Array) -> None:
    m, n = g.shape
    for i in range(m):
        row = dtable[ids[i]]
        for j in range(n):
            row[j] += g[i, j]


def embedding_dtable(g: Array, ids: Array, out: Array, add: bool) -> None:
    if out.dtype != g.dtype or not out.flags.carray:
        reference.embedding_dtable(g, ids, out, add)
        return
    if not add:
        out[...] = 0
    _add_rows(contiguous(g), contiguous(ids.astype(np.int64, copy=False)), out)
