"""The text that the example scripts learn."""

import math
from pathlib import Path

import numpy as np
import pytest

from common import text

TEXT = bytes(range(200))  # each byte is its own position


def test_default_text_is_long_and_the_same_each_time() -> None:
    loaded = text.load_text(None)
    assert 400_000 < len(loaded) < 1_000_000
    assert loaded == text.load_text(None)


def test_text_from_a_file_is_taken_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xff\r\n\x00")
    assert text.load_text(str(tmp_path / "text")) == b"\xff\r\n\x00"


def test_unreadable_text_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^--text must be a file that can be read, got .*gone: No such file"):
        text.load_text(str(tmp_path / "gone"))
    with pytest.raises(ValueError, match=r"^--text must be a file that can be read, got .*: Is a directory"):
        text.load_text(str(tmp_path))


def test_validation_is_the_tail() -> None:
    train, validation = text.split(TEXT, context=8)
    assert (train, validation) == (TEXT[:180], TEXT[180:])


@pytest.mark.parametrize(("length", "context"), [(200, 20), (0, 1), (9, 1)])
def test_text_shorter_than_a_window_is_refused(length: int, context: int) -> None:
    rule = "the text must give more than context bytes to training and to validation, got"
    with pytest.raises(
        ValueError, match=f"{rule} {length - length // 10} and {length // 10} bytes and context={context}"
    ):
        text.split(TEXT[:length], context=context)


def test_shortest_text_that_is_long_enough() -> None:
    _, validation = text.split(TEXT, context=19)
    ((x, y),) = text.validation_batches(validation, batch=4, context=19)
    assert x.tolist() == [list(validation[:-1])]
    assert y.tolist() == [list(validation[1:])]


def test_batch_is_windows_and_what_follows_each_byte() -> None:
    x, y = text.sample_batch(TEXT, batch=64, context=7, seed=1, step=2)
    assert x.shape == y.shape == (64, 7)
    assert x.dtype == y.dtype == np.int64
    np.testing.assert_array_equal(x, x[:, :1] + np.arange(7))
    np.testing.assert_array_equal(y, x + 1)


def test_batches_reach_both_ends_of_the_text() -> None:
    x, y = text.sample_batch(TEXT[:10], batch=100, context=7, seed=0, step=0)
    assert set(x[:, 0].tolist()) == {0, 1, 2}
    assert y.max() == 9


def test_batch_depends_on_seed_and_step_alone() -> None:
    def starts(seed: int, step: int) -> list[int]:
        return text.sample_batch(TEXT, batch=32, context=7, seed=seed, step=step)[0][:, 0].tolist()

    assert starts(3, 4) == starts(3, 4)
    assert starts(3, 4) != starts(3, 5)
    assert starts(3, 4) != starts(4, 4)
    assert starts(3, 4) != starts(4, 3)
    assert starts(2**64 - 1, 0) != starts(0, 0)


def test_validation_windows_cover_the_text_once() -> None:
    batches = list(text.validation_batches(TEXT[:30], batch=2, context=7))
    assert [len(x) for x, _ in batches] == [2, 2]
    assert np.concatenate([x.reshape(-1) for x, _ in batches]).tolist() == list(range(28))
    assert np.concatenate([y.reshape(-1) for _, y in batches]).tolist() == list(range(1, 29))


@pytest.mark.parametrize(("length", "sizes"), [(29, [4]), (28, [3]), (50, [4, 3]), (8, [1])])
def test_validation_batches_are_of_nearly_equal_size(length: int, sizes: list[int]) -> None:
    assert [len(x) for x, _ in text.validation_batches(TEXT[:length], batch=3, context=7)] == sizes


def test_trigram_table_on_the_default_text() -> None:
    train, validation = text.split(text.load_text(None), context=64)
    assert text.trigram_nats(train, validation) == pytest.approx(1.70, abs=0.05)


def test_trigram_table_by_hand() -> None:
    """Interpolated Kneser-Ney once more, one probability at a time."""
    train, validation = b"abracadabra abracadabra", b"abrazda"

    def probability(context: bytes, symbol: bytes, longer: set[bytes] | None) -> float:
        size = len(context) + 1
        grams = (
            [train[i : i + size] for i in range(len(train) - size + 1)] if longer is None else [g[1:] for g in longer]
        )
        after = [gram for gram in grams if gram[:-1] == context]
        shorter = 1 / 256 if size == 1 else probability(context[1:], symbol, set(grams))
        if not after:
            return shorter
        kept = max(after.count(context + symbol) - 0.75, 0)
        return (kept + 0.75 * len(set(after)) * shorter) / len(after)

    expected = [-math.log(probability(validation[i : i + 2], validation[i + 2 : i + 3], None)) for i in range(5)]
    assert text.trigram_nats(train, validation) == pytest.approx(np.mean(expected), rel=1e-12)
