"""How a parameter comes to be: by name.

A layer does not make its parameters, it asks a getter for them: `param(name, shape, init)`. The values depend
on the seed and the name alone, so a rank that builds only its own layers gets what one process would; and a
name that is asked for twice gives the same object, which is how weights are tied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from minigrad.arguments import as_array, as_dtype
from minigrad.backend import Array, place
from minigrad.parameter import Parameter
from minigrad.rng import named_generator

Init = Callable[[np.random.Generator, tuple[int, ...]], Array]


def normal(std: float) -> Init:
    """Draw from a normal distribution around 0."""
    return lambda generator, shape: std * generator.standard_normal(shape)


def zeros(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Fill with 0."""
    return np.zeros(shape)


def ones(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Fill with 1."""
    return np.ones(shape)


@dataclass(frozen=True)
class ParamGetter:
    """Make parameters by name; the same name again is the same parameter.

    Args:
        seed: of the initial values.
        dtype, device: of all parameters; the values are the same on every device.
        prefix: put before every name; `param.at("fc")` is a getter for names under "fc.".
        made: every parameter so far, by full name, shared by all getters made with `at`.
    """

    seed: int = 0
    dtype: Any = np.float32
    device: str = "cpu"
    prefix: str = ""
    made: dict[str, Parameter] = field(default_factory=dict)

    def at(self, name: str) -> ParamGetter:
        """Return a getter whose names all start with this one and a dot."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def __call__(self, name: str, shape: tuple[int, ...], init: Init) -> Parameter:
        """Return the parameter called `prefix + name`.

        Raises:
            ValueError: the name was asked for before, with another shape.
        """
        full = self.prefix + name
        if full not in self.made:
            values = as_array(init(named_generator("init", self.seed, full), shape))
            self.made[full] = Parameter(place(values.astype(as_dtype(self.dtype)), self.device), full)
        parameter = self.made[full]
        if parameter.shape != tuple(shape):
            raise ValueError(f"parameter {full!r} has shape {parameter.shape}, but {tuple(shape)} was asked for")
        return parameter


LayerFactory = Callable[[ParamGetter], Callable[[Any], Any]]  # makes one layer of a model given as a list
