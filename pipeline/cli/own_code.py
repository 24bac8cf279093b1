"""Errors of a person's own code, which a command calls: what it was, and where in their file, on one line."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

_PACKAGES = Path(__file__).parents[2]
_NOT_OWN = (
    *(f"{_PACKAGES / name}{os.sep}" for name in ("minigrad", "distributed", "pipeline")),
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<",  # what has no file
)


def place_of(error: BaseException) -> str | None:
    """Return the last line of a person's own file that an error came through, as `own.py:12`, or None."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_OWN)]
    if not own:
        return None
    path = Path(own[-1].filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{own[-1].lineno}"


def one_line(error: BaseException) -> str:
    """Say what an exception says, and where in a person's own file it came from."""
    place = place_of(error)
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if place is None else f"{words} ({place})"
