"""Where the time goes: `with mg.profile() as profile` measures every op, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from minigrad.autodiff.mode import Seen, hooked_by
from minigrad.autodiff.op_hooks import ModulePath
from minigrad.autodiff.tape import Node
from minigrad.backend import Array, synchronize


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
    """Time and bytes by op, filled while it is the hook. `print` it, or read `ops`.

    Attributes:
        ops: by the op's name.
    """

    def __init__(self) -> None:
        self.ops: dict[str, OpTime] = {}
        self._path = ModulePath()

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
    measured = Profile()
    with hooked_by(measured):
        yield measured
