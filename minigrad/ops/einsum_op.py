"""Sums of products, written in letters: `einsum("ij,jk->ik", a, b)`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from minigrad.autodiff.tape import op
from minigrad.autodiff.vjps import Vjp
from minigrad.backend import Array, xp_of
from minigrad.ops.operands import fit_one, half_in_float32
from minigrad.tensor import Tensor


def _letters_first(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let an op of subscripts take them in front of its operands too, as NumPy's does."""

    @functools.wraps(function)
    def called(*operands: Any, **options: Any) -> Tensor:
        if operands and isinstance(operands[0], str) and "subscripts" not in options:
            options["subscripts"], *arrays = operands
        else:
            arrays = list(operands)
        letters = options.get("subscripts")
        if not arrays or not isinstance(letters, str):
            raise TypeError(f'einsum is called as einsum("ij,jk->ik", a, b), got {letters!r} and {len(arrays)} arrays')
        return function(*arrays, **options)

    return called


@_letters_first
@op
@half_in_float32
def einsum(*operands: Array, subscripts: str) -> tuple[Array, tuple[Vjp, ...]]:
    """Multiply the operands and sum over the letters that the output lacks: `einsum("ij,jk->ik", a, b)`.

    The gradient of an operand is an einsum too: of g and the other operands, into this operand's letters. Two kinds of
    letter need more: one that stands nowhere else was summed out, and the gradient repeats along it; one that comes
    twice is a diagonal, and the gradient is 0 off it.

    Args:
        subscripts: as NumPy's, with the output written out and without "..."; each letter has one length. In front of
            the operands, or by name.
    Raises:
        ValueError: the subscripts do not fit the operands.
        TypeError: they are no letters.
    """
    xp = xp_of(operands[0])
    inputs, output, lengths = _parse(subscripts, operands)
    y = xp.asarray(xp.einsum(subscripts, *operands, optimize=len(operands) > 1))

    def vjp_of(i: int) -> Vjp:
        mine = "".join(dict.fromkeys(inputs[i]))
        others, arrays = inputs[:i] + inputs[i + 1 :], operands[:i] + operands[i + 1 :]
        elsewhere = output + "".join(others)
        shared = "".join(c for c in mine if c in elsewhere)
        back = f"{','.join([output, *others])}->{shared}"

        def vjp(g: Array) -> Array:
            dx = xp.einsum(back, g, *arrays, optimize=bool(arrays))
            dx = dx.reshape([lengths[c] if c in shared else 1 for c in mine])
            dx = xp.broadcast_to(dx, [lengths[c] for c in mine])
            return dx if len(mine) == len(inputs[i]) else _on_diagonal(xp, dx, mine, inputs[i])

        return fit_one(operands[i], vjp)

    return y, tuple(vjp_of(i) for i in range(len(operands)))


def _on_diagonal(xp: Any, values: Array, letters: str, repeated: str) -> Array:
    """Return zeros with `values` where equal letters have equal indices: of "iij", at [i, i, j]."""
    lengths = dict(zip(letters, values.shape, strict=True))
    index = dict(zip(letters, xp.ix_(*[xp.arange(n) for n in values.shape]), strict=True))
    x: Array = xp.zeros([lengths[c] for c in repeated], values.dtype)
    x[tuple(index[c] for c in repeated)] = values
    return x


def _parse(subscripts: str, operands: tuple[Array, ...]) -> tuple[list[str], str, dict[str, int]]:
    """Return the letters of each operand and of the output, and the length of each letter."""
    left, arrow, output = subscripts.replace(" ", "").partition("->")
    inputs = left.split(",")
    if not arrow or not (left.replace(",", "") + output + "a").isalpha():
        raise ValueError(f"einsum: subscripts must be letters, commas and one '->', got {subscripts!r}")
    if [len(letters) for letters in inputs] != [x.ndim for x in operands]:
        raise ValueError(
            f"einsum: each operand needs one letter for each axis, got {subscripts!r} for "
            f"shapes {[x.shape for x in operands]}"
        )
    if len(set(output)) < len(output) or not set(output) <= set(left):
        raise ValueError(f"einsum: the output must have letters of the operands, each once, got {subscripts!r}")
    lengths: dict[str, int] = {}
    for letters, x in zip(inputs, operands, strict=True):
        for c, n in zip(letters, x.shape, strict=True):
            if lengths.setdefault(c, n) != n:
                raise ValueError(f"einsum: a letter must have one length, got {lengths[c]} and {n} for {c!r}")
    return inputs, output, lengths
