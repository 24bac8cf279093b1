"""How much each rank weighs in a mean, from the samples that each of them has."""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

import numpy as np

from distributed.comm.communicator import Array

NOT_GIVEN = -math.inf  # what travels for a weight that a rank leaves out
NO_SAMPLES = -sys.float_info.max  # what travels for the weight of a rank that takes part without samples
NEXT_BATCH = NO_SAMPLES / 2  # what travels in place of a weight where `ddp.join` asks who has batches left


def count(num_samples: int, weight: float | None) -> Array:
    """Return what a rank tells the others, (2,): its samples, and its weight.

    Args:
        num_samples: of this rank in this step.
        weight: over how many things its loss is the mean; None where these are the samples.
    """
    return np.array([num_samples, NOT_GIVEN if weight is None else weight], np.float64)


class Share(NamedTuple):
    """One rank's part in a batch of all ranks.

    Attributes:
        first_sample: index of its first sample in that batch.
        weight: of this rank; 0 without samples.
        total: of the weights of all ranks.
        is_even: whether each rank has one part in `size` of it.
    """

    first_sample: int
    weight: float
    total: float
    is_even: bool

    @property
    def fraction(self) -> float:
        return self.weight / self.total

    @staticmethod
    def of(rank: int, counts: Array) -> Share:
        """Return a rank's part.

        Args:
            counts: (size, 2), what `count` gives on each rank.
        Raises:
            ValueError: a rank has no sample, or a weight that is negative or not finite, or some give none, or all 0.
            RuntimeError: a rank has left this step out, and is at its next batch.
        """
        check_all_in_step(counts)
        if not np.array_equal(counts[:, 0], np.floor(counts[:, 0])):
            raise ValueError(f"num_samples must be a whole number, got {counts[:, 0].tolist()} by rank")
        num_samples, weights = counts[:, 0].astype(int).tolist(), counts[:, 1].tolist()
        here = [r for r, weight in enumerate(weights) if weight != NO_SAMPLES]
        if not here:
            raise ValueError("every rank calls reduce_no_samples(): some rank needs samples")
        if min(num_samples[r] for r in here) < 1:
            raise ValueError(f"every rank needs num_samples of at least 1, got {num_samples} by rank")
        if all(weights[r] == NOT_GIVEN for r in here):
            weights = list(num_samples)
        weights = [weight if r in here else 0.0 for r, weight in enumerate(weights)]
        total = math.fsum(weights)
        if not all(0 <= weights[r] < math.inf for r in here) or not total:
            given = [None if weight == NOT_GIVEN else weight for weight in weights]
            raise ValueError(
                "weights must be at least 0 and finite, and one of them above 0, and every rank needs one or none "
                f"does, got {given} by rank"
            )
        is_even = all(weight / total == 1 / len(weights) for weight in weights)
        return Share(sum(num_samples[:rank]), weights[rank], total, is_even)


def check_all_in_step(counts: Array) -> None:
    """Raise where some ranks tell what they have in a step, and others are at their next batch in `ddp.join`.

    Args:
        counts: of all ranks.
    Raises:
        RuntimeError: so it is; the same message on every rank.
    """
    is_next = counts[:, 1] == NEXT_BATCH
    if is_next.any() != is_next.all():
        where = ["the next item" if each else "a step" for each in is_next]
        raise RuntimeError(
            "in ddp.join all ranks step with every item, by ddp.hooks(...) where it is a batch and by "
            f"reduce_no_samples() where it is None; some left a step out: by rank they are at {', '.join(where)}"
        )
