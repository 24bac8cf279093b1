"""JSON that somebody may have edited or damaged: read against a schema, and written so that any parser reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def read_json(path: Path, kind: type[T]) -> T:
    """Read a file against a schema.

    Args:
        kind: what its content must be: a dataclass, a `dict[str, int]`, ...; `msgspec` says what it can check.
    Raises:
        OSError: it cannot be read.
        ValueError: its content is something else: the file, the place in it, and the rule.
    """
    return parse_json(path.read_bytes(), kind, str(path))


def parse_json(content: bytes | str, kind: type[T], where: str) -> T:
    """Parse what `where` holds, see `read_json`.

    Args:
        content: JSON.
        kind: its schema.
        where: the file, for errors.
    Raises:
        ValueError: it is no JSON, or of another kind.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be read: {error}") from None
    return as_kind(value, kind, where)


def as_kind(value: Any, kind: type[T], where: str) -> T:
    """Hold what JSON said against a schema, see `read_json`.

    Args:
        value: of dicts, lists, text and numbers.
        kind: the schema.
        where: it was, for errors.
    Raises:
        ValueError: it is of another kind.
    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from None


def to_json(value: Any, *, indent: int = 0) -> str:
    """Say a value in JSON.

    A number that is not finite becomes null: JSON has neither infinity nor nan.

    Args:
        indent: spaces a level; 0 keeps all on one line.
    Raises:
        TypeError: it holds what JSON cannot say.
    """
    return msgspec.json.format(msgspec.json.encode(value), indent=indent).decode()
