"""Random numbers keyed by what they are for, not drawn in sequence.

A dropout mask depends on (seed, step, global index of the sample, name of the layer), an initial weight on
(seed, name of the parameter): never on the rank, the micro-batch or the order of calls. So every layout and
schedule sees the numbers that one process would see, and a recomputed block sees its own again.

Philox turns a key and a counter into bits (Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3). One
count gives four 64-bit words; each sample starts at a count of its own:

    counter   first_sample * c   (first_sample + 1) * c   ...      c = counts a sample
    words     |---- sample 0 ----|---- sample 1 ----|
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import numpy as np

from minigrad.backend import Array


@dataclass(frozen=True)
class Scope:
    """Where in the training run the numbers are drawn: one forward of one micro-batch.

    Attributes:
        seed, step: of the run.
        first_sample: index of this micro-batch's first sample in the global batch.
        used: names of the layers that have drawn in this forward.
    """

    seed: int
    step: int
    first_sample: int = 0
    used: set[str] = field(default_factory=set)


_scope: ContextVar[Scope | None] = ContextVar("scope", default=None)


@contextmanager
def scope(*, seed: int, step: int, first_sample: int = 0) -> Iterator[None]:
    """Run one forward with random numbers keyed by these; see `Scope`.

    Args:
        seed: of the run, the same on every rank.
        step: number of updates so far.
        first_sample: where these samples begin in the batch of this step, counted over all ranks.
    """
    token = _scope.set(Scope(seed, step, first_sample))
    try:
        yield
    finally:
        _scope.reset(token)


@contextmanager
def offset(num_samples: int) -> Iterator[None]:
    """Shift the current scope by some samples, for a micro-batch of its batch.

    Without a scope it does nothing.
    """
    outer = _scope.get()
    token = _scope.set(outer and replace(outer, first_sample=outer.first_sample + num_samples, used=set()))
    try:
        yield
    finally:
        _scope.reset(token)


@contextmanager
def replay(before: Scope | None) -> Iterator[None]:
    """Draw the numbers of an earlier forward again."""
    token = _scope.set(before and replace(before, used=set()))
    try:
        yield
    finally:
        _scope.reset(token)


def current_scope() -> Scope | None:
    """Return the scope that random layers draw in, or None."""
    return _scope.get()


def keep_mask(name: str, shape: tuple[int, ...], rate: float) -> Array:
    """Draw a dropout mask: True with probability 1 - rate.

    Args:
        name: of the layer; once in a forward, since a second mask would be the same.
        shape: (samples, ...).
        rate: probability of False, to 32 bits.
    Raises:
        RuntimeError: outside a scope, or a second call with the same name.
    """
    now = _scope.get()
    if now is None:
        raise RuntimeError(
            f"dropout {name!r} draws keyed random numbers: run the forward in minigrad.rng.scope(seed=, step=)"
        )
    if name in now.used:
        raise RuntimeError(f"dropout {name!r} ran twice in one forward: its masks would be equal; name a second layer")
    now.used.add(name)
    num_samples, values = shape[0], int(np.prod(shape[1:]))
    counts = -(-values // 8)  # 8 halves of 32 bits a count
    philox = np.random.Philox(key=_key(f"mask/{now.seed}/{now.step}/{name}"), counter=now.first_sample * counts)
    bits = philox.random_raw(num_samples * counts * 4).view(np.uint32).reshape(num_samples, counts * 8)
    return (bits[:, :values] >= np.uint32(min(round(rate * 2**32), 2**32 - 1))).reshape(shape)


def named_generator(purpose: str, seed: int, name: str) -> np.random.Generator:
    """Return a generator that depends on these three and on nothing else.

    Args:
        purpose: what the numbers are for: `"init"`. Without a slash.
        name: of what they are for: `"fc.weight"`.
    """
    return np.random.Generator(np.random.Philox(key=_key(f"{purpose}/{seed}/{name}")))


def _key(text: str) -> Array:
    from hashlib import blake2b  # with OpenSSL, which takes milliseconds to load

    return np.frombuffer(blake2b(text.encode(), digest_size=16).digest(), np.uint64)
