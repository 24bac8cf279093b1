"""In-place changes: noted where the memory is owned, seen by every backward that still needs the old values."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fake_cupy
import numpy as np
import pytest

import minigrad as mg
from minigrad import versions
from minigrad.backend import memory_range
from minigrad.versions import Version, tick


def leaf(*shape: int) -> mg.Tensor:
    return mg.Tensor(np.arange(1.0, 1.0 + np.prod(shape)).reshape(shape), requires_grad=True)


# -- one owner ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "stop", "seen"), [(0, 2, False), (0, 3, True), (2, 4, True), (3, 4, True), (3, 8, True), (4, 8, False)]
)
def test_a_change_concerns_what_it_overlaps_and_not_what_it_touches(start: int, stop: int, seen: bool) -> None:
    memory, version = np.zeros(8), Version()
    before = tick()
    version.note(memory[2:4], "w")
    assert version.since(before, memory[start:stop]) == ("w" if seen else None)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_memory_of_a_flipped_array_is_all_that_it_touches(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # From a negative stride the last element came out as the end: a range of nothing.
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    whole = np.arange(12.0).reshape(3, 4)
    memory = whole.view(fake_cupy.ndarray) if on_gpu else whole
    first = memory_range(memory)[0]
    assert memory_range(memory[::-1, 1:]) == (first + 8, first + 96)
    assert memory_range(memory[1:, ::-2]) == (first + 40, first + 96)
    assert memory_range(memory[:0, ::-1])[0] == memory_range(memory[:0, ::-1])[1]


def test_only_a_later_change_counts() -> None:
    memory, version = np.zeros(8), Version()
    version.note(memory, "w")
    assert version.since(version.newest, memory) is None
    assert version.since(version.newest - 1, memory) == "w"
    between = tick()
    version.note(memory[:2], "v")
    assert (version.since(between, memory[2:]), version.since(between, memory[:2])) == (None, "v")


def test_the_same_change_again_and_again_takes_no_more_memory() -> None:
    memory, version = np.zeros(8), Version()
    version.note(memory, "w")
    size = sys.getsizeof(version._changes)
    for _ in range(1000):
        version.note(memory, "w")
    assert sys.getsizeof(version._changes) == size


def test_changes_of_four_threads_are_all_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    # One log for all threads was a dictionary that grew while another thread went through it, and its counter could
    # lose a change of one of two threads that noted at the same time.
    memory, version, overtaken = np.zeros((4, 4)), Version(), []

    def tick_and_let_others_run() -> int:
        newest, now = version.newest, tick()
        time.sleep(1e-4 * (now % 3))
        if version.newest != newest:
            overtaken.append(now)
        return now

    monkeypatch.setattr(versions, "tick", tick_and_let_others_run)

    def change(thread: int) -> bool:
        for i in range(300):
            before = tick()
            version.note(memory[thread, i % 4 : i % 4 + 1], f"{thread}")
            if version.since(before, memory[thread]) != f"{thread}":
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(change, range(4)))
    assert not overtaken
    assert version.newest == max(when for when, _ in version._changes.values())


def test_threads_with_models_of_their_own_do_not_meet() -> None:
    def change(_: int) -> int:
        own = mg.Tensor(np.ones(3))
        for _ in range(5000):
            own.data = np.ones(3)
        return len(own.version._changes)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(change, range(4))) == [1] * 4


# -- who needs the values -----------------------------------------------------------------


def change(tensor: mg.Tensor) -> None:
    tensor.data = np.zeros(tensor.shape)


def refused(call: Callable[[], Any], name: str = "tensor") -> None:
    with pytest.raises(RuntimeError, match=f"needs {name} as it was in the forward, but it was changed in place"):
        call()


@pytest.mark.parametrize(
    "constant",
    [mg.Tensor(np.ones(3)), mg.nn.Buffer(np.ones(3), "b"), mg.Parameter(np.ones(3), "w", requires_grad=False)],
)
def test_a_constant_counts(constant: mg.Tensor) -> None:
    y = (leaf(3) * constant).sum()
    change(constant)
    refused(lambda: mg.backward(y), constant.label)


def test_what_was_computed_without_a_tape_counts() -> None:
    with mg.no_grad():
        mask = mg.exp(leaf(3))
    y = (leaf(3) * mask).sum()
    change(mask)
    refused(lambda: mg.backward(y))


def test_what_an_op_made_counts() -> None:
    y = mg.exp(leaf(3))
    total = (y * leaf(3)).sum()
    change(y)
    refused(lambda: mg.backward(total))


@pytest.mark.parametrize("make", [lambda: leaf(3), lambda: mg.exp(leaf(3)), lambda: mg.Parameter(np.ones(3), "w")])
def test_a_detached_tensor_changes_what_it_shares(make: Callable[[], mg.Tensor]) -> None:
    x = make()
    y = (x * leaf(3)).sum()
    change(x.detach())
    refused(lambda: mg.backward(y))


def test_a_change_before_a_move_counts_after_it() -> None:
    w = mg.Parameter(np.ones(3), "w")
    y = (leaf(3) * w).sum()
    change(w)
    mg.FlatBuffer.adopt([w])
    refused(lambda: mg.backward(y), "'w'")


def test_a_change_by_a_hook_in_the_middle_of_a_backward_counts() -> None:
    first, second = mg.Parameter(np.ones(3), "first"), mg.Parameter(np.ones(3), "second")
    for owner in (None, mg.FlatBuffer.adopt):
        if owner is not None:
            owner([first, second])
        y = ((leaf(3) * first) * second).sum()
        refused(lambda y=y: mg.backward_with_hooks(y, on_grad_ready=lambda _: change(first)), "'first'")
        y = ((leaf(3) * first) * second).sum()
        refused(lambda y=y: mg.backward_with_hooks(y, between_ops=lambda: change(first)), "'first'")


def test_a_constant_of_a_recomputed_block_counts() -> None:
    buffer = mg.nn.Buffer(np.ones(3), "b")
    y = mg.recompute(lambda x: mg.exp(x * buffer), leaf(3)).sum()
    refused(lambda: mg.backward_with_hooks(y, between_ops=lambda: change(buffer)), "'b'")


def test_the_weight_half_sees_a_change_of_a_view_that_the_input_half_walked() -> None:
    x, w = leaf(6), mg.Parameter(np.ones((3, 2)), "w")
    deferred = mg.backward_input((x.reshape(2, 3) @ w).sum())
    change(x)
    refused(lambda: mg.backward_weight(deferred))


def test_a_tensor_that_an_op_made_has_no_version_until_somebody_asks() -> None:
    y = mg.exp(leaf(3))
    assert y._version is None
    assert y.node is not None
    assert y.version in y.node.versions
    assert y.version is y.version
