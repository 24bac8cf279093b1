"""Random numbers are keyed: any cut of the batch, in any order, draws the numbers that the whole batch would."""

from __future__ import annotations

import numpy as np
import pytest

from minigrad import rng
from minigrad.backend import Array

FIRST = 0.9191434554479726  # of what a run with seed 0 draws: a key that changes is another run
MASK = "9aee4779dd5f738f"  # of 64 values, likewise
SHAPES = [(12,), (12, 1), (12, 7), (12, 8), (12, 9), (12, 3, 5), (12, 2, 4, 4), (12, 0)]


def mask(
    shape: tuple[int, ...], *, rate: float = 0.4, name: str = "drop", first_sample: int = 0, step: int = 3
) -> Array:
    with rng.scope(seed=1, step=step, first_sample=first_sample):
        return rng.keep_mask(name, shape, rate)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sizes", [(6, 6), (4, 4, 4), (5, 4, 3), (1, 10, 1), (12, 0)])
def test_masks_of_micro_batches_make_the_mask_of_the_batch(shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    whole = mask(shape)
    with rng.scope(seed=1, step=3):
        starts = np.cumsum([0, *sizes[:-1]])
        parts = {}
        for start, size in reversed(list(zip(starts.tolist(), sizes, strict=True))):  # in another order of time
            with rng.offset(start):
                parts[start] = rng.keep_mask("drop", (size, *shape[1:]), 0.4)
    np.testing.assert_array_equal(np.concatenate([parts[start] for start in starts.tolist()][: len(sizes)]), whole)


@pytest.mark.parametrize("shape", SHAPES)
def test_masks_of_shards_and_their_micro_batches_make_the_mask_of_the_batch(shape: tuple[int, ...]) -> None:
    shards = []
    for first_sample, sizes in [(0, (3, 2)), (5, (4, 3))]:
        with rng.scope(seed=1, step=3, first_sample=first_sample):
            start = 0
            for size in sizes:
                with rng.offset(start):
                    shards.append(rng.keep_mask("drop", (size, *shape[1:]), 0.4))
                start += size
    np.testing.assert_array_equal(np.concatenate(shards), mask(shape))


def test_a_mask_depends_on_seed_step_name_and_sample() -> None:
    base = mask((4, 1000))
    np.testing.assert_array_equal(base, mask((4, 1000)))
    with rng.scope(seed=2, step=3):
        other_seed = rng.keep_mask("drop", (4, 1000), 0.4)
    others = [other_seed, mask((4, 1000), step=4), mask((4, 1000), name="drop2"), mask((4, 1000), first_sample=1)]
    for other in [*others, base[[1, 2, 3, 0]]]:
        assert 0.4 < (other == base).mean() < 0.64  # 0.52 for masks that are independent


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 23, "drop"), (12, 3, "drop")),
        ((1, 2, "3drop"), (1, 23, "drop")),
        ((12, 3, "4"), (1, 23, "4")),
        ((1, 1, "1/drop"), (1, 11, "drop")),
        ((1, 0, "2/drop"), (1, 2, "drop")),
        ((0, 10, "drop"), (1, 0, "drop")),
    ],
)
def test_seed_step_and_name_do_not_run_into_each_other(one: tuple[int, int, str], other: tuple[int, int, str]) -> None:
    # A key that is written without separators draws for seed 1 at step 23 what seed 12 draws at step 3.
    masks = []
    for seed, step, name in (one, other):
        with rng.scope(seed=seed, step=step):
            masks.append(rng.keep_mask(name, (4, 1000), 0.4))
    assert 0.4 < (masks[0] == masks[1]).mean() < 0.64  # 0.52 for masks that are independent


@pytest.mark.parametrize(
    ("one", "other"),
    [(("init", 1, "2w"), ("init", 12, "w")), (("init", 0, "w"), ("data", 0, "w")), (("a", 1, "w"), ("a1", 0, "w"))],
)
def test_purpose_seed_and_name_do_not_run_into_each_other(
    one: tuple[str, int, str], other: tuple[str, int, str]
) -> None:
    assert (rng.named_generator(*one).random(8) != rng.named_generator(*other).random(8)).all()


def test_a_key_is_the_same_for_every_integer_type_and_in_every_process() -> None:
    with rng.scope(seed=np.int64(1), step=np.uint8(3)):  # type: ignore[arg-type]
        np.testing.assert_array_equal(rng.keep_mask("drop", (4, 1000), 0.4), mask((4, 1000)))
    assert rng.named_generator("init", 0, "fc.weight").random() == FIRST
    assert np.packbits(mask((1, 64))).tobytes().hex() == MASK


def test_the_order_of_layers_does_not_matter() -> None:
    with rng.scope(seed=0, step=0):
        a, b = rng.keep_mask("a", (2, 5), 0.5), rng.keep_mask("b", (2, 5), 0.5)
    with rng.scope(seed=0, step=0):
        np.testing.assert_array_equal(rng.keep_mask("b", (2, 5), 0.5), b)
        np.testing.assert_array_equal(rng.keep_mask("a", (2, 5), 0.5), a)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_the_rate_is_the_share_that_is_dropped(rate: float) -> None:
    dropped = ~mask((100, 1003), rate=rate)
    tolerance = 5 * np.sqrt(rate * (1 - rate) / dropped.size)
    assert abs(dropped.mean() - rate) <= tolerance
    # and so it is for every sample and for every place in a sample
    assert abs(dropped.mean(1) - rate).max() <= 10 * tolerance
    assert abs(dropped.mean(0) - rate).max() <= 0.25 * (rate > 0)


def test_a_mask_is_drawn_in_a_scope() -> None:
    assert rng.current_scope() is None
    with pytest.raises(
        RuntimeError, match=r"dropout 'drop' draws keyed .*: run the forward in minigrad\.rng\.scope\(seed=, step=\)"
    ):
        rng.keep_mask("drop", (2, 3), 0.5)
    with rng.offset(2), pytest.raises(RuntimeError, match="dropout 'drop' draws keyed random numbers"):
        rng.keep_mask("drop", (2, 3), 0.5)


def test_a_name_draws_once_in_a_forward() -> None:
    with rng.scope(seed=0, step=0):
        rng.keep_mask("drop", (2, 3), 0.5)
        with pytest.raises(RuntimeError, match="dropout 'drop' ran twice in one forward: its masks would be equal"):
            rng.keep_mask("drop", (2, 3), 0.5)
        with rng.offset(2):
            rng.keep_mask("drop", (2, 3), 0.5)  # another micro-batch is another forward


def test_scopes_nest_and_end_with_an_exception() -> None:
    with rng.scope(seed=0, step=0, first_sample=3):
        with pytest.raises(ZeroDivisionError), rng.scope(seed=1, step=1):
            1 / 0  # noqa: B018
        with rng.offset(4):
            inner = rng.current_scope()
            assert inner is not None
            assert inner.first_sample == 7
        outer = rng.current_scope()
        assert outer is not None
        assert (outer.seed, outer.first_sample) == (0, 3)
    assert rng.current_scope() is None


def test_a_named_generator_depends_on_its_three_keys_alone() -> None:
    def draw(purpose: str, seed: int, name: str) -> float:
        return float(rng.named_generator(purpose, seed, name).standard_normal())

    keys = [("init", 0, "w"), ("init", 1, "w"), ("init", 0, "v"), ("data", 0, "w")]
    first = [draw(*key) for key in keys]
    assert [draw(*key) for key in reversed(keys)] == first[::-1]
    assert len(set(first)) == 4
