"""How a parameter comes to be: by name.

A layer does not make its parameters, it asks a getter for them: `param(name, shape, init)`. The values depend
on the seed and the name alone, so whoever builds only some of the layers gets what the whole model has. A name is given
once; a layer that shares a weight with another one says so, and asks with `param.tied`.
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

Init = Callable[["np.random.Generator", tuple[int, ...]], Array]  # in quotes: NumPy loads what is random when asked


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
    """Make parameters by name, each name once.

    `param.tied` gives those that another layer asks for too.

    Args:
        seed: of the initial values.
        dtype, device: of all parameters; the values are the same on every device.
        prefix: put before every name; `param.at("fc")` is a getter for names under "fc.".
        ties: whether the parameters are shared with another layer: see `tied`.
        made: every parameter so far, by full name, shared by all getters made with `at` and `tied`.
        claimed: the names that were asked for without a tie, likewise.
    """

    seed: int = 0
    dtype: Any = np.float32
    device: str = "cpu"
    prefix: str = ""
    ties: bool = False
    made: dict[str, Parameter] = field(default_factory=dict)
    claimed: set[str] = field(default_factory=set)

    def at(self, name: str) -> ParamGetter:
        """Return a getter whose names all start with this one and a dot."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    @property
    def tied(self) -> ParamGetter:
        """A getter for parameters that another layer has too.

        `param.tied("weight", shape, init)` is the same object. One of the layers may ask without a tie, whichever is
        made first.
        """
        return replace(self, ties=True)

    def __call__(self, name: str, shape: tuple[int, ...], init: Init) -> Parameter:
        """Return the parameter called `prefix + name`.

        Raises:
            ValueError: the name was asked for before, without a tie or with another shape.
        """
        full = self.prefix + name
        if not self.ties:
            if full in self.claimed:
                raise ValueError(
                    f"two layers ask for the parameter {full!r}: give each a name of its own, param.at(name), or ask "
                    "with param.tied to share it (in a loop, a lambda sees the last value of the loop's variable)"
                )
            self.claimed.add(full)
        if full not in self.made:
            values = as_array(init(named_generator("init", self.seed, full), shape))
            self.made[full] = Parameter(place(values.astype(as_dtype(self.dtype)), self.device), full)
        parameter = self.made[full]
        if parameter.shape != tuple(shape):
            raise ValueError(f"parameter {full!r} has shape {parameter.shape}, but {tuple(shape)} was asked for")
        return parameter


LayerFactory = Callable[[ParamGetter], Callable[[Any], Any]]  # makes one layer of a model given as a list
