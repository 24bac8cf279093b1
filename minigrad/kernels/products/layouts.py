"""Matrices as cuBLASLt sees them, and what tells one kind of product from another."""

from __future__ import annotations

from typing import NamedTuple

from minigrad.backend import Array, address

_ALIGNMENT_BYTES = 256  # more than this no algorithm asks for


class Layout(NamedTuple):
    """How cuBLASLt sees an array: a matrix, or a stack of them."""

    dtype: str
    rows: int  # of the array whose rows lie one after the other, which is the transpose where `transposed`
    columns: int
    stride: int
    transposed: bool
    num_stacked: int
    stack_stride: int
    alignment: int

    @property
    def num_elements(self) -> int:
        """From the first one to the last, with what lies between."""
        return (self.num_stacked - 1) * self.stack_stride + (self.rows - 1) * self.stride + self.columns

    @staticmethod
    def of(x: Array) -> Layout:
        (rows, columns), (by_row, by_column), size = x.shape[-2:], x.strides[-2:], x.itemsize
        pointer, stack = address(x), (1, 0) if x.ndim == 2 else (len(x), x.strides[0] // size)
        transposed = not ((by_column == size or columns == 1) and (by_row >= columns * size or rows == 1))
        if transposed:
            rows, columns, by_row = columns, rows, by_column
        stride = max(columns, by_row // size) if rows > 1 else columns
        return Layout(
            x.dtype.name, rows, columns, stride, transposed, *stack, min(_ALIGNMENT_BYTES, pointer & -pointer)
        )


class Kind(NamedTuple):
    """All that an algorithm is chosen by; operands in cuBLASLt's order."""

    first: Layout
    second: Layout
    added: Layout
    target: Layout
    epilogue: int

    @property
    def num_multiplications(self) -> int:
        inner = self.first.columns if self.first.transposed else self.first.rows
        return self.target.num_stacked * self.target.rows * self.target.columns * inner


class Arrays(NamedTuple):
    """What one product reads and writes."""

    first: Array
    second: Array
    added: Array
    target: Array
    bias: Array | None
    before_gelu: Array | None


def lines_up(x: Array) -> bool:
    """Return whether matrices have contiguous rows or columns that do not overlap, as cuBLASLt needs them."""
    (rows, columns), (by_row, by_column), size = x.shape[-2:], x.strides[-2:], x.itemsize
    by_rows = (by_column == size or columns == 1) and (by_row >= columns * size or rows == 1)
    by_columns = (by_row == size or rows == 1) and (by_column >= rows * size or columns == 1)
    return bool((by_rows or by_columns) and all(stride % size == 0 for stride in x.strides))
