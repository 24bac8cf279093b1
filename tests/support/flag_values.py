"""The values that a flag of a script may have, so that a test can try each of them."""

from dataclasses import fields
from typing import Any


def listed_values(kind: type) -> dict[str, tuple[Any, ...]]:
    """Return the choices, or the words, of each flag that has some, by the name of its field."""
    listed = {f.name: f.metadata["choices"] or tuple(f.metadata["words"]) for f in fields(kind)}
    return {name: values for name, values in listed.items() if values}
