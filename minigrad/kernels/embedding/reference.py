"""Rows of a table, looked up by ids."""

from __future__ import annotations

from minigrad.backend import Array, scatter_add_rows, widened, xp_of
from minigrad.kernels.common import put

__all__ = ["checked_ids", "embedding", "embedding_dtable"]


def checked_ids(what: str, ids: Array, num_rows: int) -> Array:
    """Return (m,) ids for the kernels that take some.

    Raises:
        IndexError: an id is not in [0, num_rows). A GPU cannot be asked in the middle of a step: there whatever is
            looked up with such an id is nan, and so is the loss.
    """
    if ids.size and (ids.min() < 0 or ids.max() >= num_rows):
        raise IndexError(f"{what} must be in [0, {num_rows}), got {ids.min()} to {ids.max()}")
    return ids


def embedding(table: Array, ids: Array) -> Array:
    """Return rows of the table, (m, n), in the order of checked ids."""
    return table.take(ids, axis=0)


def embedding_dtable(g: Array, ids: Array, out: Array, add: bool) -> None:
    """Write into row v of `out` the sum of g[i] where ids[i] == v, or add it.

    Args:
        g: (m, n), ids: (m,) checked, out: (V, n).
    """
    g = widened(g)  # a row may be the sum of thousands
    if out.dtype == g.dtype:
        if not add:
            out[...] = 0
        scatter_add_rows(out, ids, g)
    else:
        dtable: Array = xp_of(g).zeros(out.shape, g.dtype)
        scatter_add_rows(dtable, ids, g)
        put(dtable, out, add)
