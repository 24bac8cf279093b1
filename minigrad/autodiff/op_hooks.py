"""Op hooks: what runs inside each op. The protocol is `OpHook` in `mode.py`; here is what several hooks need.

`profiler.py` and `anomaly.py` are hooks, and so is `progressing`, which lets messages progress in the middle of a
forward. While there is none, the door for them costs one comparison an op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from minigrad.autodiff.mode import OpHook, current_hook, hooked_by
from minigrad.autodiff.tape import Node
from minigrad.backend import Array


class ModulePath:
    """The path of the module that is being called.

    It begins with the root's class, and attributes follow: `GPT.layers[1].attention.heads.qkv`.
    """

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


class _Progress:
    """Call something after every op, inside the hook that was there."""

    def __init__(self, between_ops: Callable[[], None], outer: OpHook | None) -> None:
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
    return nullcontext() if between_ops is None else hooked_by(_Progress(between_ops, current_hook()))
