"""What a language model learns: its tokens, a part of them for validation, and what a table of counts makes of them."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from distributed.data.token_files import Tokens, check_range, check_whole, read_tokens

Int64s = NDArray[np.int64]

_BLOCK = 1 << 22  # tokens counted at a time


def load_tokens(path: str | None, *, vocab_size: int | None = None) -> Tokens:
    """Open what is to be learned, by default the text that comes with Python.

    Args:
        path: tokens in an `.npy` file, any other file or a directory of files as bytes. None: the language reference
            behind Python's `help()`, about 470,000 bytes of English (a little more in each new version of Python),
            the same on every machine.
        vocab_size: all tokens must be below it.
    Raises:
        ValueError: there are no such tokens, see `read_tokens`, or one is not below vocab_size; said in flags.
    """
    try:
        if path is not None:
            return read_tokens(path, vocab_size=vocab_size)
        from pydoc_data.topics import topics

        tokens = np.frombuffer("\n\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
        check_range(tokens, 256 if vocab_size is None else vocab_size, "the text that comes with Python")
    except ValueError as error:
        raise ValueError(f"--text: {str(error).replace('vocab_size', '--vocab')}") from error
    return tokens


def split(
    tokens: Tokens, *, context: int, num_windows: int = 1, validation_fraction: float = 0.1
) -> tuple[Tokens, Tokens]:
    """Cut off the end, for validation on what was never trained on. Nothing is copied.

    Raises:
        ValueError: one of the parts has not so many windows of `context` tokens, each with the token after it.
    """
    start = len(tokens) - int(len(tokens) * validation_fraction)
    train, validation = tokens[:start], tokens[start:]
    least = num_windows * context + 1
    if min(len(train), len(validation)) < least:
        raise ValueError(
            f"the text must give at least {least} tokens to training and to validation, for --context {context} "
            f"times {num_windows}, got {len(train)} and {len(validation)}"
        )
    return train, validation


def trigram_nats(train: Tokens, validation: Tokens) -> float:
    """Measure what counting can do, in nats a byte.

    A table predicts each byte from the two before it. A model is worth training if it does better. The table is a
    strong one: interpolated Kneser-Ney smoothing with the usual discount, 0.75 (on Python 3.11's text 1.70 nats; add-
    one smoothing gives 1.99, a bigram table 2.3). All of the text is read, about 10 s a gigabyte.

    Args:
        train: bytes to count in.
        validation: bytes to predict.
    Source: Chen and Goodman 1998, section 2.7 (Kneser-Ney) and 4.1.3 (interpolated).
    Raises:
        ValueError: a token is above 255: three tokens of a large vocabulary make too large a table.
    """
    # Bytes renumbered without gaps, for small tables. The smoothing still reserves a share for all 256.
    seen = np.zeros(256, bool)
    for tokens in (train, validation):
        for start in range(0, len(tokens), _BLOCK):
            check_whole(tokens)
            block = tokens[start : start + _BLOCK]
            if block.max() > 255:
                raise ValueError(f"a trigram table is of bytes, got token {block.max()}")
            seen[block] = True
    numbers = np.cumsum(seen) - 1
    num_symbols = int(numbers[-1]) + 1
    counts = np.zeros(num_symbols**3, np.int64)
    for codes in _trigrams(numbers, train):
        counts += np.bincount(codes, minlength=num_symbols**3)
    trigrams = counts.reshape([num_symbols] * 3)
    # A shorter context counts what it was seen after, not how often: `Francisco` is frequent, but only after `San`.
    bigrams = np.count_nonzero(trigrams, axis=0)
    unigrams = np.count_nonzero(bigrams, axis=0)
    uniform = np.full(num_symbols, 1 / 256)
    probability = _discounted(trigrams, _discounted(bigrams, _discounted(unigrams, uniform))).reshape(-1)
    nats = -sum(float(np.log(probability[codes]).sum()) for codes in _trigrams(numbers, validation))
    return nats / (len(validation) - 2) if len(validation) > 2 else math.nan


def _trigrams(numbers: Int64s, tokens: Tokens) -> Iterator[Int64s]:
    """Yield one number for each three bytes in a row, a block at a time; `numbers[byte]` counts from 0."""
    num_symbols = numbers[-1] + 1
    for start in range(0, len(tokens) - 2, _BLOCK):
        check_whole(tokens)
        symbols = numbers[tokens[start : start + _BLOCK + 2]]
        yield (symbols[:-2] * num_symbols + symbols[1:-1]) * num_symbols + symbols[2:]


def _discounted(counts: NDArray[np.int64], shorter: NDArray[np.float64]) -> NDArray[np.float64]:
    """Turn counts (..., symbol) into probabilities; what each seen symbol gives up goes where `shorter` says."""
    discount = 0.75
    total = counts.sum(axis=-1, keepdims=True)
    given_up = np.where(total > 0, discount * np.count_nonzero(counts, axis=-1, keepdims=True), 1.0)
    return (np.maximum(counts - discount, 0) + given_up * shorter) / np.maximum(total, 1)
