"""A text to learn: bytes, batches of windows, and what a table of counts makes of it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


def load_text(path: str | None) -> bytes:
    """Read the text to learn, by default the one that comes with Python.

    Args:
        path: a file, taken as bytes whatever its encoding. None: the language reference behind Python's `help()`,
            about 470,000 bytes of English (a little more in each new version of Python), the same on every machine.
    Raises:
        ValueError: the file cannot be read.
    """
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics)).encode()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"--text must be a file that can be read, got {path}: {error.strerror}") from error


def split(text: bytes, *, context: int, validation_fraction: float = 0.1) -> tuple[bytes, bytes]:
    """Cut off the end of a text, for validation on what was never trained on.

    Raises:
        ValueError: one of the parts has no window of `context` bytes and the byte after it.
    """
    start = len(text) - int(len(text) * validation_fraction)
    train, validation = text[:start], text[start:]
    if min(len(train), len(validation)) <= context:
        raise ValueError(
            f"the text must give more than context bytes to training and to validation, "
            f"got {len(train)} and {len(validation)} bytes and context={context}"
        )
    return train, validation


def sample_batch(text: bytes, *, batch: int, context: int, seed: int, step: int) -> tuple[Tokens, Tokens]:
    """Draw the batch of one step: windows of the text, and the same windows one byte later.

    A function of its arguments alone: however many ranks there are, each draws the whole batch and takes its own rows.

    Returns:
        x, y: (batch, context) each; y[i, t] is the byte that follows x[i, t].
    """
    rng = np.random.Generator(np.random.Philox(key=np.array([seed, step], np.uint64)))
    return _windows(text, rng.integers(len(text) - context, size=batch), context)


def validation_batches(text: bytes, *, batch: int, context: int) -> Iterator[tuple[Tokens, Tokens]]:
    """Yield all windows of a text that do not overlap, in order, in batches of nearly equal size, at least `batch`."""
    starts = np.arange(0, len(text) - context, context)
    for part in np.array_split(starts, max(1, len(starts) // batch)):
        yield _windows(text, part, context)


def _windows(text: bytes, starts: Tokens, context: int) -> tuple[Tokens, Tokens]:
    windows = np.frombuffer(text, np.uint8)[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return windows[:, :-1], windows[:, 1:]


def trigram_nats(train: bytes, validation: bytes) -> float:
    """Measure what counting can do: nats a byte of a table that predicts a byte from the two before it.

    A model is worth training if it does better. The table is a strong one: interpolated Kneser-Ney smoothing with the
    usual discount, 0.75 (on Python 3.11's text 1.70 nats; add-one smoothing gives 1.99, a bigram table 2.3).

    Source: Chen and Goodman 1998, section 2.7 (Kneser-Ney) and 4.1.3 (interpolated).
    """
    # Bytes renumbered without gaps, for small tables. The smoothing still reserves a share for all 256.
    symbols, tokens = np.unique(np.frombuffer(train + validation, np.uint8), return_inverse=True)
    num_symbols = len(symbols)
    codes = (tokens[:-2] * num_symbols + tokens[1:-1]) * num_symbols + tokens[2:]  # one number a trigram
    trigrams = np.bincount(codes[: len(train) - 2], minlength=num_symbols**3).reshape([num_symbols] * 3)
    # A shorter context counts what it was seen after, not how often: `Francisco` is frequent, but only after `San`.
    bigrams = np.count_nonzero(trigrams, axis=0)
    unigrams = np.count_nonzero(bigrams, axis=0)
    uniform = np.full(num_symbols, 1 / 256)
    probability = _discounted(trigrams, _discounted(bigrams, _discounted(unigrams, uniform)))
    return float(-np.log(probability.reshape(-1)[codes[len(train) :]]).mean())


def _discounted(counts: NDArray[np.int64], shorter: NDArray[np.float64]) -> NDArray[np.float64]:
    """Turn counts (..., symbol) into probabilities; what each seen symbol gives up goes where `shorter` says."""
    discount = 0.75
    total = counts.sum(axis=-1, keepdims=True)
    given_up = np.where(total > 0, discount * np.count_nonzero(counts, axis=-1, keepdims=True), 1.0)
    return (np.maximum(counts - discount, 0) + given_up * shorter) / np.maximum(total, 1)
