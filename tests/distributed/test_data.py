"""Samplers and windows of tokens: what each replica draws, in any layout and after any restart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.data.batches import Sampler, TokenBatches, validation_batches

LAYOUTS = [(1, 1), (4, 1), (4, 2), (4, 4), (7, 2), (7, 3), (5, 4), (64, 3)]  # batch_size, size


def draw(num_samples: int, *, num_batches: int, batch_size: int, size: int = 1, **options: Any) -> list[list[int]]:
    """Return whole batches, as the shares of all replicas put together."""
    replicas = [
        Sampler(num_samples, batch_size=batch_size, rank=rank, size=size, **{"seed": 0, **options})
        for rank in range(size)
    ]
    return [np.concatenate([replica.next() for replica in replicas]).tolist() for _ in range(num_batches)]


def stream(num_samples: int, length: int, **options: Any) -> list[int]:
    return [batch[0] for batch in draw(num_samples, num_batches=length, batch_size=1, **options)]


@pytest.mark.parametrize("num_samples", [1, 2, 10, 1000])
def test_an_epoch_draws_each_sample_once(num_samples: int) -> None:
    drawn = np.reshape(stream(num_samples, 4 * num_samples), (4, num_samples))
    for epoch in drawn:
        assert sorted(epoch.tolist()) == list(range(num_samples))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    first, second = np.reshape(stream(50, 100), (2, 50)).tolist()
    assert first != second != list(range(50)) != first
    assert [first, second] == np.reshape(stream(50, 100), (2, 50)).tolist()
    others = [stream(50, 50, seed=seed) for seed in (1, 2**64 - 1)]
    assert all(order not in (first, second) for order in others)
    assert others[0] != others[1]


def test_the_order_is_this_one() -> None:
    """Fixed for ever: a run that goes on with a newer version must find its place in the same order."""
    assert stream(8, 16, seed=3) == [6, 1, 5, 2, 7, 4, 3, 0, 7, 3, 5, 6, 4, 0, 2, 1]


def test_every_sample_comes_first_about_as_often() -> None:
    firsts = np.bincount([stream(4, 1, seed=seed)[0] for seed in range(400)])
    assert len(firsts) == 4
    assert firsts.min() > 70


def test_unshuffled_samples_come_as_they_lie() -> None:
    assert draw(5, num_batches=4, batch_size=3, shuffle=False) == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


@pytest.mark.parametrize(("batch_size", "size"), LAYOUTS)
@pytest.mark.parametrize("num_samples", [1, 3, 20])
def test_shares_are_consecutive_parts_of_the_same_batch(num_samples: int, batch_size: int, size: int) -> None:
    expected = np.reshape(stream(num_samples, 5 * batch_size), (5, batch_size)).tolist()
    assert draw(num_samples, num_batches=5, batch_size=batch_size, size=size) == expected


@pytest.mark.parametrize(("batch_size", "size"), LAYOUTS)
def test_shares_are_as_equal_as_can_be(batch_size: int, size: int) -> None:
    shares = [len(Sampler(9, batch_size=batch_size, seed=0, rank=r, size=size).next()) for r in range(size)]
    assert sum(shares) == batch_size
    assert max(shares) - min(shares) <= 1


def test_samples_are_int64_of_ones_own() -> None:
    sampler = Sampler(10, batch_size=4, seed=0)
    samples = sampler.next()
    assert samples.dtype == np.int64
    samples[:] = -1
    sampler.load_state_dict(sampler.state_dict() | {"position": 0})
    assert sampler.next().min() >= 0


def test_position_and_epoch_count_all_replicas() -> None:
    sampler = Sampler(10, batch_size=4, seed=0, rank=1, size=2)
    seen = []
    for _ in range(6):
        seen.append((sampler.position, sampler.epoch))
        sampler.next()
    assert seen == [(0, 0), (4, 0), (8, 0), (12, 1), (16, 1), (20, 2)]


def test_samples_by_epoch_are_cut_where_an_epoch_ends() -> None:
    sampler = Sampler(5, batch_size=13, seed=0, shuffle=False)
    sampler.next()
    parts = [(epoch, samples.tolist()) for epoch, samples in sampler.next_by_epoch()]
    assert parts == [(2, [3, 4]), (3, [0, 1, 2, 3, 4]), (4, [0, 1, 2, 3, 4]), (5, [0])]
    assert sampler.position == 26


@given(
    num_samples=st.integers(1, 30),
    seed=st.integers(0, 2**64 - 1),
    phases=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4)), min_size=1, max_size=4),
)
def test_a_run_goes_on_in_any_layout(num_samples: int, seed: int, phases: list[tuple[int, int, int]]) -> None:
    """Each phase of the run has a batch size, a number of replicas and of batches; no sample is lost or repeated."""
    state, drawn = Sampler(num_samples, batch_size=1, seed=seed).state_dict(), []
    for extra, size, num_batches in phases:
        replicas = [Sampler(num_samples, batch_size=size + extra, seed=seed, rank=r, size=size) for r in range(size)]
        for replica in replicas:
            replica.load_state_dict(state)
        drawn += [sample for _ in range(num_batches) for replica in replicas for sample in replica.next().tolist()]
        states = [replica.state_dict() for replica in replicas]
        assert states == [state | {"position": len(drawn)}] * size
        state = states[0]
    assert drawn == stream(num_samples, len(drawn), seed=seed)


def test_going_back_draws_the_same_again() -> None:
    sampler = Sampler(5, batch_size=3, seed=0)
    first = [sampler.next().tolist() for _ in range(7)]
    sampler.load_state_dict(sampler.state_dict() | {"position": np.int64(3)})
    assert [sampler.next().tolist() for _ in range(6)] == first[1:]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 0}, "num_samples must be at least 1, got 0"),
        ({"rank": 2, "size": 2}, "rank must be from 0 to size - 1, got rank=2 and size=2"),
        ({"rank": -1}, "rank must be from 0 to size - 1, got rank=-1 and size=1"),
        ({"size": 0}, "rank must be from 0 to size - 1, got rank=0 and size=0"),
        ({"size": 5}, "batch_size must give each replica a sample, got 4 and 5"),
        ({"batch_size": 0}, "batch_size must give each replica a sample, got 0 and 1"),
        ({"seed": -1}, r"seed must be from 0 to 2\*\*64 - 1, got -1"),
        ({"seed": 2**64}, r"seed must be from 0 to 2\*\*64 - 1, got 18446744073709551616"),
    ],
)
def test_a_sampler_that_cannot_be_is_refused(changes: dict[str, int], message: str) -> None:
    arguments = {"num_samples": 10, "batch_size": 4, "seed": 0, **changes}
    with pytest.raises(ValueError, match=message):
        Sampler(arguments.pop("num_samples"), **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": 2}, r"^a state of data must have position, num_samples, seed, shuffle, got \{"),
        *(
            ({"position": p}, r"^the position in the data must be an integer from 0 to 2\*\*63 - 1, got ")
            for p in (-1, 1.5, "3", None, 2**63)
        ),
        ({"num_samples": 11}, "^the data must be the same as before, but num_samples was 11, and is 10$"),
        ({"seed": 3}, "^the data must be the same as before, but seed was 3, and is 0$"),
        ({"shuffle": 0}, "^the data must be the same as before, but shuffle was 0, and is 1$"),
    ],
)
def test_a_state_that_is_none_or_of_other_data_is_refused(change: dict[str, Any], message: str) -> None:
    sampler = Sampler(10, batch_size=4, seed=0)
    sampler.next()
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(sampler.state_dict() | change)
    with pytest.raises(ValueError, match=r"^a state of data must have"):
        sampler.load_state_dict({})
    assert sampler.position == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.arange(50) + 1}, "crc32 was"),
        ({"tokens": np.arange(50) ** 2}, "crc32 was"),  # of equal length and with the same first token
        ({"tokens": np.arange(51)}, "num_tokens was 50, and is 51"),
        ({"context": 9}, "context was 8, and is 9|num_samples was 5, and is 4"),
        ({"seed": 3}, "seed was 2, and is 3"),
    ],
)
def test_other_tokens_are_known_as_such(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"tokens": np.arange(50), "batch_size": 3, "context": 8, "seed": 2}
    state = TokenBatches(**arguments).state_dict()
    with pytest.raises(ValueError, match=rf"^the data must be the same as before, but ({message})"):
        TokenBatches(**arguments | changes).load_state_dict(state)
    TokenBatches(**arguments | {"batch_size": 1, "rank": 0, "size": 1}).load_state_dict(state)


# Windows. Each token is its own position, so a window shows where it was cut.


@pytest.mark.parametrize(("num_tokens", "context"), [(100, 8), (96, 8), (103, 8), (50, 1), (16, 8), (15, 8), (9, 8)])
def test_an_epoch_visits_windows_that_do_not_overlap(num_tokens: int, context: int) -> None:
    batches = TokenBatches(np.arange(num_tokens), batch_size=1, context=context, seed=0)
    assert batches.num_windows == max(1, num_tokens // context - 1)
    first_starts = set()
    for _ in range(40):
        windows = [batches.next() for _ in range(batches.num_windows)]
        for x, y in windows:
            assert x.shape == y.shape == (1, context)
            assert x.dtype == y.dtype == np.int64
            np.testing.assert_array_equal(x[0], x[0, 0] + np.arange(context))
            np.testing.assert_array_equal(y, x + 1)
        starts = sorted(int(x[0, 0]) for x, _ in windows)
        assert starts == list(range(starts[0], starts[0] + batches.num_windows * context, context))
        assert starts[0] >= 0
        assert starts[-1] + context < num_tokens
        first_starts.add(starts[0])
    assert len(first_starts) > 1 or num_tokens == batches.num_windows * context + 1  # there is no other place


@pytest.mark.parametrize("num_tokens", [9, 12, 15, 16, 23, 24, 31])
def test_all_tokens_come_to_be_seen_as_input_and_as_target(num_tokens: int) -> None:
    batches = TokenBatches(np.arange(num_tokens), batch_size=1, context=8, seed=1)
    seen_x, seen_y = np.zeros(num_tokens, bool), np.zeros(num_tokens, bool)
    for _ in range(200):
        x, y = batches.next()
        seen_x[x] = seen_y[y] = True
    assert seen_x[:-1].all()
    assert seen_y[1:].all()
    assert not seen_x[-1]
    assert not seen_y[0]


def starts(batches: TokenBatches, num_batches: int) -> list[list[int]]:
    return [batches.next()[0][:, 0].tolist() for _ in range(num_batches)]


@pytest.mark.parametrize(("batch_size", "size"), LAYOUTS)
def test_replicas_read_consecutive_rows_of_the_same_batch(batch_size: int, size: int) -> None:
    """64 rows of 11 windows: a share crosses several epochs, each with an offset of its own."""
    tokens = np.arange(100, dtype=np.uint16)
    whole = TokenBatches(tokens, batch_size=batch_size, context=8, seed=5)
    replicas = [
        TokenBatches(tokens, batch_size=batch_size, context=8, seed=5, rank=rank, size=size) for rank in range(size)
    ]
    for _ in range(6):
        parts = [replica.next() for replica in replicas]
        for part, expected in zip(zip(*parts, strict=True), whole.next(), strict=True):
            np.testing.assert_array_equal(np.concatenate(part), expected)


@pytest.mark.parametrize("num_before", [0, 1, 3, 10])
def test_batches_go_on_as_if_nothing_had_happened(num_before: int) -> None:
    def fresh(**changes: int) -> TokenBatches:
        return TokenBatches(np.arange(50), **{"batch_size": 3, "context": 8, "seed": 2, **changes})

    undisturbed, stopped, resumed = fresh(), fresh(), fresh()
    expected = starts(undisturbed, num_before + 8)[num_before:]
    starts(stopped, num_before)
    resumed.load_state_dict(stopped.state_dict())
    assert starts(resumed, 8) == expected

    smaller = fresh(batch_size=2)
    smaller.load_state_dict(stopped.state_dict())
    assert np.reshape(starts(smaller, 12), -1).tolist() == np.reshape(expected, -1).tolist()


def test_where_the_windows_start_depends_on_the_seed() -> None:
    one, other = (TokenBatches(np.arange(60), batch_size=1, context=40, seed=seed) for seed in (0, 1))
    assert one.num_windows == 1
    assert starts(one, 10) != starts(other, 10)


@pytest.mark.parametrize(
    ("tokens", "changes", "message"),
    [
        (np.arange(8), {}, "context must be at least 1 and below the number of tokens, got 8 and 8"),
        (np.arange(8), {"context": 0}, "context must be at least 1 and below the number of tokens, got 0 and 8"),
        (np.arange(9.0), {}, r"tokens must be integers in one dimension, got float64 of shape \(9,\)"),
        (np.ones((9, 9), int), {}, r"tokens must be integers in one dimension, got int64 of shape \(9, 9\)"),
    ],
)
def test_tokens_without_windows_are_refused(tokens: Any, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenBatches(tokens, **{"batch_size": 1, "context": 8, "seed": 0, **changes})
    with pytest.raises(ValueError, match=message):
        validation_batches(tokens, **{"batch_size": 1, "context": 8, **changes})


def test_validation_windows_cover_the_tokens_once() -> None:
    batches = list(validation_batches(np.arange(30, dtype=np.uint8), batch_size=2, context=7))
    assert [len(x) for x, _ in batches] == [2, 2]
    assert all(part.dtype == np.int64 for batch in batches for part in batch)
    assert np.concatenate([x.reshape(-1) for x, _ in batches]).tolist() == list(range(28))
    assert np.concatenate([y.reshape(-1) for _, y in batches]).tolist() == list(range(1, 29))


@pytest.mark.parametrize(("length", "sizes"), [(29, [4]), (28, [3]), (50, [4, 3]), (8, [1])])
def test_validation_batches_are_of_nearly_equal_size(length: int, sizes: list[int]) -> None:
    assert [len(x) for x, _ in validation_batches(np.arange(length), batch_size=3, context=7)] == sizes


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_replicas_take_validation_batches_in_turn(size: int) -> None:
    def first_tokens(rank: int, size: int) -> list[int]:
        batches = validation_batches(np.arange(50), batch_size=1, context=7, rank=rank, size=size)
        return [int(x[0, 0]) for x, _ in batches]

    assert [first_tokens(rank, size) for rank in range(size)] == [
        first_tokens(0, 1)[rank::size] for rank in range(size)
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"rank": 1}, "rank must be from 0 to size - 1, got rank=1 and size=1"),
    ],
)
def test_validation_that_cannot_be_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validation_batches(np.arange(50), **{"batch_size": 1, "context": 7, **changes})


def test_a_dataset_smaller_than_the_world_is_gone_through_as_often_as_it_takes() -> None:
    """Every rank has a sample in each step, and each sample its turn as often as the others."""
    samplers = [Sampler(3, batch_size=4, seed=0, rank=rank, size=4) for rank in range(4)]
    taken = [sampler.next().tolist() for _ in range(3) for sampler in samplers]
    assert all(len(own) == 1 for own in taken)
    assert sorted(sample for own in taken for sample in own) == sorted([0, 1, 2] * 4)
    with pytest.raises(ValueError, match="batch_size must give each replica a sample, got 3 and 4"):
        Sampler(3, batch_size=3, seed=0, rank=0, size=4)
