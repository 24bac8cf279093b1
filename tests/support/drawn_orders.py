"""Orders and programs written as text, the way they print, so that a test shows what it is about."""

from pipeline import Action


def read(drawing: str) -> list[list[Action]]:
    """Read one rank a line, actions between spaces."""
    return [[Action.parse(text) for text in line.split()] for line in drawing.strip().splitlines()]
