"""Numbers in few bits, in blocks with a scale each, and what is lost by it.

Codes are whole numbers of `bits` bits in two's complement, 8 / bits of them in a byte: the parts of a block lie on top
of each other, the first one in the lowest bits.

    4 bits   byte i of a block of n    code i | code (n/2 + i) << 4
"""

from __future__ import annotations

import numpy as np

from minigrad.backend import Array, widened, xp_of

__all__ = ["add_dequantized", "quantize", "scaled_blocks"]


def quantize(x: Array, kept: Array, codes: Array, scales: Array, bits: int) -> None:
    """Write x + kept in few bits, into x what these say, and into `kept` what they do not.

    Args:
        x: overwritten; kept, scales: see `scaled_blocks`, where the largest magnitude is 2 ** (bits - 1) - 1.
        codes: (m bits / 8,) uint8, overwritten.
        bits: 8 or 4.
    """
    xp = xp_of(kept)
    largest = 2 ** (bits - 1) - 1
    blocks, steps = scaled_blocks(x, kept, scales, largest)
    numbers = xp.clip(xp.rint(blocks / steps), -largest, largest)  # the scale of tiny ones may be rounded to too little
    said = numbers * steps
    kept[...] = (blocks - said).reshape(-1)
    said[xp.isnan(scales)] = np.nan
    x[...] = said.reshape(-1)[: x.size]
    parts = xp.split(numbers.astype(np.int8).view(np.uint8) & (2**bits - 1), 8 // bits, axis=1)
    codes[...] = 0
    for i, part in enumerate(parts):
        codes |= (part << (i * bits)).reshape(-1)


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


def add_dequantized(codes: Array, scales: Array, bits: int, out: Array, add: bool) -> None:
    """Write the numbers that `quantize` has made codes of into `out`, or add them.

    Args:
        out: (n,), the first n of them.
    """
    xp = xp_of(out)
    wide = widened(out)
    packed = codes.view(np.int8).reshape(scales.size, -1)
    parts = [(packed << up) >> (8 - bits) for up in range(8 - bits, -1, -bits)]
    values = xp.concatenate(parts, axis=1).astype(wide.dtype)
    values *= scales.astype(wide.dtype)[:, None]
    values = values.reshape(-1)[: out.size]
    out[...] = wide + values if add else values
