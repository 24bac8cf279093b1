"""Tape: what a tensor's tape holds, for a person to look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minigrad.autodiff.tape import collect
from minigrad.autodiff.vjps import kept_arrays
from minigrad.tensor import Tensor
from minigrad.words import counted


@dataclass(frozen=True)
class TapeEntry:
    """One line of a `Tape`.

    It has the op, its output, the bytes of residuals that it alone keeps, and its time if it was profiled.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    kept_bytes: int
    seconds: float | None


@dataclass(frozen=True)
class Tape:
    """The ops that a tensor depends on, for a person to look at.

    `print(Tape.of(loss))`.
    """

    entries: tuple[TapeEntry, ...]

    @staticmethod
    def of(output: Tensor) -> Tape:
        """List the tape of `output`, oldest op first.

        A residual that several ops keep counts once, at the oldest.

        Raises:
            TypeError: it is no Tensor.
        """
        if not isinstance(output, Tensor):
            raise TypeError(f"a tape is of a Tensor, got {type(output).__name__}")
        counted: set[int] = set()
        entries = []
        for node in reversed(collect(output.node) if output.node is not None else []):
            kept = 0
            for array in kept_arrays(node.vjps):
                base: Any = array.base
                owner = base if hasattr(base, "nbytes") else array  # bytes and files can own memory too
                if id(owner) not in counted:
                    counted.add(id(owner))
                    kept += owner.nbytes
            entries.append(TapeEntry(node.name, node.shape, node.dtype, kept, node.seen and node.seen.seconds))
        return Tape(tuple(entries))

    @property
    def kept_bytes(self) -> int:
        """Bytes that the tape keeps alive, parameters that vjps hold included."""
        return sum(entry.kept_bytes for entry in self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        seconds = [e.seconds for e in self.entries if e.seconds is not None]
        rows = [("op", "output", "kept bytes", "forward ms")]
        rows += [(e.name, f"{e.dtype}{list(e.shape)}", f"{e.kept_bytes:,}", _ms(e.seconds)) for e in self.entries]
        rows.append((counted(len(self), "op"), "", f"{self.kept_bytes:,}", _ms(sum(seconds))))
        lines = [f"{name:<20} {shape:<28} {kept:>14}" for name, shape, kept, _ in rows]
        if seconds:  # of a forward in a profile
            lines = [f"{line} {ms:>11}" for line, (*_, ms) in zip(lines, rows, strict=True)]
        return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3f}"
