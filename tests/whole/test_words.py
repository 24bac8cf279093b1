"""Counts in messages: one of something is no plural."""

from collections.abc import Callable

import numpy as np
import pytest

import minigrad as mg
from distributed import Mesh, SoloCommunicator
from minigrad.autodiff.backprop import backward_with_grad
from minigrad.words import counted
from pipeline import BW, F, from_text, lower
from pipeline.schedules import words
from pipeline.schedules.held import rank_bytes
from pipeline.schedules.schedule import SCHEDULES


@pytest.mark.parametrize("say", [counted, words.counted])
def test_a_count_and_its_noun(say: Callable[[int, str], str]) -> None:
    assert [say(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert [say(number, "micro-batch") for number in (1, 8)] == ["1 micro-batch", "8 micro-batches"]


ONE = mg.Tensor([1.0])
MESSAGES = {
    r"got dp=2, pp=1 and 1 rank$": lambda: Mesh(SoloCommunicator(), dp=2),
    r"got shape \(2, 3\) and 1 rank$": lambda: SoloCommunicator().reduce_scatter(np.zeros((2, 3))),
    r"one row for each of 1 rank, got shape \(2,\)": lambda: SoloCommunicator().all_to_all(np.zeros(2)),
    r"mine is written for 1 rank and 1 micro-batch, got 2 and 3": lambda: from_text("0F0,0BW0", "mine").orders(2, 3),
    r"mine is written for 1 rank, got 2": lambda: from_text("0F0,0BW0", "mine").rank_of(0, 2),
    r"from a stage to a later one, of 1 stage, got 0-1": lambda: lower(
        [[F(0, 0), BW(0, 0)]], rank_of=lambda stage, ranks: 0, num_stages=1, skips=[(0, 1)]
    ),
    r"1f1b has 1 stage, got 0": lambda: rank_bytes([], SCHEDULES["1f1b"], num_ranks=1, num_microbatches=1),
    r"backward of 1 output needs as many grads, got 2": lambda: backward_with_grad([ONE], [np.ones(1)] * 2),
}


@pytest.mark.parametrize("message", MESSAGES)
def test_one_is_no_plural(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MESSAGES[message]()
