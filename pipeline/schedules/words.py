"""How counts and amounts of memory are said."""

from __future__ import annotations

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def counted(number: int, noun: str) -> str:
    """Say how many there are of something: 1 stage, 2 stages."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"


def amount(value: float) -> str:
    """Say an amount of memory: from a KiB on it is of bytes, with a unit."""
    unit, size = next(((u, size) for u, size in reversed(UNITS.items()) if value >= size), ("", 1))
    return f"{value / size:.4g}{unit}"
