"""Replicas: copies of a model on several ranks, made equal at the start and checked for being so later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from distributed.agreement import same_on_all
from distributed.comm.communicator import Array, Communicator
from minigrad.backend import is_half, widened, xp_of
from minigrad.flat_range import FlatRange
from minigrad.nn import Buffer
from minigrad.parameter import Parameter
from minigrad.words import counted

# What is done with buffers in each step: nothing; all ranks get those of rank 0; or the mean, weighed as gradients are.
BUFFERS = ("own", "broadcast", "mean")


def broadcast_params(params: Iterable[Parameter], comm: Communicator, *, root: int = 0) -> None:
    """Overwrite the parameters of every rank with those of `root`. Collective."""
    params = list(params)
    # One by one: a rank may have placed them in its flats in an order of its own.
    for work in [comm.broadcast(p.data, root=root) for p in params]:
        work.wait()
    for p in params:
        p.note_change("broadcast")


def sync_buffers(buffers: Sequence[Buffer], comm: Communicator, share: float | None) -> None:
    """Give every rank the same buffers. Collective.

    Args:
        share: this rank's weight in the mean of those of floats, which sum to 1 over the ranks: then only the others, a
            count for one, are rank 0's. None takes all of rank 0.
    Raises:
        ValueError: the ranks have different buffers; the same message on every rank.
    """
    check_layout("buffer", buffers, comm)
    works = []
    for buffer in buffers:
        if share is not None and (buffer.dtype.kind == "f" or is_half(buffer.dtype)):
            works.append(comm.allreduce((widened(buffer.data) * share).astype(buffer.dtype, copy=False)))
        else:
            works.append(comm.broadcast(buffer.data.copy()))
    for buffer, work in zip(buffers, works, strict=True):
        buffer.data = work.wait()


def check_layout(noun: str, tensors: Iterable[Parameter | Buffer], comm: Communicator) -> None:
    """Check that all ranks have the same parameters, or buffers, in one order.

    Collective.

    Args:
        noun: of one of them, for the error.
    Raises:
        ValueError: names the first that differs, and what two ranks have; the same message on every rank.
    """
    same_on_all(comm, noun, [f"{tensor.name!r} {tensor.dtype}{list(tensor.shape)}" for tensor in tensors])


def check_buckets(parts: Iterable[FlatRange], comm: Communicator) -> None:
    """Check that the buckets of all ranks have the same parameters. Collective.

    They must lie in the same place of the same bucket, and of memory.

    Args:
        parts: the memory of each bucket.
    Raises:
        ValueError: names the first bucket that differs, and what two ranks have; the same message on every rank.
    """
    entries = [f"{[p.name for p in part.params]} at {part.start} of {part.flat.data.size}" for part in parts]
    same_on_all(comm, "bucket", entries)


def check_equal(params: Sequence[Parameter], comm: Communicator) -> None:
    """Check that the values of all ranks are equal, bit by bit. Collective.

    One number for each parameter is compared, the sum of its bits taken as integers: it costs one look at the
    weights and one small message.

    Args:
        params: the same ones on every rank, in the same order.
    Raises:
        RuntimeError: names the first parameter that differs, and where; the same message on every rank.
    """
    own = np.array([fingerprint(p.data) for p in params], np.uint64)
    by_rank = comm.allgather(own).wait()
    differs = by_rank != by_rank[0]
    if not differs.any():
        return
    drifted = np.flatnonzero(differs.any(axis=0))
    ranks = np.flatnonzero(differs[:, drifted[0]])
    raise RuntimeError(
        f"replicas have drifted apart: {len(drifted)} of {counted(len(params), 'parameter')}, the first of them "
        f"{params[drifted[0]].label}, which on rank {', '.join(map(str, ranks))} differs from rank 0's. "
        "Gradients were used that no wait() had averaged, or weights were changed on some ranks only"
    )


def fingerprint(array: Array) -> int:
    """Return the sum of an array's words, mod 2^64.

    But for rare chance it changes when any bit does. Computed where the array lies, GPU or host; the same bits give the
    same number on both.
    """
    words = xp_of(array).ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")
    return int(words.sum(dtype=np.uint64))
