"""How counts are said."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Say how many there are of something: 1 step, 2 steps, 3 batches."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"
