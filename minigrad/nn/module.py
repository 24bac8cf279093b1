"""Module: something with parameters that can be called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..backend import Array
from ..flat import check_names
from ..tape import current_watch
from ..tensor import Parameter


class Module:
    """Base of all layers and models. `__init__` sets parameters and modules as attributes, `__call__` uses ops.

    Attributes:
        training: whether random layers are on; set by `train` and `eval`.
    """

    training = True

    def __init_subclass__(cls) -> None:
        """Let a watch (`profile`, `detect_anomaly`) know which module is being called."""
        super().__init_subclass__()
        if "__call__" in vars(cls):
            cls.__call__ = _watched(cls.__call__)  # type: ignore[method-assign]

    def __call__(self, *args: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} defines no __call__")

    def modules(self) -> Iterator[Module]:
        """Yield this module and all modules in it, in the order of their declaration."""
        yield self
        for value in vars(self).values():
            for child in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(child, Module):
                    yield from child.modules()

    def parameters(self) -> list[Parameter]:
        """Return all parameters in the order of their declaration, tied ones once."""
        found = (value for module in self.modules() for value in vars(module).values() if isinstance(value, Parameter))
        return list(dict.fromkeys(found))

    def named_parameters(self) -> dict[str, Parameter]:
        """Return all parameters by name.

        Raises:
            ValueError: a parameter has no name, or two have the same.
        """
        params = self.parameters()
        check_names(params)
        for p in params:
            if not p.name:
                raise ValueError(f"parameters are told apart by name, but one of shape {p.shape} has none")
        return {p.name: p for p in params}

    def train(self, training: bool = True) -> None:
        """Turn random layers on."""
        for module in self.modules():
            module.training = training

    def eval(self) -> None:
        """Turn random layers off."""
        self.train(False)

    def state_dict(self) -> dict[str, Array]:
        """Return a copy of all parameter values by name."""
        return {name: p.data.copy() for name, p in self.named_parameters().items()}

    def load_state_dict(self, values: Mapping[str, Array]) -> None:
        """Copy values into the parameters, all or nothing.

        Raises:
            ValueError: names are missing or unexpected, or a shape differs.
        """
        params = self.named_parameters()
        wrong = [
            f"{name}: expected {params[name].shape}, got {values[name].shape}"
            for name in params.keys() & values.keys()
            if params[name].shape != values[name].shape
        ]
        missing, unexpected = sorted(params.keys() - values.keys()), sorted(values.keys() - params.keys())
        if wrong or missing or unexpected:
            raise ValueError(
                f"load_state_dict: missing {missing}, unexpected {unexpected}, wrong shape {sorted(wrong)}"
            )
        for name, p in params.items():
            p.data = values[name]


def _watched(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def watched(self: Module, *args: Any) -> Any:
        watch = current_watch()
        if watch is None:
            return call(self, *args)
        with watch.module(self):
            return call(self, *args)

    return watched


class Sequential(Module):
    """Call layers one after another."""

    def __init__(self, layers: Iterable[Callable[[Any], Any]]) -> None:
        self.layers = list(layers)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x
