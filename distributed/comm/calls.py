"""A collective as every rank must make it, and what is wrong where they do not.

MPI pairs the collectives of a communicator by their order alone. Where one rank makes a call that the others leave out
(`if comm.rank == 0: ddp.mean(loss)`), it meets whatever they call next: a wrong number, a message cut short, or a wait
for ever, and all of it far from the mistake. Where calls are checked, each rank first tells the others what it is
about to do and from which line, and a difference is the same error on all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import FrameType
from typing import NamedTuple

from distributed.comm.reduction import ReduceOp
from distributed.comm.work import Array

# A call is a line of a user's own, which may lie some calls of these packages above the communicator's.
_OWN_PACKAGES = ("distributed", "pipeline", "minigrad")
_COMM_PACKAGE = __name__.rpartition(".")[0] + "."


def describe_array(array: Array) -> str:
    """Describe an array in an error: `float32[3, 4]`."""
    return f"{array.dtype}{list(array.shape)}"


class Call(NamedTuple):
    """One collective, but for the line that it is called from.

    Attributes:
        kind: `allreduce`.
        array: what it moves.
        op: how it is reduced.
        root: the rank that it comes from.
        subject: what it is about, where the caller has said so: see `Communicator.calls_about`.
    """

    kind: str
    array: Array | None = None
    op: ReduceOp | None = None
    root: int | None = None
    subject: str | None = None

    def __str__(self) -> str:
        text = self.kind
        if self.array is not None:
            text += f" of {describe_array(self.array)}"
        if self.op is not None:
            text += f" by {self.op.name}"
        if self.root is not None:
            text += f" from {self.root}"
        return text if self.subject is None else f"{text} for {self.subject}"


def call_site() -> str:
    """Say which line called a communicator.

    As `train.py:31`, or `train.py:31, in DistributedDataParallel.mean`.
    """
    inner: FrameType | None = sys._getframe(1)
    while inner is not None and _module(inner).startswith(_COMM_PACKAGE):
        inner = inner.f_back
    outer = inner
    while outer is not None and _module(outer).partition(".")[0] in _OWN_PACKAGES:
        outer = outer.f_back
    if inner is None:  # a thread of this package's own
        return "an unknown line"
    outer = outer or inner
    file = outer.f_code.co_filename.removeprefix(os.getcwd() + os.sep)
    return f"{file}:{outer.f_lineno}" + ("" if outer is inner else f", in {inner.f_code.co_qualname}")


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def describe_mismatch(number: int, calls: Mapping[int, tuple[str, str]], label: str = "") -> str | None:
    """Say which two ranks make different calls, if two do.

    Args:
        number: of the collective on its communicator.
        calls: what each rank calls, and where.
        label: of the communicator, where it is not of all ranks.
    """
    (first, (first_what, first_where)), *others = sorted(calls.items())
    for rank, (what, where) in others:
        if what != first_what:
            return (
                f"all ranks must call the same collectives in the same order, but for collective #{number}{label} "
                f"rank {first} calls {first_what} ({first_where}) and rank {rank} calls {what} ({where})"
            )
    return None


def join_call(calls: dict[int, tuple[str, str]], number: int, rank: int, call: Call, label: str) -> str | None:
    """Add a rank's call to those at one number of a communicator; say which two differ, if two do.

    Args:
        calls: by rank, those that have come so far; changed in place.
        number: of the call, counted from the communicator's first.
    """
    calls[rank] = str(call), call_site()
    return describe_mismatch(number, calls, label)
