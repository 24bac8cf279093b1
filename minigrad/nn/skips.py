"""Skip connections between layers of a model that is a list: the output of one that later ones take, as in a U-Net.

    layers = [
        ("down", gives(down, "a")),       # its output goes to the next layer, and is also called "a"
        ("middle", middle),
        ("up", takes(up, "a")),           # called with the output of the layer before it, and with "a"
    ]
    model = Sequential(factory(param) for _, factory in layers)

A factory tells the names before its layer is made, so that ranks that make other layers know of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from minigrad.nn.init import LayerFactory, ParamGetter
from minigrad.nn.module import SkipLayer


@dataclass(frozen=True)
class SkipFactory:
    """Makes a layer with skip connections."""

    factory: Callable[[ParamGetter], Callable[..., Any]]
    gives: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()

    def __call__(self, param: ParamGetter) -> SkipLayer:
        """Make the layer."""
        return SkipLayer(self.factory(param), self.gives, self.takes)


def gives(factory: Callable[[ParamGetter], Callable[..., Any]], name: str) -> SkipFactory:
    """Give the layer's output a name, by which later layers take it."""
    layer = _skip_factory(factory)
    return replace(layer, gives=(*layer.gives, name))


def takes(factory: Callable[[ParamGetter], Callable[..., Any]], *names: str) -> SkipFactory:
    """Call the layer with the outputs of these names too.

    They come in this order, after the output of the layer before it.
    """
    layer = _skip_factory(factory)
    return replace(layer, takes=(*layer.takes, *names))


def _skip_factory(factory: Callable[[ParamGetter], Callable[..., Any]]) -> SkipFactory:
    return factory if isinstance(factory, SkipFactory) else SkipFactory(factory)


class Skip(NamedTuple):
    """A name, the layer that gives it, and those that take it, by number."""

    name: str
    giver: int
    takers: tuple[int, ...]


def skips_of(layers: Sequence[tuple[str, LayerFactory]]) -> list[Skip]:
    """Return the skip connections of a model, in the order in which they are given.

    Raises:
        ValueError: a name is given twice, or taken where no layer before gives it, or by none.
    """
    givers: dict[str, int] = {}
    takers: dict[str, list[int]] = {}
    for number, (label, factory) in enumerate(layers):
        if not isinstance(factory, SkipFactory):
            continue
        for name in factory.takes:
            takers.setdefault(name, []).append(number)
        for name in factory.gives:
            if name in givers:
                raise ValueError(
                    f"a skip connection is given by one layer, but {name!r} is given by {layers[givers[name]][0]!r} "
                    f"and {label!r}"
                )
            givers[name] = number
    for name, numbers in takers.items():
        first = layers[numbers[0]][0]
        if name not in givers:
            raise ValueError(f"a skip connection is given by a layer, but {name!r}, which {first!r} takes, is by none")
        if givers[name] >= numbers[0]:
            raise ValueError(
                f"a skip connection goes to a later layer, but {name!r} is taken by {first!r} and given by "
                f"{layers[givers[name]][0]!r}, which does not come before it"
            )
    for name, number in givers.items():
        if name not in takers:
            raise ValueError(f"a skip connection is taken by a layer, but {name!r} of {layers[number][0]!r} is by none")
    return [Skip(name, number, tuple(dict.fromkeys(takers[name]))) for name, number in givers.items()]
