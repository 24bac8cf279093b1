"""What crosses the boundary of two stages: one array or a tuple of arrays, and how it is described in a header."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import Array

_MAX_AXES = 8
_MAX_DTYPE_LETTERS = 8  # of its name, which travels as one integer
MAX_ARRAYS = 8
SPEC_COLUMNS = 2 + _MAX_AXES
BUNDLE_COLUMNS = 2 + MAX_ARRAYS * (1 + SPEC_COLUMNS)


class ArraySpec(NamedTuple):
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @staticmethod
    def of(array: Array) -> ArraySpec:
        """Return the spec of an array."""
        return ArraySpec(array.shape, array.dtype)

    @property
    def is_float(self) -> bool:
        """Whether it can have a gradient."""
        return self.dtype.kind not in "iub"

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    def encode(self) -> Array:
        """Return (10,) int64: dtype name, number of axes, lengths.

        Raises:
            ValueError: there are too many axes, or the dtype's name does not tell all of it.
        """
        name = _name_of(self.dtype)
        if name is None or len(name) > _MAX_DTYPE_LETTERS:
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
    def decode(row: Sequence[int] | Array) -> ArraySpec:
        """Read a spec back from `encode`."""
        code, axes = int(row[0]), int(row[1])
        dtype = np.dtype(code.to_bytes(8, "big").lstrip(b"\0").decode())
        return ArraySpec(tuple(int(n) for n in row[2 : 2 + axes]), dtype)


def _name_of(dtype: np.dtype[Any]) -> str | None:
    """Return a name that NumPy knows the dtype by: `<f4`, or as for ml_dtypes' types `bfloat16`. None: it has none."""
    for name in (dtype.str, dtype.name):
        try:
            if np.dtype(name) == dtype:
                return name
        except TypeError:
            continue
    return None


class Bundle(NamedTuple):
    """What a stage gives to the next one, or the gradients that come back.

    Attributes:
        arrays: one or several.
        returns: for which of them a gradient comes back: floating point tensors, and a floating point array alone.
        is_tuple: whether the layers see a tuple, or the one array itself.
    """

    arrays: tuple[Array, ...]
    returns: tuple[bool, ...]
    is_tuple: bool

    @property
    def spec(self) -> BundleSpec:
        """Describe it."""
        return BundleSpec(tuple(ArraySpec.of(array) for array in self.arrays), self.returns, self.is_tuple)


class BundleSpec(NamedTuple):
    """Shapes, dtypes and kinds of a `Bundle`."""

    specs: tuple[ArraySpec, ...]
    returns: tuple[bool, ...]
    is_tuple: bool

    @property
    def gradients(self) -> BundleSpec:
        """Describe what comes back."""
        specs = tuple(spec for spec, comes_back in zip(self.specs, self.returns, strict=True) if comes_back)
        return BundleSpec(specs, (False,) * len(specs), True)

    def __str__(self) -> str:
        return ", ".join(map(str, self.specs))

    def encode(self) -> Array:
        """Return (BUNDLE_COLUMNS,) int64.

        Raises:
            ValueError: there are too many arrays, or one of them cannot be described; see `ArraySpec.encode`.
        """
        if len(self.specs) > MAX_ARRAYS:
            raise ValueError(f"a stage may give at most {MAX_ARRAYS} arrays to the next, got {len(self.specs)}")
        row = np.zeros(BUNDLE_COLUMNS, np.int64)
        row[:2] = len(self.specs), self.is_tuple
        table = row[2:].reshape(MAX_ARRAYS, 1 + SPEC_COLUMNS)
        for entry, spec, comes_back in zip(table, self.specs, self.returns, strict=False):
            entry[0], entry[1:] = comes_back, spec.encode()
        return row

    @staticmethod
    def decode(row: Array) -> BundleSpec:
        """Read a description back from `encode`."""
        table = row[2:].reshape(MAX_ARRAYS, 1 + SPEC_COLUMNS)[: row[0]]
        specs = tuple(ArraySpec.decode(entry[1:]) for entry in table)
        return BundleSpec(specs, tuple(bool(entry[0]) for entry in table), bool(row[1]))
