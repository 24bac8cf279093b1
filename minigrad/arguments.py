"""The door: what users hand in, arrays and numbers of many kinds, made into what everything inside counts on."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from minigrad.backend import Array, xp_of


def as_int(value: Any) -> int | None:
    """Return `value` if it is one integer, NumPy's included; None if it is something else, such as several."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_array(data: Any) -> Array:
    """Return `data`, an array or a nested list of numbers, as an array that ops can take: see `as_dtype`."""
    array = data if xp_of(data) is not np else np.asarray(data)
    dtype = as_dtype(array.dtype)
    return array if dtype is array.dtype else array.astype(dtype)


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """Return `dtype` in this machine's byte order.

    Raises:
        TypeError: nothing here computes with it, or no file holds it: complex numbers, text, dates, objects, and floats
            that only some machines have.
    """
    given = np.dtype(dtype)
    if given.char in "?bBhHiIlLqQefd" or given.name == "bfloat16":
        return given if given.isnative else given.newbyteorder("=")
    raise TypeError(
        "arrays must be of booleans, integers, or real numbers (float16, bfloat16, float32, float64), "
        f"got dtype {given.name}"
    )
