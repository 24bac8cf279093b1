"""The door: what users hand in, arrays and numbers of many kinds, made into what everything inside counts on."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from minigrad.backend import Array, xp_of
from minigrad.words import counted


def as_int(value: Any) -> int | None:
    """Return `value` if it is one integer, NumPy's included; None for anything else, such as a float or a tuple."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_sizes(name: str, **sizes: Any) -> None:
    """Check what says how large something is.

    Raises:
        TypeError: a size is no integer.
        ValueError: it is below 1.
    """
    for what, size in sizes.items():
        if as_int(size) is None:
            raise TypeError(f"{name}: {what} must be an integer, got {size!r}")
        if size < 1:
            raise ValueError(f"{name}: {what} must be at least 1, got {size}")


def as_array(data: Any) -> Array:
    """Return an array, or a nested list of numbers, as an array that ops can take; see `as_dtype`."""
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


@dataclass(frozen=True)
class Places:
    """Where the arguments of an op stand: arrays first, then options.

    Attributes:
        name: of the op, for errors.
        num_arrays: how many arrays there can be.
        positional: options that may be given by position after them.
        options: everything that may be given by keyword; None: anything.
    """

    name: str
    num_arrays: int
    positional: tuple[str, ...]
    options: Collection[str] | None

    @staticmethod
    def of(function: Callable[..., Any]) -> Places:
        """Read them off the signature of an op's function."""
        code = inspect.unwrap(function).__code__  # inspect.signature takes 25 us, at import, for each op
        names, num_arrays, num_by_place = code.co_varnames, code.co_posonlyargcount, code.co_argcount
        positional = names[num_arrays:num_by_place] if num_arrays else ()
        options = positional + names[num_by_place : num_by_place + code.co_kwonlyargcount]
        return Places(
            function.__name__,
            num_arrays or sys.maxsize,  # without a `/` everything positional is an array, of any number
            positional,
            None if code.co_flags & inspect.CO_VARKEYWORDS else options,
        )

    def sort(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Tell the arrays from options that were given by position.

        Args:
            args: of one call, in their order; longer than num_arrays.
            kwargs: the options that were given by keyword.
        Returns:
            The arrays, and all options by name.
        Raises:
            TypeError: there are too many, or one is given twice.
        """
        given = args[self.num_arrays :]
        by_position = dict(zip(self.positional, given, strict=False))
        if len(given) > len(self.positional) or by_position.keys() & kwargs.keys():
            raise TypeError(
                f"{self.name}() takes {counted(self.num_arrays, 'array')}, then by position or by "
                f"keyword {', '.join(self.positional)}, got {counted(len(args), 'positional argument')} and "
                f"{list(kwargs)}"
            )
        return args[: self.num_arrays], by_position | kwargs
