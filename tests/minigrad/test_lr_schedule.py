from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from minigrad.lr_schedule import warmup_cosine


def test_warmup_is_linear_and_the_first_step_learns() -> None:
    lr = warmup_cosine(1.0, num_steps=10, num_warmup_steps=4)
    assert [lr(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_the_rest_is_half_a_cosine_to_the_floor() -> None:
    lr = warmup_cosine(3.0, num_steps=12, num_warmup_steps=4, floor=1.0)
    np.testing.assert_allclose(
        [lr(4 + i) for i in range(9)], [2 + math.cos(math.pi * i / 8) for i in range(9)], rtol=1e-15
    )
    assert lr(8) == pytest.approx(2.0)
    assert lr(12) == lr(1000) == 1.0


def test_without_warmup_it_starts_at_the_peak() -> None:
    assert warmup_cosine(0.5, num_steps=10)(0) == 0.5


@pytest.mark.parametrize("num_warmup_steps", [0, 5])
def test_a_run_of_warmup_only_has_no_cosine(num_warmup_steps: int) -> None:
    lr = warmup_cosine(1.0, num_steps=num_warmup_steps, num_warmup_steps=num_warmup_steps)
    assert [lr(step) for step in range(num_warmup_steps)] == [(step + 1) / 5 for step in range(num_warmup_steps)]
    assert lr(num_warmup_steps) == lr(num_warmup_steps + 1) == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_steps": 3, "num_warmup_steps": 4}, "num_warmup_steps must be between 0 and num_steps, got 4 and 3"),
        ({"num_steps": 3, "num_warmup_steps": -1}, "num_warmup_steps must be between 0 and num_steps, got -1 and 3"),
        ({"num_steps": 3, "floor": 2.0}, "floor must be between 0 and peak, which is finite, got 2.0 and 1.0"),
        ({"num_steps": 3, "floor": -0.1}, "floor must be between 0 and peak, which is finite, got -0.1 and 1.0"),
    ],
)
def test_bad_numbers_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        warmup_cosine(1.0, **arguments)
