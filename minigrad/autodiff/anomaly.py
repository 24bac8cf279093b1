"""Where the first NaN comes from: `with mg.detect_anomaly()` looks at what every op and every vjp makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from minigrad.autodiff.mode import Seen, hooked_by
from minigrad.autodiff.op_hooks import ModulePath
from minigrad.autodiff.tape import Node
from minigrad.backend import Array, xp_of


class _FirstAnomaly:
    def __init__(self) -> None:
        self._path = ModulePath()

    def forward(self, name: str, function: Any, arrays: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Seen]:
        y, vjps = function(*arrays, **kwargs)
        _check(y, f"forward of {name}{_where(str(self._path))}")
        return y, vjps, Seen(str(self._path), 0.0)

    def backward(self, node: Node, vjp: Any, g: Array) -> Any:
        result = vjp(g)
        where = _where(node.seen.path if node.seen is not None else "")
        for array in result if isinstance(result, list) else (result,):
            _check(array, f"backward of {node.name}{where}")
        return result

    def module(self, module: Any) -> AbstractContextManager[None]:
        return self._path.inside(module)


def _where(path: str) -> str:
    return f" in {path}" if path else ""


def _check(array: Any, where: str) -> None:
    xp = xp_of(array)
    if not bool(xp.isfinite(array).all()):
        kind = "NaN" if bool(xp.isnan(array).any()) else "infinity"
        raise FloatingPointError(f"the {where} made the first {kind}, in an array of shape {xp.shape(array)}")


@contextmanager
def detect_anomaly() -> Iterator[None]:
    """Raise FloatingPointError at the first nan or infinity inside.

    It names the op, its module, the shape, and whether it was in the forward or the backward. An infinity that a model
    means to have (a mask) counts too. Costs a pass over every array.
    """
    with hooked_by(_FirstAnomaly()):
        yield
