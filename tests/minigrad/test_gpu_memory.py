"""How memory outside of CuPy's pools is asked for; CuPy is a stand-in here, and no GPU is needed."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minigrad import backend


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"error {status}")
        self.status = status


class Card:
    """A CuPy that has room for nothing until its pool gives back what it keeps, or never."""

    def __init__(self, status: int, *, keeps: bool) -> None:
        self._status, self._keeps = status, keeps
        self.is_full = True
        runtime = SimpleNamespace(CUDARuntimeError=CUDARuntimeError)
        self.cuda = SimpleNamespace(runtime=runtime, using_allocator=lambda _: nullcontext())

    def empty(self, size: int, dtype: Any) -> Any:
        if self.is_full:
            raise CUDARuntimeError(self._status)
        return np.empty(size, dtype)

    def get_default_memory_pool(self) -> Any:
        def free_all_blocks() -> None:
            self.is_full = self._keeps

        return SimpleNamespace(free_all_blocks=free_all_blocks)


def test_a_pool_gives_back_what_a_library_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(2, keeps=False)
    monkeypatch.setattr(backend, "cupy", lambda: card)
    assert backend.outside_pools(5, np.uint8).shape == (5,)


def test_no_memory_is_a_memory_error_and_else_an_error_stays_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of products are timed where there is memory for it, and the first one is taken where there is none."""
    monkeypatch.setattr(backend, "cupy", lambda: Card(2, keeps=True))
    with pytest.raises(MemoryError, match=r"no room for 4,000 bytes outside of CuPy's pools"):
        backend.outside_pools(1000, np.float32)
    monkeypatch.setattr(backend, "cupy", lambda: Card(700, keeps=False))
    with pytest.raises(CUDARuntimeError, match="error 700"):
        backend.outside_pools(1000, np.float32)
