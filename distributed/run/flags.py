"""Settings as a table of flags: each field of a settings class is one, `save_every` is --save-every.

    @dataclass(frozen=True)
    class MySettings(RunSettings):
        \"\"\"Settings of my model.\"\"\"

        width: int = flag(64, "features of each token", bounds=COUNT)
        norm: str = flag("layer", "what normalizes", choices=("layer", "rms"))

A class is a group of the help, under the first line of its docstring. What a value may be stands beside it; rules
between flags are what `rules` yields.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol, TypeVar

T = TypeVar("T")
Rule = tuple[bool, str]  # whether it holds, and what to say if it does not

MOST = 2**31 - 1  # of anything that is counted


@dataclass(frozen=True)
class Bounds:
    """What a number may be; what is not given bounds nothing."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def broken_by(self, value: float) -> str:
        """Return what the value should be and is not, such as "at least 1".

        It is empty where all holds.
        """
        kept = {
            f"at least {self.at_least}": self.at_least is None or value >= self.at_least,
            f"above {self.above}": self.above is None or value > self.above,
            f"at most {self.at_most}": self.at_most is None or value <= self.at_most,
            "finite" if self.below == math.inf else f"below {self.below}": self.below is None or value < self.below,
        }
        return " and ".join(words for words, holds in kept.items() if not holds)


COUNT = Bounds(at_least=1, at_most=MOST)
COUNT_OR_NONE = Bounds(at_least=0, at_most=MOST)
POSITIVE = Bounds(above=0, below=math.inf)
NOT_NEGATIVE = Bounds(at_least=0, below=math.inf)
SHARE = Bounds(at_least=0, below=1)


class Settings(Protocol):
    """A dataclass whose fields are flags."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def rules(self, world_size: int) -> Iterator[Rule]: ...


def flag(
    default: T,
    help: str,
    metavar: str | None = None,
    *,
    bounds: Bounds | None = None,
    choices: tuple[T, ...] = (),
    words: Mapping[str, T] | None = None,
    fixed: bool = False,
    once: bool = False,
) -> T:
    """Declare a field together with its flag.

    Args:
        bounds: of a number.
        choices: all that it may be.
        words: that stand for a number on the command line.
        fixed: a run that is resumed must have the value that it was started with: its checkpoints fit no other.
        once: it says something of one start alone, and a run that is resumed does not take it over.
    """
    metavar = f"{{{','.join(map(str, choices))}}}" if choices else metavar
    known = {"help": help, "metavar": metavar, "bounds": bounds, "choices": choices, "fixed": fixed, "once": once}
    return field(default=default, metadata=known | {"words": dict(words or {})})


def other_default(kind: type, name: str, default: T) -> T:
    """Declare a field of `kind` again, with another default."""
    (declared,) = (f for f in fields(kind) if f.name == name)
    return field(default=default, metadata=declared.metadata)


def flag_of(field_name: str) -> str:
    """Return how a field of the settings is written on the command line."""
    return "--" + field_name.replace("_", "-")


def check(settings: Settings, world_size: int) -> None:
    """Check each setting, and then that they fit each other and the number of ranks.

    Args:
        settings: all flags.
        world_size: number of ranks.
    Raises:
        ValueError: the first rule that is broken, with the values that break it.
    """
    for f in fields(settings):
        value, bounds, choices = getattr(settings, f.name), f.metadata["bounds"], f.metadata["choices"]
        if choices and value not in choices:
            raise ValueError(f"{flag_of(f.name)} must be one of {', '.join(map(str, choices))}, got {value}")
        if bounds is not None and value is not None and (rule := bounds.broken_by(value)):
            raise ValueError(f"{flag_of(f.name)} must be {rule}, got {value}")
    for holds, rule in settings.rules(world_size):
        if not holds:
            raise ValueError(rule)
