"""Handwritten digits to learn: 1,797 images of 8 x 8 pixels, which come with scikit-learn.

Source: Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minigrad import no_grad
from minigrad.extras import needs
from minigrad.nn import Module

NUM_VALIDATION = 360
SPLIT_SEED = 0  # not the run's: every run is judged by the same digits


class Digits(NamedTuple):
    """Images x (n, 64), pixels from 0 to 1, and the digits y (n,) that they show."""

    x: NDArray[np.float32]
    y: NDArray[np.int64]


def load_digits() -> tuple[Digits, Digits]:
    """Return the digits to train on and those to validate with.

    They are the same on every machine.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        raise ValueError(needs("this script, whose digits come with it,", "scikit-learn", "examples")) from error
    x, y = datasets.load_digits(return_X_y=True)
    order = np.argsort(np.random.Philox(key=SPLIT_SEED).random_raw(len(y)), kind="stable")
    validation, train = order[:NUM_VALIDATION], order[NUM_VALIDATION:]
    x, y = (x / 16).astype(np.float32), y.astype(np.int64)
    return Digits(x[train], y[train]), Digits(x[validation], y[validation])


def accuracy(model: Module, digits: Digits) -> float:
    """Return the share of digits that the model reads right."""
    with no_grad():
        return float((model(digits.x).data.argmax(axis=1) == digits.y).mean())
