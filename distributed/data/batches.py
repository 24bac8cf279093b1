"""Which samples each replica trains on, and windows of tokens as samples. `token_files.py` reads the tokens.

Sampling is a cursor in an endless stream of sample numbers: all samples in the order of epoch 0, all again in the order
of epoch 1, and so on. A batch is what comes next in it, a replica's share a slice of the batch:

    stream      3 0 4 1 2 : 4 1 0 3 2 : 1 ...        num_samples=5, a colon where an epoch ends
    batches    [3 0 4|1 2 : 4]  ...                  batch_size=6, size=2: rank 0 draws 3 0 4, rank 1 draws 1 2 4

The stream is a function of the seed alone, so the position in it is all there is to save, and a run goes on from it
with any number of replicas and any batch size. Nothing here communicates: a replica is a rank and a size.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from distributed.data.token_files import Tokens, as_row, check_whole

Int64s = NDArray[np.int64]

_ORDER, _OFFSET = 0, 1  # what random words are for
_COMPARED = 1 << 20  # tokens at the start of a file by which it is known again


class Sampler:
    """Draws this replica's share of each batch.

    A share is consecutive rows, as equal in number as can be. Each sample is drawn once an epoch; a batch that reaches
    the end of one goes on in the next. Eight bytes of memory a sample hold the order of the current epoch.

    Args:
        num_samples: samples in the data set.
        batch_size: samples in a batch, over all replicas.
        seed: of the order, from 0 to 2**64 - 1.
        rank, size: place of this replica among all of them, and their number.
        shuffle: False goes through the samples as they lie, in every epoch.
    Attributes:
        position: samples drawn so far by all replicas together.
    Raises:
        ValueError: there is no sample, or not one for each replica's share; rank or seed is out of range.
    """

    def __init__(
        self, num_samples: int, *, batch_size: int, seed: int, rank: int = 0, size: int = 1, shuffle: bool = True
    ) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        _check_place(rank, size)
        if batch_size < size:
            raise ValueError(f"batch_size must give each replica a sample, got {batch_size} and {size}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must be from 0 to 2**64 - 1, got {seed}")
        self.num_samples = num_samples
        self.position = 0
        self._batch_size = batch_size
        self._seed = seed
        self._share = (rank * batch_size // size, (rank + 1) * batch_size // size)
        self._shuffle = shuffle
        self._order = (-1, np.empty(0, np.int64))  # an epoch and its samples in order
        self._stream = {"num_samples": num_samples, "seed": seed, "shuffle": int(shuffle)}

    @property
    def epoch(self) -> int:
        """The epoch of the next batch's first sample, counted from 0."""
        return self.position // self.num_samples

    def next(self) -> Int64s:
        """Draw this replica's share of the next batch.

        (share,) sample numbers, from 0 to num_samples - 1.
        """
        return np.concatenate([samples for _, samples in self.next_by_epoch()])

    def next_by_epoch(self) -> list[tuple[int, Int64s]]:
        """Draw as `next` does, for data that changes between epochs.

        These are pairs of an epoch and its samples, in order.
        """
        start, stop = (self.position + row for row in self._share)
        self.position += self._batch_size
        parts = []
        while start < stop:
            epoch, first = divmod(start, self.num_samples)
            parts.append((epoch, self._order_of(epoch)[first : first + stop - start]))
            start += len(parts[-1][1])
        return parts

    def state_dict(self) -> dict[str, int]:
        """Return what a run needs to go on from here.

        That is the position, and what it is a position in.
        """
        return {"position": self.position} | self._stream

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another sampler of the same data stopped.

        Its batch size, rank and size may have been others.

        Raises:
            ValueError: the state is not from `state_dict`, or of other data.
        """
        self.position = _position_in(state, self._stream)

    def _order_of(self, epoch: int) -> Int64s:
        if self._order[0] != epoch:
            if self._shuffle:
                # NumPy keeps Philox's words for ever, but not what its generators make of them.
                order = np.argsort(_philox(self._seed, epoch, _ORDER).random_raw(self.num_samples), kind="stable")
            else:
                order = np.arange(self.num_samples)
            self._order = (epoch, order)
        return self._order[1]


class TokenBatches:
    """Batches of windows over a long row of tokens, each with the tokens that follow.

    An epoch visits each of its windows once, and they do not overlap. Where the first one starts is random, another
    place in each epoch, so that all tokens come to be seen and not always behind the same others:

        tokens     |..........................|        context=8
        epoch 0    |....[------)[------)......|        num_windows=2, in any epoch
        epoch 1    |.........[------)[------).|

    Memory-mapped tokens are read window by window, as they are drawn.

    Args:
        tokens: (n,) integers in an array or a list, more than context.
        batch_size: windows in a batch, over all replicas.
        context: tokens in a window.
        seed, rank, size: as for Sampler.
    Attributes:
        sampler: draws the windows.
    Raises:
        ValueError: tokens are not as above, or what Sampler refuses.
    """

    def __init__(
        self, tokens: ArrayLike, *, batch_size: int, context: int, seed: int, rank: int = 0, size: int = 1
    ) -> None:
        tokens = _row(tokens, context)
        # One window less than would fit, where there are two: room for the start to move.
        num_windows = max(1, len(tokens) // context - 1)
        self.sampler = Sampler(num_windows, batch_size=batch_size, seed=seed, rank=rank, size=size)
        self._tokens = tokens
        self._context = context
        self._seed = seed
        self._num_offsets = len(tokens) - num_windows * context
        check_whole(tokens)
        start = zlib.crc32(tokens[:_COMPARED].tobytes())
        self._stream = self.sampler.state_dict() | {"context": context, "num_tokens": len(tokens), "crc32": start}
        del self._stream["position"]

    @property
    def num_windows(self) -> int:
        """Windows in each epoch."""
        return self.sampler.num_samples

    def next(self) -> tuple[Int64s, Int64s]:
        """Read this replica's share of the next batch.

        Returns:
            x, y: (share, context) each; y[i, t] is the token that follows x[i, t].
        """
        parts = self.sampler.next_by_epoch()
        starts = [self._offset(epoch) + windows * self._context for epoch, windows in parts]
        return _windows(self._tokens, np.concatenate(starts), self._context)

    def state_dict(self) -> dict[str, int]:
        """Return what a run needs to go on from here.

        That is the position, and what it is a position in.
        """
        return {"position": self.sampler.position} | self._stream

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where other batches of the same tokens, context and seed stopped.

        The file may lie somewhere else now.

        Raises:
            ValueError: the state is not from `state_dict`, or of other data, as far as their number and the first
                million tell.
        """
        self.sampler.position = _position_in(state, self._stream)

    def _offset(self, epoch: int) -> int:
        return int(_philox(self._seed, epoch, _OFFSET).random_raw()) % self._num_offsets


