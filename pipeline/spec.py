"""Spec: shape and dtype of an array, as they travel in a header."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import Array

_MAX_AXES = 8
_MAX_DTYPE_LETTERS = 8  # of its name, which travels as one integer
SPEC_COLUMNS = 2 + _MAX_AXES


class Spec(NamedTuple):
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @staticmethod
    def of(array: Array) -> Spec:
        """Return the spec of an array."""
        return Spec(array.shape, array.dtype)

    @property
    def is_float(self) -> bool:
        """Whether gradients travel back."""
        return self.dtype.kind not in "iub"

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    def encode(self) -> Array:
        """Return (10,) int64: dtype name, number of axes, lengths.

        Raises:
            ValueError: there are too many axes, or the dtype's name does not tell all of it.
        """
        name = self.dtype.str
        if len(name) > _MAX_DTYPE_LETTERS or np.dtype(name) != self.dtype:
            raise ValueError(
                f"an array between stages needs a plain dtype, with a name of at most {_MAX_DTYPE_LETTERS} letters, "
                f"got {self.dtype}"
            )
        if len(self.shape) > _MAX_AXES:
            raise ValueError(f"an array between stages may have at most {_MAX_AXES} axes, got shape {self.shape}")
        row = np.zeros(SPEC_COLUMNS, np.int64)
        row[0] = int.from_bytes(name.encode(), "big")
        row[1] = len(self.shape)
        row[2 : 2 + len(self.shape)] = self.shape
        return row

    @staticmethod
    def decode(row: Sequence[int] | Array) -> Spec:
        """Read a spec back from `encode`."""
        code, axes = int(row[0]), int(row[1])
        dtype = np.dtype(code.to_bytes(8, "big").lstrip(b"\0").decode())
        return Spec(tuple(int(n) for n in row[2 : 2 + axes]), dtype)
