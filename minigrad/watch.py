"""Looking at every op as it runs: where the time goes, and where the first NaN comes from.

`profile()` and `detect_anomaly()` are two watchers behind one door in the tape: while one is active, each op's forward
and each vjp runs inside it. Otherwise the door costs one comparison an op.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from minigrad.backend import Array, synchronize, xp_of
from minigrad.tape import Node, Seen, Watch, current_watch, watched_by


class _ModulePath:
    """The path of the module that is being called: its root's class, then attributes, `GPT.layers[1].attention.qkv`."""

    def __init__(self) -> None:
        self._modules: list[Any] = []
        self._names: list[str] = []

    def __str__(self) -> str:
        return ".".join(self._names).replace(".[", "[")

    @contextmanager
    def inside(self, module: Any) -> Iterator[None]:
        """Note that `module` is being called."""
        self._names.append(_name_in(self._modules[-1], module) if self._modules else type(module).__name__)
        self._modules.append(module)
        try:
            yield
        finally:
            self._names.pop()
            self._modules.pop()


def _name_in(parent: Any, module: Any) -> str:
    for name, value in vars(parent).items():
        if value is module:
            return name
        if isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                if item is module:
                    return f"{name}[{i}]"
    return type(module).__name__


@dataclass
class OpTime:
    """What the calls of one op took in all.

    Attributes:
        calls: of the forward.
        forward_seconds, backward_seconds: summed.
        made_bytes: of the outputs.
    """

    calls: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    made_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


class Profile:
    """Time and bytes by op, filled while it watches. `print` it, or read `ops`.

    Attributes:
        ops: by the op's name.
    """

    def __init__(self) -> None:
        self.ops: dict[str, OpTime] = {}
        self._path = _ModulePath()

    def forward(self, name: str, function: Any, arrays: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Seen]:
        (y, vjps), seconds = _timed(lambda: function(*arrays, **kwargs), lambda result: result[0])
        total = self.ops.setdefault(name, OpTime())
        total.calls += 1
        total.forward_seconds += seconds
        total.made_bytes += getattr(y, "nbytes", 0)
        return y, vjps, Seen(str(self._path), seconds)

    def backward(self, node: Node, vjp: Any, g: Array) -> Any:
        result, seconds = _timed(lambda: vjp(g), lambda result: result)
        self.ops.setdefault(node.name, OpTime()).backward_seconds += seconds
        return result

    def module(self, module: Any) -> AbstractContextManager[None]:
        return self._path.inside(module)

    @property
    def seconds(self) -> float:
        """Time in all ops, forward and backward."""
        return sum(total.seconds for total in self.ops.values())

    def __str__(self) -> str:
        lines = [f"{'op':<20} {'calls':>7} {'forward ms':>11} {'backward ms':>12} {'share':>6} {'made bytes':>15}"]
        for name, total in sorted(self.ops.items(), key=lambda item: -item[1].seconds):
            share = total.seconds / self.seconds if self.seconds else 0.0
            forward, backward = total.forward_seconds * 1e3, total.backward_seconds * 1e3
            lines.append(
                f"{name:<20} {total.calls:>7} {forward:>11.3f} {backward:>12.3f} {share:>6.1%} {total.made_bytes:>15,}"
            )
        return "\n".join(lines)


def _timed(call: Callable[[], Any], array_of: Callable[[Any], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    synchronize(array_of(result))  # on a GPU the call only queued the work
    return result, time.perf_counter() - start


@contextmanager
def profile() -> Iterator[Profile]:
    """Measure every op inside, forward and backward.

        with mg.profile() as profile:
            mg.backward(mg.cross_entropy(model(x), y))
        print(profile)

    A tape that was recorded inside shows its forward times in `Tape.of`.
    """
    watch = Profile()
    with watched_by(watch):
        yield watch


class _AnomalyWatch:
    def __init__(self) -> None:
        self._path = _ModulePath()

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
    """Raise FloatingPointError at the first NaN or infinity inside: names op, module, shape, forward or backward.

    An infinity that a model means to have (a mask) counts too. Costs a pass over every array.
    """
    with watched_by(_AnomalyWatch()):
        yield


class _Progress:
    """Call something after every op, and let whoever watched go on watching."""

    def __init__(self, between_ops: Callable[[], None], outer: Watch | None) -> None:
        self._between_ops = between_ops
        self._outer = outer

    def forward(self, name: str, function: Any, arrays: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        if self._outer is not None:
            result = self._outer.forward(name, function, arrays, kwargs)
        else:
            result = (*function(*arrays, **kwargs), None)
        self._between_ops()
        return result

    def backward(self, node: Node, vjp: Any, g: Array) -> Any:
        return vjp(g) if self._outer is None else self._outer.backward(node, vjp, g)

    def module(self, module: Any) -> AbstractContextManager[None]:
        return nullcontext() if self._outer is None else self._outer.module(module)


def progressing(between_ops: Callable[[], None] | None) -> AbstractContextManager[None]:
    """Call `between_ops` after every op that runs inside."""
    return nullcontext() if between_ops is None else watched_by(_Progress(between_ops, current_watch()))
