"""Batches on a GPU before they are asked for: copied from pinned memory beside the step before.

    compute      | step 0 ......... | step 1 ......... |
    copies         batch 1 |          batch 2 |              a stream of its own, two places in turn

A place is filled again when the step that reads it is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from minigrad.backend import Array, cupy, place


class Batches(Protocol):
    """What gives one batch after the other, as host arrays, and knows where it is."""

    def next(self) -> tuple[Array, ...]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Prefetched:
    """Batches of which the next one is fetched while this one is computed with.

    They are the same batches in the same order.

        x, y = batches.next()
        loss = captured(x, y)       # launched, and nobody has waited for it
        batches.prefetch()

    Args:
        batches: what is fetched from.
        device: where batches are wanted.
    Raises:
        ValueError: device is neither "cpu" nor "cuda".
    """

    def __init__(self, batches: Batches, device: str) -> None:
        place(np.empty(0), device)  # for its errors
        self._batches = batches
        self._uploads: HostUploads | PinnedUploads = PinnedUploads(cupy()) if device == "cuda" else HostUploads()
        self._state = batches.state_dict()
        self._is_fetched = False

    def next(self) -> tuple[Array, ...]:
        """Return the next batch.

        On a GPU it holds until the following call, where its memory serves another one.
        """
        self.prefetch()
        self._is_fetched = False
        self._state = self._batches.state_dict()
        return self._uploads.take()

    def prefetch(self) -> None:
        """Begin to bring the next batch, unless that is under way.

        `next` does so itself where nobody has.
        """
        if not self._is_fetched:
            self._uploads.put(self._batches.next())
            self._is_fetched = True

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batches that `next` has given.

        What is fetched beyond them does not count.
        """
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`; a batch that is fetched is not of it, and goes."""
        self._batches.load_state_dict(state)
        self._state = self._batches.state_dict()
        self._is_fetched = False


class HostUploads:
    """Batches that stay where they are."""

    def __init__(self) -> None:
        self._arrays: tuple[Array, ...] = ()

    def put(self, arrays: tuple[Array, ...]) -> None:
        self._arrays = arrays

    def take(self) -> tuple[Array, ...]:
        arrays, self._arrays = self._arrays, ()
        return arrays


class PinnedUploads:
    """Two places for batches on the current GPU.

    A stream that copies fills them in turn.

    Args:
        cp: CuPy.
    """

    def __init__(self, cp: Any) -> None:
        self._cp = cp
        self._stream = cp.cuda.Stream(non_blocking=True)
        self._places = [_Place(cp), _Place(cp)]  # the one that is filled next, and the one that is in use

    def put(self, arrays: tuple[Array, ...]) -> None:
        """Copy a batch over, once whoever uses the place's last one is done.

        It overwrites what was put and not taken.
        """
        filled = self._places[0]
        filled.fit(arrays)
        if filled.used is not None:
            self._stream.wait_event(filled.used)
        for pinned, on_gpu, array in zip(filled.pinned, filled.on_gpu, arrays, strict=True):
            pinned[...] = array
            on_gpu.set(pinned, stream=self._stream)
        filled.copied = self._stream.record()

    def take(self) -> tuple[Array, ...]:
        """Return what was put last, for the current stream.

        That stream is done with what was taken before.
        """
        current = self._cp.cuda.get_current_stream()
        self._places.reverse()
        free, taken = self._places
        free.used = current.record()
        current.wait_event(taken.copied)
        return tuple(taken.on_gpu)


class _Place:
    """Memory for a batch, pinned and on the GPU.

    Attributes:
        copied: the event after the last copy; used: that after the last use.
    """

    def __init__(self, cp: Any) -> None:
        self._cp = cp
        self.pinned: Sequence[Array] = ()
        self.on_gpu: Sequence[Any] = ()
        self.copied: Any = None
        self.used: Any = None

    def fit(self, arrays: tuple[Array, ...]) -> None:
        """Make room for these arrays.

        It waits until what was copied last is no longer read.
        """
        if self.copied is not None:
            self.copied.synchronize()
        if [(a.shape, a.dtype) for a in self.pinned] != [(a.shape, a.dtype) for a in arrays]:
            self.pinned = [self._new_pinned(array) for array in arrays]
            self.on_gpu = [self._cp.empty(array.shape, array.dtype) for array in arrays]
            self.used = self._cp.cuda.get_current_stream().record()  # of whoever had this memory before

    def _new_pinned(self, like: Array) -> Array:
        memory = self._cp.cuda.alloc_pinned_memory(max(like.nbytes, 1))
        return np.frombuffer(memory, like.dtype, like.size).reshape(like.shape)
