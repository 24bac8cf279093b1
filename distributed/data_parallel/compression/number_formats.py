"""How numbers travel in few bits: each format packs them, and adds up what is packed.

Numbers go in blocks of at most 256 with a scale each, four bytes: gradients of a gain and of a matrix may lie in one
message, and with one scale the smaller ones would all be rounded to nothing. Floats of 4 bits go in blocks of at most
128. What counts for an optimizer that divides by a gradient's own size, as Adam does, is an error beside that size:
its mean square is 0.04 for them, 0.17 for whole numbers of 4 bits (a nano-GPT's gradients after 60 and 200 steps).

    | scales, float32 | numbers |      a packed message, (bytes,)

Source: Dettmers et al. 2022 (arXiv 2110.02861), section 2.1: blocks. Rouhani et al. 2023 (arXiv 2310.10537): floats
of 4 bits in blocks with a scale.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from distributed.comm.communicator import Array
from minigrad.extras import needs
from minigrad.kernels import kernels_of

# Numbers that kernels pack, by their bits and how many a block has at most; and floats of NumPy's, by the largest one
# that is sent: what a block's own largest is brought to.
PACKED = {"int8": (8, 256), "int4": (4, 256), "float4_e2m1fn": (4, 128)}
FLOATS = {"float8_e4m3fn": 448.0, "float16": 1.0, "bfloat16": 1.0}
NUMBER_FORMATS = (*PACKED, *FLOATS)
GPU_FORMATS = tuple(name for name in NUMBER_FORMATS if name != "float8_e4m3fn")  # which CuPy does not know
MOST_IN_BLOCK = 256  # of the others
_ALIGNED = 16  # numbers: blocks are multiples, so that rows of messages begin at whole words


def number_format(name: str) -> NumberFormat:
    """Return the format of this name.

    Raises:
        ValueError: there is none.
        ModuleNotFoundError: it needs `ml_dtypes`.
    """
    if name in PACKED:
        return _Packed(*PACKED[name], is_float=name.startswith("float"))
    if name in FLOATS:
        return _Float(np.dtype(name if name == "float16" else _narrow_dtype(name)), FLOATS[name])
    raise ValueError(f"gradients can be sent as {', '.join(NUMBER_FORMATS)}, got {name!r}")


class NumberFormat(ABC):
    """A way to write numbers down.

    Args:
        bits: of a number.
        most_in_block: numbers.
    """

    def __init__(self, bits: int, most_in_block: int) -> None:
        self._bits, self._most_in_block = bits, most_in_block

    def room_for(self, length: int) -> int:
        """Return how many numbers travel where there are so many.

        They are those of whole blocks, as few and as even as can be.
        """
        num_blocks = self._num_blocks(length)
        return num_blocks * -(-length // (num_blocks * _ALIGNED)) * _ALIGNED

    def packed_bytes(self, room: int) -> int:
        """Return what numbers travel in that have so much room."""
        return 4 * self._num_blocks(room) + room * self._bits // 8

    def pack(self, values: Array, kept: Array, packed: Array) -> None:
        """Pack values + kept; leave in `values` what that says, and in `kept` what it does not.

        Of a block with a number that is not finite it says nan, and nothing is kept.

        Args:
            values: (n,), at most as many as `kept` has room for.
            kept: (room,).
            packed: (bytes,), overwritten.
        """
        self._narrow(values, kept, *self._parts(packed, kept.size))

    def unpack(self, packed: Array, room: int, out: Array, *, add: bool) -> None:
        """Write what a packed message says into `out`, or add it.

        Args:
            out: (n,), at most as many as there was room for.
        """
        self._widen(*self._parts(packed, room), out, add)

    def _parts(self, packed: Array, room: int) -> tuple[Array, Array]:
        """Return the scales and the numbers of a message."""
        end = 4 * self._num_blocks(room)
        return packed[:end].view(np.float32), packed[end:]

    def _num_blocks(self, length: int) -> int:
        return -(-length // self._most_in_block)

    @abstractmethod
    def _narrow(self, values: Array, kept: Array, scales: Array, numbers: Array) -> None: ...

    @abstractmethod
    def _widen(self, scales: Array, numbers: Array, out: Array, add: bool) -> None: ...


class _Packed(NumberFormat):
    def __init__(self, bits: int, most_in_block: int, *, is_float: bool) -> None:
        super().__init__(bits, most_in_block)
        self._is_float = is_float

    def _narrow(self, values: Array, kept: Array, scales: Array, numbers: Array) -> None:
        kernels_of(values).quantize(values, kept, numbers, scales, self._bits, self._is_float)

    def _widen(self, scales: Array, numbers: Array, out: Array, add: bool) -> None:
        kernels_of(out).add_dequantized(numbers, scales, self._bits, out, add, self._is_float)


class _Float(NumberFormat):
    def __init__(self, dtype: np.dtype[Any], largest: float) -> None:
        super().__init__(8 * dtype.itemsize, MOST_IN_BLOCK)
        self._dtype, self._largest = dtype, largest

    def _narrow(self, values: Array, kept: Array, scales: Array, numbers: Array) -> None:
        blocks, steps = kernels_of(values).scaled_blocks(values, kept, scales, self._largest)
        narrow = (blocks / steps).astype(self._dtype)
        numbers[...] = narrow.reshape(-1).view(np.uint8)
        kept[...] = (blocks - narrow.astype(blocks.dtype) * steps).reshape(-1)
        self._widen(scales, numbers, values, False)

    def _widen(self, scales: Array, numbers: Array, out: Array, add: bool) -> None:
        blocks = numbers.view(self._dtype).reshape(scales.size, -1).astype(out.dtype)
        blocks *= scales.astype(out.dtype)[:, None]
        values = blocks.reshape(-1)[: out.size]
        out[...] = out + values if add else values


def _narrow_dtype(name: str) -> Any:
    try:
        import ml_dtypes
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(needs(name, "ml_dtypes", "bfloat16")) from error

    return getattr(ml_dtypes, name)
