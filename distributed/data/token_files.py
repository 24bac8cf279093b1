"""Files of tokens, mapped into memory: opening one reads next to nothing, and the ranks of a host share its pages.

Tokens are a flat `.npy` file of integers, which a tokenizer has written with `write_tokens`; a `.bin` file of uint16,
as nanoGPT writes its train.bin; or the bytes of any other file, or of a directory of files.
"""

from __future__ import annotations

import mmap
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minigrad.files import atomic_write
from minigrad.words import counted

Tokens = NDArray[np.integer[Any]]

NUM_BYTES = 256
TOKEN_FILES = (".npy", ".bin")
_BLOCK = 1 << 22  # tokens checked at a time


def read_tokens(path: str | Path, *, vocab_size: int | None = None) -> Tokens:
    """Open tokens for reading.

    Args:
        path: an `.npy` file, one-dimensional and of integers; a `.bin` file, little-endian uint16 without a header;
            any other file, taken as bytes; or a directory, whose texts are joined with an empty line between them, in
            the order of their names, and held in memory. Left out are empty files, hidden ones, and links to
            directories.
        vocab_size: check all tokens to be below it, which reads the whole file, unless its dtype says so already. Above
            256 a file of bytes is refused: it may be tokens that another program wrote.
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
        if vocab_size > NUM_BYTES and path.suffix not in TOKEN_FILES and not path.is_dir():
            raise ValueError(
                f"{path} would be read as bytes, of which there are {NUM_BYTES}, got vocab_size={vocab_size}: "
                "tokens of a larger vocabulary are .npy files, such as write_tokens makes"
            )
        check_range(tokens, vocab_size, str(path))
    return tokens


def write_tokens(path: str | Path, tokens: Tokens | Iterable[ArrayLike], *, vocab_size: int) -> None:
    """Write tokens to an `.npy` file, in the smallest dtype that holds them.

    The file appears under its name once it is complete; a failure leaves what was there before.

    Args:
        path: ends in `.npy`; the directory is there.
        tokens: (n,) integers, or parts of them, arrays or lists (a generator may tokenize one text at a time).
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
        for i, given in enumerate(parts):
            name = f"part {i} of the tokens"
            part = as_row(given, name)
            check_range(part, vocab_size, name)
            file.write(part.astype(dtype).data)
            num_tokens += len(part)
        if num_tokens == 0:
            raise ValueError(f"there must be at least one token, got none for {path}")
        file.seek(0)
        _write_header(file, dtype, num_tokens)  # as long as before: NumPy leaves room for any number


def as_row(tokens: ArrayLike, name: str = "tokens") -> Tokens:
    """Return tokens, in a list or an array, as a row of integers; an array as it is.

    Raises:
        ValueError: it has another number of dimensions or another dtype.
    """
    try:
        row = tokens if isinstance(tokens, np.ndarray) else np.asarray(tokens)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be integers in one dimension: {error}") from error
    if row.size == 0 and not isinstance(tokens, np.ndarray):
        row = row.astype(np.int64)  # an empty list says nothing of its dtype
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers in one dimension, got {row.dtype} of shape {row.shape}")
    return row


def check_whole(tokens: Tokens) -> None:
    """Check that the file behind mapped tokens is as long as it was.

    A read beyond its end kills the process (SIGBUS). It costs a microsecond; call it before each read. What shrinks
    between the two still kills.

    Raises:
        ValueError: it has shrunk.
    """
    mapping: Any = tokens
    while isinstance(mapping, np.ndarray):
        mapping = mapping.base
    if isinstance(mapping, mmap.mmap) and mapping.size() < len(mapping):
        where = getattr(tokens, "filename", None) or "a file of tokens"
        raise ValueError(f"{where} has shrunk from {len(mapping)} bytes to {mapping.size()} while it was being read")


def check_range(tokens: Tokens, vocab_size: int, name: str) -> None:
    """Check that all tokens are of a vocabulary.

    Args:
        tokens: that were read.
        vocab_size: above each of them.
    Raises:
        ValueError: names the first that is not, and its position.
    """
    info = np.iinfo(tokens.dtype)
    if info.min == 0 and info.max < vocab_size:
        return
    for start in range(0, len(tokens), _BLOCK):
        check_whole(tokens)
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
        dtype = np.dtype("<u2" if path.suffix == ".bin" else np.uint8)
        if status.st_size % dtype.itemsize:
            size = counted(status.st_size, "byte")
            raise ValueError(f"a .bin file holds tokens of 2 bytes each, got {path} of {size}")
        return np.memmap(path, dtype, mode="r") if status.st_size else np.empty(0, dtype)
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # a damaged header may fail anywhere in Python's parser, which NumPy uses
        reason = str(error).partition("\n")[0]
        raise ValueError(f"an .npy file must be whole and hold numbers, got {path}: {reason}") from error
    return as_row(tokens, str(path))


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
            if path.suffix in TOKEN_FILES:
                raise ValueError(f"a directory of tokens must hold texts only, got {path}")
            yield path


def _write_header(file: BinaryIO, dtype: np.dtype[Any], num_tokens: int) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (num_tokens,)}
    np.lib.format.write_array_header_1_0(file, header)
