"""The text that the example scripts learn."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from common import text
from distributed.data.batches import validation_batches

TEXT = np.arange(200, dtype=np.uint16)  # each token is its own position


def as_tokens(letters: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(letters, np.uint8)


def test_default_text_is_long_and_the_same_each_time() -> None:
    tokens = text.load_tokens(None)
    assert tokens.dtype == np.uint8
    assert 400_000 < len(tokens) < 1_000_000
    assert tokens.tobytes() == text.load_tokens(None).tobytes()


def test_default_text_needs_its_vocabulary() -> None:
    with pytest.raises(ValueError, match=r"^--text: tokens must be from 0 to --vocab - 1, .* and --vocab=50"):
        text.load_tokens(None, vocab_size=50)


def test_tokens_come_from_files_and_directories_and_are_checked(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_bytes(b"abc")
    assert text.load_tokens(str(tmp_path / "words.txt")).tobytes() == b"abc"
    assert text.load_tokens(str(tmp_path)).tobytes() == b"abc"
    with pytest.raises(ValueError, match="tokens must be from 0 to --vocab - 1, got 99 at position 2"):
        text.load_tokens(str(tmp_path), vocab_size=99)
    with pytest.raises(ValueError, match=r"that can be read, got .*gone: No such file"):
        text.load_tokens(str(tmp_path / "gone"))


def test_validation_is_the_tail_and_no_copy() -> None:
    train, validation = text.split(TEXT, context=8)
    assert (train.tolist(), validation.tolist()) == (list(range(180)), list(range(180, 200)))
    assert train.base is validation.base is TEXT


@pytest.mark.parametrize(("context", "num_windows"), [(19, 1), (9, 2), (6, 3)])
def test_shortest_text_that_is_long_enough(context: int, num_windows: int) -> None:
    _, validation = text.split(TEXT, context=context, num_windows=num_windows)
    assert len(validation) == 20
    assert (
        len(np.concatenate([x for x, _ in validation_batches(validation, batch_size=1, context=context)]))
        >= num_windows
    )


@pytest.mark.parametrize(("length", "context", "num_windows"), [(200, 20, 1), (200, 10, 2), (0, 1, 1), (9, 1, 1)])
def test_text_shorter_than_its_windows_is_refused(length: int, context: int, num_windows: int) -> None:
    least = num_windows * context + 1
    rule = f"the text must give at least {least} tokens to training and to validation"
    cause = f"for --context {context} times {num_windows}"
    with pytest.raises(ValueError, match=f"^{rule}, {cause}, got {length - length // 10} and {length // 10}$"):
        text.split(TEXT[:length], context=context, num_windows=num_windows)


def test_trigram_table_on_the_default_text() -> None:
    train, validation = text.split(text.load_tokens(None), context=64)
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
    assert text.trigram_nats(as_tokens(train), as_tokens(validation)) == pytest.approx(np.mean(expected), rel=1e-12)


@pytest.mark.parametrize("block", [1, 7, 8, 20])
def test_trigrams_are_counted_across_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    train, validation = as_tokens(b"abracadabra abracadabra"), as_tokens(b"abrazda")
    whole = text.trigram_nats(train, validation)
    monkeypatch.setattr(text, "_BLOCK", block)
    assert text.trigram_nats(train, validation) == pytest.approx(whole, rel=1e-12)


def test_two_bytes_give_a_trigram_table_nothing_to_predict() -> None:
    assert math.isnan(text.trigram_nats(as_tokens(b"abracadabra"), as_tokens(b"ab")))


@pytest.mark.parametrize("dtype", [np.uint16, np.int64, np.uint64])
def test_a_trigram_table_is_of_bytes_in_any_dtype(dtype: Any) -> None:
    train, validation = (as_tokens(letters) for letters in (b"abracadabra", b"abra"))
    nats = text.trigram_nats(train, validation)
    assert text.trigram_nats(train.astype(dtype), validation.astype(dtype)) == nats
    with pytest.raises(ValueError, match="a trigram table is of bytes, got token 256"):
        text.trigram_nats(train, np.array([255, 256, 97], dtype))