def validation_batches(
    tokens: ArrayLike, *, batch_size: int, context: int, rank: int = 0, size: int = 1
) -> Iterator[tuple[Int64s, Int64s]]:
    """Yield all windows that do not overlap, in order, in batches.

    These are of nearly equal size, at least `batch_size`. Replicas take the batches in turn; the last ones may get one
    less, or none.

    Args:
        tokens: (n,) integers, more than context.
        batch_size: windows in a batch; where all are fewer, they are one batch.
    Yields:
        x, y: (windows, context) each, y one token later.
    """
    row = _row(tokens, context)
    _check_place(rank, size)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    starts = np.arange(0, len(row) - context, context)
    batches = np.array_split(starts, max(1, len(starts) // batch_size))
    return (_windows(row, batch, context) for batch in batches[rank::size])


def _position_in(state: Mapping[str, Any], stream: Mapping[str, int]) -> int:
    """Return the position of a state, which must be in this stream of samples."""
    if not isinstance(state, Mapping) or state.keys() != {"position", *stream}:
        raise ValueError(f"a state of data must have position, {', '.join(stream)}, got {state!r}")
    for name, value in stream.items():
        if state[name] != value:
            raise ValueError(f"the data must be the same as before, but {name} was {state[name]}, and is {value}")
    try:
        position = operator.index(state["position"])
    except TypeError:
        position = -1
    if not 0 <= position < 2**63:
        raise ValueError(f"the position in the data must be an integer from 0 to 2**63 - 1, got {state['position']!r}")
    return position


def _check_place(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"rank must be from 0 to size - 1, got rank={rank} and size={size}")


def _row(tokens: ArrayLike, context: int) -> Tokens:
    row = as_row(tokens)
    if not 1 <= context < len(row):
        raise ValueError(f"context must be at least 1 and below the number of tokens, got {context} and {len(row)}")
    return row


def _windows(tokens: Tokens, starts: Int64s, context: int) -> tuple[Int64s, Int64s]:
    check_whole(tokens)
    windows = tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return windows[:, :-1], windows[:, 1:]


def _philox(seed: int, epoch: int, purpose: int) -> np.random.Philox:
    """Return random words keyed by what they are for, far apart in Philox's 256-bit counter."""
    return np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=np.array([0, 0, 0, purpose], np.uint64))
