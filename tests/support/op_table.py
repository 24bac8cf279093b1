"""A row of the op table: one way to call an op, with samples for its arguments. All samples are read-only.

The rows themselves are in `op_rows_math.py` and `op_rows_nn.py`; `test_ops.py` says what must hold for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import minigrad as mg
from minigrad import ops
from minigrad.backend import Array

Sampler = Callable[[np.random.Generator], Array]


def normal(*shape: int) -> Sampler:
    return lambda generator: np.asarray(generator.standard_normal(shape))


def positive(*shape: int) -> Sampler:
    return lambda generator: np.asarray(generator.uniform(0.5, 2.0, shape))


def off_zero(*shape: int) -> Sampler:
    """Both signs, and no value near 0: there are the kink of relu and the pole of a division."""
    return lambda generator: generator.uniform(0.5, 2.0, shape) * generator.choice([-1.0, 1.0], shape)


def ids(high: int, *shape: int) -> Sampler:
    return lambda generator: generator.integers(high, size=shape)


@dataclass(frozen=True)
class Row:
    """One way to call an op.

    Attributes:
        name: of the op, in `minigrad.ops`.
        plain: the same function in plain NumPy.
        args: samplers, or Python numbers.
        kwargs: passed to both.
    """

    name: str
    plain: Callable[..., Any]
    args: tuple[Sampler | float, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def op(self) -> Callable[..., mg.Tensor]:
        return getattr(ops, self.name)

    def sample(self, dtype: Any = np.float64) -> list[Any]:
        """Return the arguments: read-only arrays, floats in this dtype, and Python numbers."""
        generator = np.random.default_rng(7)
        arrays = [arg(generator) if callable(arg) else arg for arg in self.args]
        return [read_only(a.astype(dtype if a.dtype.kind == "f" else a.dtype)) if is_array(a) else a for a in arrays]


def is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def is_float(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind == "f"


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def row(name: str, plain: Callable[..., Any], *args: Sampler | float, **kwargs: Any) -> Row:
    return Row(name, plain, args, kwargs)
