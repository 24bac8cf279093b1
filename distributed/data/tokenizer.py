"""A tokenizer trained on a text of one's own: byte-level BPE, which knows every text and turns it back byte by byte.

    python -m distributed.data.tokenizer TEXT FOLDER --vocab 4096

trains it, and writes FOLDER/tokenizer.json and the text's tokens as FOLDER/tokens.npy: `--text FOLDER/tokens.npy` of
the examples. With `--tokenizer FILE` the tokens are those of a tokenizer that there is, such as GPT-2's, to fine-tune
its model. The `tokenizers` library does the work, and is loaded when it is first needed. Any tokenizer.json will do for
reading.

Source: Sennrich et al. 2016 (BPE); Radford et al. 2019 (over bytes).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distributed.data.token_files import Tokens, read_tokens, write_tokens
from minigrad.command_parser import CommandParser
from minigrad.extras import needs
from minigrad.files import atomic_write

TOKENIZER, TOKENS = "tokenizer.json", "tokens.npy"
_LINES = 1000  # that are tokenized at a time


class Tokenizer:
    """Text to tokens and back, by a tokenizer.json.

    Raises:
        ValueError: the file is none of a tokenizer, or the library is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self._tokenizer: Any = _library().Tokenizer.from_file(str(path))
        except ValueError:
            raise
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path} must be a tokenizer's file: {error}") from error

    @classmethod
    def beside(cls, path: str | Path) -> Tokenizer | None:
        """Read the tokenizer in a folder, or in that of a file; None where there is none."""
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        return cls(folder / TOKENIZER) if (folder / TOKENIZER).is_file() else None

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yield text as soon as its letters are whole: a letter may be several tokens."""
        pending: list[int] = []
        for token in tokens:
            pending.append(int(token))
            text = self._tokenizer.decode(pending, skip_special_tokens=False)
            if not text.endswith("\ufffd"):
                yield text
                pending = []
        if pending:
            yield self._tokenizer.decode(pending, skip_special_tokens=False)

    def bytes_a_token(self, tokens: Tokens) -> float:
        """Return how long the text of a token is on average.

        Losses of different tokenizers compare by the byte.
        """
        lengths = [len(self._tokenizer.id_to_token(i) or "") for i in range(self.vocab_size)]  # a sign is a byte
        return float(np.bincount(tokens, minlength=len(lengths)) @ np.array(lengths)) / len(tokens)


def train(text: str | Path, folder: str | Path, *, vocab_size: int) -> Tokenizer:
    """Train a tokenizer on a text; write it and the text's tokens.

    The text is a file, or a folder of files, in UTF-8.

    Raises:
        ValueError: the text cannot be read or is not UTF-8, or vocab_size is below the 256 bytes or above uint16.
    """
    library = _library()
    lines = _lines(text)
    if not 256 <= vocab_size <= 2**16:
        raise ValueError(f"a tokenizer has from 256 tokens, the bytes, to 65536, got {vocab_size}")
    new = library.Tokenizer(library.models.BPE())
    new.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    new.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    new.train_from_iterator(lines, trainer)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / TOKENIZER) as unfinished:
        new.save(str(unfinished))
    return _write_tokens(lines, folder)


def use(tokenizer: str | Path, text: str | Path, folder: str | Path) -> Tokenizer:
    """Write a text's tokens by a tokenizer that there is.

    A copy of the tokenizer is written beside them.

    Raises:
        ValueError: as `train`, or the file is none of a tokenizer.
    """
    lines, data = _lines(text), Path(tokenizer).read_bytes()
    Tokenizer(tokenizer)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / TOKENIZER) as unfinished:
        unfinished.write_bytes(data)
    return _write_tokens(lines, folder)


def _lines(text: str | Path) -> list[str]:
    raw = read_tokens(text)
    if raw.dtype != np.uint8:
        raise ValueError(f"a tokenizer takes text, and {text} holds tokens")
    try:
        return raw.tobytes().decode().splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise ValueError(f"a tokenizer takes text in UTF-8, and {text} is not: {error}") from error


def _write_tokens(lines: Sequence[str], folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(folder / TOKENIZER)
    parts = (tokenizer.encode("".join(lines[i : i + _LINES])) for i in range(0, len(lines), _LINES))
    write_tokens(folder / TOKENS, parts, vocab_size=tokenizer.vocab_size)
    return tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = CommandParser(
        "python -m distributed.data.tokenizer", description="Turn a text into tokens, by a tokenizer trained on it."
    )
    parser.add_argument("text", help="a file or a folder of files, in UTF-8")
    parser.add_argument("folder", help="for tokenizer.json and tokens.npy")
    parser.add_argument("--vocab", type=int, default=4096, metavar="N", help="number of tokens (default: 4096)")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json to use, in place of a new one")
    args = parser.parse_args(argv)
    try:
        if args.tokenizer is None:
            tokenizer = train(args.text, args.folder, vocab_size=args.vocab)
        else:
            tokenizer = use(args.tokenizer, args.text, args.folder)
    except OSError as error:
        sys.stderr.write(f"{parser.prog}: {error.filename} cannot be used: {error.strerror}\n")
        return 2
    except ValueError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 2
    num_tokens = len(read_tokens(Path(args.folder) / TOKENS))
    sys.stdout.write(
        f"{num_tokens:,} tokens of {tokenizer.vocab_size}; "
        f"to train on them: --text {Path(args.folder) / TOKENS} --vocab {tokenizer.vocab_size}\n"
    )
    return 0


def _library() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise ValueError(needs("a tokenizer", "tokenizers", "text")) from error
    return tokenizers


if __name__ == "__main__":
    sys.exit(main())
