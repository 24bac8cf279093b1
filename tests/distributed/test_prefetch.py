"""Batches that are fetched ahead are the batches that there are, and their position is that of the last one given."""

from __future__ import annotations

import threading
from typing import Any

import fake_cupy
import numpy as np
import pytest

from distributed.data.batches import TokenBatches
from distributed.data.prefetch import PinnedUploads, Prefetched

TOKENS = np.arange(1000)


def plain() -> TokenBatches:
    return TokenBatches(TOKENS, batch_size=4, context=8, seed=3)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cuda":
        fake_cupy.install(monkeypatch)
    return str(request.param)


def test_batches_are_the_same_in_the_same_order(device: str) -> None:
    batches, expected = Prefetched(plain(), device), plain()
    for step in range(7):
        for found, want in zip(batches.next(), expected.next(), strict=True):
            np.testing.assert_array_equal(found, want)
        if step % 3:
            batches.prefetch()
            batches.prefetch()  # once is enough


def test_its_position_is_that_of_what_was_given(device: str) -> None:
    batches, expected = Prefetched(plain(), device), plain()
    for _ in range(3):
        batches.next()
        expected.next()
        batches.prefetch()
        assert batches.state_dict() == expected.state_dict()
    resumed = Prefetched(plain(), device)
    resumed.next()
    resumed.prefetch()  # of another place, and not to be given
    resumed.load_state_dict(batches.state_dict())
    assert resumed.state_dict() == batches.state_dict()
    for found, want in zip(resumed.next(), expected.next(), strict=True):
        np.testing.assert_array_equal(found, want)


def test_a_place_is_not_overwritten_before_its_batch_is_used_and_the_host_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uploads = PinnedUploads(fake_cupy.install(monkeypatch))
    held = threading.Event()
    uploads.put((np.full(3, 0.0),))
    (first,) = uploads.take()
    uploads._stream.enqueue(lambda: held.wait(fake_cupy.PATIENCE))  # a GPU that is busy copying
    uploads.put((np.full(3, 1.0),))  # the other place: nobody waits
    assert (np.asarray(first) == 0).all()
    held.set()
    (second,) = uploads.take()
    assert (np.asarray(second) == 1).all()
    assert (np.asarray(first) == 0).all()
    uploads.put((np.full(3, 2.0),))
    (third,) = uploads.take()
    assert third is first
    assert (np.asarray(third) == 2).all()
    uploads.put((np.full((2, 2), 3.0), np.arange(2)))  # of another shape: other memory
    other: Any = uploads.take()
    assert [array.shape for array in other] == [(2, 2), (2,)]


def test_a_device_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="device must be one of cpu, cuda, got 'tpu'"):
        Prefetched(plain(), "tpu")
