"""Micro-batches: how a batch is cut, what each part weighs, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.runtime.microbatch import as_microbatches, check_used_once, shares, sizes, split


@given(num_microbatches=st.integers(1, 20), extra=st.integers(0, 50))
def test_split_keeps_every_sample_in_order_in_parts_of_nearly_equal_size(num_microbatches, extra):
    batch = np.arange(num_microbatches + extra)
    parts = split(batch, num_microbatches)
    np.testing.assert_array_equal(np.concatenate(parts), batch)
    lengths = [len(part) for part in parts]
    assert lengths == sizes(len(batch), num_microbatches)
    assert len(parts) == num_microbatches
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_the_larger_parts_come_first():
    assert sizes(7, 3) == [3, 2, 2]


def test_split_gives_views():
    batch = np.zeros((6, 2))
    assert all(np.shares_memory(part, batch) for part in split(batch, 4))


def test_weights_are_shares_of_the_samples():
    assert shares([3, 2, 2]) == [3 / 7, 2 / 7, 2 / 7]


def test_a_list_is_taken_as_it_is():
    parts = [np.zeros((2, 3)), np.zeros((1, 5))]
    taken = as_microbatches(parts, 2, "x")
    assert [part is given for part, given in zip(taken, parts, strict=True)] == [True, True]


def test_an_array_is_split_and_a_list_of_lists_is_two_micro_batches():
    assert [part.tolist() for part in as_microbatches(np.arange(3), 2, "x")] == [[0, 1], [2]]
    assert [part.tolist() for part in as_microbatches([[0, 1], [2]], 2, "x")] == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (np.float32(1), "a batch needs a first axis of samples, got a scalar of dtype float32"),
        (np.zeros((2, 5)), "at least one sample for each micro-batch, got 2 and 3"),
        (np.zeros((0, 5)), "got 0 and 3"),
        ([np.zeros(2)] * 2, "x: num_microbatches is 3, got a list of 2"),
        ([np.zeros(2), np.zeros(()), np.zeros(2)], r"x: micro-batch 1 needs a first axis of samples, got shape \(\)"),
        ([np.zeros(2), np.zeros(2), np.zeros((0, 4))], r"x: micro-batch 2 needs a first axis of samples, got .*\(0, 4"),
    ],
)
def test_a_wrong_batch_is_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        as_microbatches(batch, 3, "x")


def test_one_array_in_two_places_is_refused():
    twice = np.zeros(2)
    check_used_once([twice, np.zeros(2), twice.copy()])
    with pytest.raises(ValueError, match="x: each micro-batch can be used only once, but 0 and 2 are the same array"):
        check_used_once([twice, np.zeros(2), twice])
