"""Numbers in few bits, in blocks with a scale each, and what is lost by it.

Codes are whole numbers of `bits` bits in two's complement, 8 / bits of them in a byte: the parts of a block lie on top
of each other, the first one in the lowest bits.

    4 bits   byte i of a block of n    code i | code (n/2 + i) << 4

Or codes are floats of 4 bits, E2M1: a sign, two bits of an exponent and one of a mantissa, whose numbers are these
over 2. They lie close where they are small, and most gradients are small beside the largest of their block.

    code            0  1  2  3  4  5  6  7    8 to 15: their negatives
    number times 2  0  1  2  3  4  6  8 12

Source: E2M1: OCP Microscaling Formats (MX) 1.0, section 5.3.3.
"""

from __future__ import annotations

import numpy as np

from minigrad.backend import Array, widened, xp_of

__all__ = ["add_dequantized", "quantize", "scaled_blocks"]


FLOATS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # of each code, times 2
LARGEST_FLOAT = 12


def quantize(x: Array, kept: Array, codes: Array, scales: Array, bits: int, is_float: bool = False) -> None:
    """Write x + kept in few bits, into x what these say, and into `kept` what they do not.

    Args:
        x: overwritten; kept, scales: see `scaled_blocks`, where the largest magnitude is `largest_number`.
        codes: (m bits / 8,) uint8, overwritten.
        bits: 8 or 4.
        is_float: codes are E2M1, of 4 bits.
    """
    xp = xp_of(kept)
    largest = largest_number(bits, is_float)
    blocks, steps = scaled_blocks(x, kept, scales, largest)
    numbers = blocks / steps
    if is_float:
        sizes = abs(numbers)
        apart = xp.where(sizes < 4, 1, xp.where(sizes < 8, 2, 4)).astype(blocks.dtype)  # of numbers there
        numbers = xp.rint(numbers / apart) * apart
    # The scale of tiny ones may be rounded to too little.
    numbers = xp.clip(xp.rint(numbers), -largest, largest)
    said = numbers * steps
    kept[...] = (blocks - said).reshape(-1)
    said[xp.isnan(scales)] = np.nan
    x[...] = said.reshape(-1)[: x.size]
    words = numbers.astype(np.int8)
    if is_float:
        sizes = abs(words)
        ordinals = xp.where(sizes < 4, sizes, xp.where(sizes < 8, sizes // 2 + 2, sizes // 4 + 4))
        words = xp.where(words < 0, ordinals + 8, ordinals)
    parts = xp.split(words.view(np.uint8) & (2**bits - 1), 8 // bits, axis=1)
    codes[...] = 0
    for i, part in enumerate(parts):
        codes |= (part << (i * bits)).reshape(-1)


def largest_number(bits: int, is_float: bool) -> int:
    """Return what the largest magnitude of a block becomes."""
    return LARGEST_FLOAT if is_float else 2 ** (bits - 1) - 1


def scaled_blocks(x: Array, kept: Array, scales: Array, largest: float) -> tuple[Array, Array]:
    """Return x + kept in blocks, (number of blocks, n), and what each is to be divided by, (number of blocks, 1).

    That is its scale, its largest magnitude over `largest`, and 1 where that is 0. Where a number is not finite, or too
    large for float32, the scale is nan and the block is zeros.

    Args:
        x: (n,), kept: (m,), m at least n: beyond n, x is 0. `kept` is contiguous, and may be overwritten.
        scales: (number of blocks, at least 1,) float32, overwritten.
    """
    xp = xp_of(kept)
    values = widened(kept)
    values[: x.size] += x
    blocks = values.reshape(scales.size, -1)
    with np.errstate(over="ignore", invalid="ignore"):
        scales[...] = xp.maximum(blocks.max(axis=1), -blocks.min(axis=1)) / largest
    is_broken = ~xp.isfinite(scales)
    steps = xp.where(is_broken | (scales == 0), 1, scales).astype(blocks.dtype)[:, None]
    scales[is_broken] = np.nan
    return xp.where(is_broken[:, None], 0, blocks), steps


def add_dequantized(codes: Array, scales: Array, bits: int, out: Array, add: bool, is_float: bool = False) -> None:
    """Write the numbers that `quantize` has made codes of into `out`, or add them.

    Args:
        out: (n,), the first n of them.
        is_float: see `quantize`.
    """
    xp = xp_of(out)
    wide = widened(out)
    packed = codes.view(np.int8).reshape(scales.size, -1)
    parts = [(packed << up) >> (8 - bits) for up in range(8 - bits, -1, -bits)]
    words = xp.concatenate(parts, axis=1)
    values = (xp.asarray(FLOATS)[words & 15] if is_float else words).astype(wide.dtype)
    values *= scales.astype(wide.dtype)[:, None]
    values = values.reshape(-1)[: out.size]
    out[...] = wide + values if add else values
