"""Files of tokens, mapped into memory: opening one reads next to nothing, and the ranks of a host share its pages.

Tokens are a flat `.npy` file of integers, which a tokenizer has written with `write_tokens`; or the bytes of
any other file, or of a directory of files.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from minigrad.files import atomic_write

Tokens = NDArray[np.integer[Any]]

_BLOCK = 1 << 22  # tokens checked at a time


def read_tokens(path: str | Path, *, vocab_size: int | None = None) -> Tokens:
    """Open tokens for reading.

    Args:
        path: an `.npy` file, one-dimensional and of integers; any other file, taken as bytes; or a directory, whose
            files are joined with an empty line between them, in the order of their names. A directory's text is held
            in memory. Left out are empty files, hidden ones, and links to directories.
        vocab_size: check all tokens to be below it, which reads the whole file, unless its dtype says so already.
    Returns:
        (n,) integers, n at least 1, read-only; bytes are uint8.
    Raises:
        ValueError: there are no such tokens: the rule that is broken, and the path.
    """
    path = Path(path)
    try:
        tokens = _join(path) if path.is_dir() else _map(path)
    except OSError as error:
        where = error.filename or path
        raise ValueError(
            f"tokens must be a file or directory that can be read, got {where}: {error.strerror}"
        ) from error
    if len(tokens) == 0:
        raise ValueError(f"there must be at least one token, got an empty {path}")
    if vocab_size is not None:
        check_range(tokens, vocab_size, str(path))
    return tokens


def write_tokens(path: str | Path, tokens: Tokens | Iterable[Tokens], *, vocab_size: int) -> None:
    """Write tokens to an `.npy` file, in the smallest dtype that holds them.

    The file appears under its name once it is complete; a failure leaves what was there before.

    Args:
        path: ends in `.npy`; the directory is there.
        tokens: (n,) integers, or parts of them (a generator may tokenize one text at a time).
        vocab_size: all tokens are below it.
    Raises:
        ValueError: the name has another ending, a part is no row of integers, a token is out of range, or all is empty.
        OSError: the file cannot be written.
    """
    path = Path(path)
    if path.suffix != ".npy":
        raise ValueError(f"the name of a token file must end in .npy, got {path}")
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
    parts = [tokens] if isinstance(tokens, np.ndarray) else tokens
    dtype = np.min_scalar_type(vocab_size - 1)
    num_tokens = 0
    with atomic_write(path) as unfinished, unfinished.open("wb") as file:
        _write_header(file, dtype, num_tokens)
        for i, part in enumerate(parts):
            name = f"part {i} of the tokens"
            check_row(part, name)
            check_range(part, vocab_size, name)
            file.write(part.astype(dtype).data)
            num_tokens += len(part)
        if num_tokens == 0:
            raise ValueError(f"there must be at least one token, got none for {path}")
        file.seek(0)
        _write_header(file, dtype, num_tokens)  # as long as before: NumPy leaves room for any number


def check_row(tokens: Tokens, name: str = "tokens") -> None:
    """Check that an array is a row of integers.

    Raises:
        ValueError: it has another number of dimensions or another dtype.
    """
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers in one dimension, got {tokens.dtype} of shape {tokens.shape}")


def check_range(tokens: Tokens, vocab_size: int, name: str) -> None:
    """Check that all tokens are of a vocabulary.

    Raises:
        ValueError: names the first that is not, and its position.
    """
    info = np.iinfo(tokens.dtype)
    if info.min == 0 and info.max < vocab_size:
        return
    for start in range(0, len(tokens), _BLOCK):
        block = tokens[start : start + _BLOCK]
        wrong = (block < 0) | (block >= vocab_size)
        if wrong.any():
            first = int(wrong.argmax())
            raise ValueError(
                f"tokens must be from 0 to vocab_size - 1, got {block[first]} at position {start + first} of {name}, "
                f"and vocab_size={vocab_size}"
            )


def _map(path: Path) -> Tokens:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a pipe could be read once, by one rank
        raise ValueError(f"tokens must be a regular file or a directory, got {path}")
    if path.suffix != ".npy":
        return np.memmap(path, np.uint8, mode="r") if status.st_size else np.empty(0, np.uint8)
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # a damaged header may fail anywhere in Python's parser, which NumPy uses
        reason = str(error).partition("\n")[0]
        raise ValueError(f"an .npy file must be whole and hold numbers, got {path}: {reason}") from error
    check_row(tokens, str(path))
    return tokens


def _join(folder: Path) -> Tokens:
    texts = [text for file in _text_files(folder) if (text := file.read_bytes())]
    return np.frombuffer(b"\n\n".join(texts), np.uint8)


def _text_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _text_files(path)
        elif path.is_file():
            if path.suffix == ".npy":
                raise ValueError(f"a directory of tokens must hold texts only, got {path}")
            yield path


def _write_header(file: BinaryIO, dtype: np.dtype[Any], num_tokens: int) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (num_tokens,)}
    np.lib.format.write_array_header_1_0(file, header)
