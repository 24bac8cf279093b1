"""Many small cases in one test: pytest spends 4 ms on each test of its own, more than most of them compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def case(*what: Any) -> Iterator[None]:
    """Name the case that fails, in a note below what its error says."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in case {' '.join(map(str, what))}")
        raise
