"""Files that flags of `python -m pipeline` name: read, looked for before any work, and written whole or not at all."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from errno import EISDIR
from pathlib import Path

FILES = ("csv", "svg", "png", "perfetto")  # flags for what a command writes


def read_text(path: Path | str, what: str = "") -> str:
    """Read a file.

    Args:
        what: of which flag it is the value, for the error.
    Raises:
        ValueError: it cannot be read, or is no text.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{what}{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{what}{path} cannot be read: it is no text in UTF-8") from error


def check_files(arguments: argparse.Namespace) -> None:
    """Check, before any work, that there can be the files that flags ask for.

    Raises:
        ValueError: one is a folder, or its folder is not there, or two flags name the same file.
    """
    named: dict[Path, str] = {}
    for option in FILES:
        path: Path | None = getattr(arguments, option, None)
        if path is None:
            continue
        try:
            if path.is_dir():
                raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
            os.stat(f"{path.parent}/")  # which must be a folder
        except OSError as error:
            raise _cannot_be_written(f"--{option}", path, error) from error
        first = named.setdefault(path.resolve(), option)
        if first != option:
            raise ValueError(f"--{first} and --{option} must be different files, got {path}")


def write_file(flag: str, path: Path, write: Callable[[Path], object]) -> None:
    """Write the file that a flag names, whole or not at all.

    Raises:
        ValueError: it cannot be written.
    """
    beside = path.with_name(f".{os.getpid()}.part")
    try:
        if path.exists() and not path.is_file():  # a device, as /dev/stdout is
            write(path)
            return
        try:
            write(beside)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_be_written(flag, path, error) from error


def _cannot_be_written(flag: str, path: Path, error: OSError) -> ValueError:
    return ValueError(f"{flag} {path} cannot be written: {error.strerror or error}")
