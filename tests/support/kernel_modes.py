"""Which kernels a test runs with, whatever is installed and however small its arrays are."""

from __future__ import annotations

import sys

import pytest

from minigrad import kernels

MODES = ["numpy", "numba"]


def use_kernels(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let arrays of every size have the kernels of this mode; skip the test where they are not to be had."""
    if mode == "numba":
        pytest.importorskip("numba")
    monkeypatch.setattr(kernels, "_LARGE", 0 if mode == "numba" else sys.maxsize)
