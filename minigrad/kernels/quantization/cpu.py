"""Numbers in few bits for float32 and float64 on a CPU, compiled by numba: a block is read from memory once."""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad.backend import Array
from minigrad.kernels.compiling import EXACT, compiled, contiguous, inlined
from minigrad.kernels.quantization import reference
from minigrad.kernels.quantization.reference import LARGEST_FLOAT

__all__ = ["add_dequantized", "quantize"]


@compiled(EXACT)
def _quantize(x: Array, kept: Array, words: Array, codes: Array, scales: Array, bits: int, is_float: bool) -> None:
    T, W = kept.dtype.type, words.dtype.type
    block = kept.size // scales.size
    part, parts, mask = block * bits // 8, 8 // bits, (1 << bits) - 1
    largest = T(LARGEST_FLOAT) if is_float else T((1 << (bits - 1)) - 1)
    one, two, four, eight = T(1), T(2), T(4), T(8)
    sign = W(~(W(1) << W(8 * words.itemsize - 1)))
    numbers = np.empty(block, np.int8)
    word = np.zeros(1, words.dtype)  # the magnitude of a float is ordered as its bits are: whole numbers, nan above all
    for b in range(scales.size):
        own, own_words = kept[b * block : (b + 1) * block], words[b * block : (b + 1) * block]
        own_x = x[b * block : (b + 1) * block]
        for i in range(own_x.size):
            own[i] += own_x[i]
        most = W(0)
        for i in range(block):
            most = max(most, W(own_words[i] & sign))
        word[0] = most
        scale = np.float32(word.view(kept.dtype)[0] / largest)
        own_codes = codes[b * part : (b + 1) * part]
        if not np.isfinite(scale):
            scales[b] = np.nan
            own[:] = 0
            own_x[:] = np.nan
            own_codes[:] = 0
            continue
        scales[b] = scale
        step = T(scale) if scale > 0 else T(1)
        for i in range(block):
            number = own[i] / step
            if is_float:
                size = abs(number)
                apart = one if size < four else (two if size < eight else four)
                number = np.rint(number / apart) * apart
            number = min(max(np.rint(number), -largest), largest)
            own[i] -= number * step
            numbers[i] = np.int8(number)
        for i in range(own_x.size):
            own_x[i] = T(numbers[i]) * step
        if bits == 8:
            for i in range(part):
                own_codes[i] = np.uint8(numbers[i])
            continue
        if is_float:
            for i in range(block):
                number = numbers[i]
                width = np.int8(abs(number))
                ordinal = width if width < 4 else (width // 2 + 2 if width < 8 else width // 4 + 4)
                numbers[i] = np.int8(ordinal + 8 if number < 0 else ordinal)
        own_codes[:] = 0
        for p in range(parts):
            its = numbers[p * part : (p + 1) * part]
            for i in range(part):
                own_codes[i] |= np.uint8((its[i] & mask) << (bits * p))


def quantize(x: Array, kept: Array, codes: Array, scales: Array, bits: int, is_float: bool = False) -> None:
    if not x.flags.carray:
        reference.quantize(x, kept, codes, scales, bits, is_float)
        return
    _quantize(x, kept, kept.view(f"i{kept.itemsize}"), codes, scales, bits, is_float)


@inlined(EXACT)
def _float_of(code: Any) -> Any:
    """Return the float of a code, times 2: a look-up would be one number at a time, and whole numbers are int64."""
    ordinal = np.int8(code & np.int8(7))
    size = ordinal if ordinal < 4 else (np.int8(2 * ordinal - 4) if ordinal < 6 else np.int8(4 * ordinal - 16))
    return np.int8(-size) if code > 7 else size


@compiled(EXACT)
def _add_dequantized(codes: Array, scales: Array, bits: int, out: Array, add: bool, is_float: bool) -> None:
    T = out.dtype.type
    part, parts = codes.size // scales.size, 8 // bits
    block = part * parts
    for b in range(scales.size):
        scale = T(scales[b])
        own = codes[b * part : (b + 1) * part]
        for p in range(parts):
            start = b * block + p * part
            values = out[start : start + part]
            for i in range(values.size):
                if is_float:
                    number = T(_float_of(np.int8((own[i] >> (bits * p)) & 15)))
                else:
                    number = T(np.int8(np.int8(own[i] << (8 - bits - bits * p)) >> (8 - bits)))
                values[i] = values[i] + number * scale if add else number * scale


def add_dequantized(codes: Array, scales: Array, bits: int, out: Array, add: bool, is_float: bool = False) -> None:
    _add_dequantized(contiguous(codes), contiguous(scales), bits, out, add, is_float)
