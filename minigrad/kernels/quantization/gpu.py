"""Numbers in few bits for float32 on a GPU: a block is read from memory once."""

from __future__ import annotations

import numpy as np

from minigrad.backend import Array, address
from minigrad.kernels.gpu_launch import THREADS, aligned, ceil_div, launch
from minigrad.kernels.quantization import reference

__all__ = ["add_dequantized", "quantize"]

_MOST_IN_BLOCK = 256  # numbers that a warp holds, 8 in each of its threads
_UNIT = 16  # half a block, which lies on the other half in 4 bits, is whole threads


def quantize(x: Array, kept: Array, codes: Array, scales: Array, bits: int, is_float: bool = False) -> None:
    length = kept.size // scales.size
    if not (_has_kernel(length, codes, x) and _has_kernel(length, codes, kept)):
        reference.quantize(x, kept, codes, scales, bits, is_float)
        return
    largest = np.float32(reference.largest_number(bits, is_float))
    kind = np.int32(length), np.int32(bits), np.bool_(is_float)
    _launch("quantize", (x, kept, codes, scales, *kind, largest), scales.size, x.size, aligned(x, kept))


def add_dequantized(codes: Array, scales: Array, bits: int, out: Array, add: bool, is_float: bool = False) -> None:
    length = codes.size * 8 // bits // scales.size
    if not _has_kernel(length, codes, out):
        reference.add_dequantized(codes, scales, bits, out, add, is_float)
        return
    kind = np.int32(length), np.int32(bits), np.bool_(is_float), np.bool_(add)
    _launch("add_dequantized", (codes, scales, out, *kind), scales.size, out.size, aligned(out))


def _has_kernel(length: int, codes: Array, values: Array) -> bool:
    """Return whether a warp can take a block of so many numbers, and write whole words of codes."""
    is_plain = values.dtype == np.float32 and values.flags.c_contiguous and codes.flags.c_contiguous
    return is_plain and length % _UNIT == 0 and 0 < length <= _MOST_IN_BLOCK and address(codes) % 4 == 0


def _launch(name: str, args: tuple[object, ...], num_blocks: int, end: int, vectors: bool) -> None:
    grid = ceil_div(num_blocks * 32, THREADS)
    launch(name, np.dtype(np.float32), grid, (*args, num_blocks, end), vectors=vectors)
