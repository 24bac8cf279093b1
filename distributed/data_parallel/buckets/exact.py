"""Sums that do not show the layout: the same bits for any number of ranks and micro-batches' order over them.

A float32 sum depends on its order, and so on how many ranks and stages there are. Here each contribution to a gradient
is what one micro-batch computes, in float32 and already weighted; what depends on the layout is only their sum:

    a micro-batch's loss starts its backward from  weight / (sum of all weights)      the same number in every layout
    contributions, tied copies and ranks add up    in float64                         order hardly shows
    a gradient is that sum, rounded once           to float32                         order does not show
    the norm of all                                the squares add up exactly, whoever has which (`clipping.py`)

Where a gradient is one contribution on a rank it stays the float32 that it is, and no float64 memory is touched: the
ranks of a host read each other's where they lie. From the second contribution on it is a sum in float64.

What is guaranteed: contributions have 24 bits, and float64 adds N of them without any rounding where the largest
and the smallest one differ by less than 2**(29 - log2 N); the sum is then exact, and the order cannot show. Where they
differ by more, the float64 sum is off by about N 2**-53 of the largest one, and the rounding to float32 hides that
unless the sum lies so near the middle of two float32 numbers: about one gradient in 2**29 / N of those.

The micro-batches must be the same samples in every layout: dp * num_microbatches of a batch that they divide. What is
not a sum of gradients has the same bits by itself: dropout draws by sample number, and a stage computes with the same
arrays on every rank.

Source: Demmel and Nguyen 2013, Fast reproducible floating-point summation, for what order does to a sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Unpack

import numpy as np

from distributed.clipping import ModelPart
from distributed.comm.communicator import Array, Communicator, Work
from distributed.data_parallel.buckets.bucket import Bucket, BucketOptions
from distributed.data_parallel.buckets.manager import GradientBucketManager
from minigrad.backend import to_host, xp_of
from minigrad.flat import FlatBuffer
from minigrad.optim import Optimizer
from minigrad.parameter import Parameter

SUM_DTYPE = np.dtype(np.float64)


class ExactBuckets(GradientBucketManager):
    """Buckets of gradients that are added up in float64, and rounded once they are there.

    A bucket travels in float32 from a rank where each of its gradients is one contribution, and in float64 from one
    where some are sums: each rank says which, bucket by bucket.

    Raises:
        ValueError: a parameter is float64 itself: there is nothing wider to add it up in.
    """

    def __init__(self, params: Iterable[Parameter], comm: Communicator, **options: Unpack[BucketOptions]) -> None:
        params = list(params)
        for p in params:
            if p.dtype == SUM_DTYPE:
                raise ValueError(f"exact sums are of float32 or narrower parameters, got {p.label} of {p.dtype}")
        super().__init__(params, comm, **options)
        self._has_sums: dict[FlatBuffer, Array] = {}  # by bucket
        for flat in dict.fromkeys(bucket.range.flat for bucket in self.buckets):
            flat.widen_grad(SUM_DTYPE)
            self._has_sums[flat] = np.zeros(self.num_buckets, np.uint8)

    @property
    def grad_bytes(self) -> int:
        return super().grad_bytes + sum(flat.sums.nbytes for flat in self._has_sums if flat.sums is not None)

    def move_gradients(self) -> None:
        for flat in self._has_sums:
            if self.comm.size > 1 and xp_of(flat.grad) is np and flat.sums is not None:
                sizes = [flat.sums.nbytes, flat.grad.nbytes, self.num_buckets]
                sums, grad, has_sums = np.split(self.comm.buffer(sum(sizes), np.uint8), np.cumsum(sizes)[:-1])
                flat.move_sums(sums.view(flat.sums.dtype))
                flat.move_grad(grad.view(flat.grad.dtype))
                self._has_sums[flat] = has_sums

    def _launch(self, bucket: Bucket) -> Work:
        part = bucket.range
        has_sums = self._has_sums[part.flat][bucket.number : bucket.number + 1]
        has_sums[0] = any(p.is_sum for p in part.params)
        if has_sums[0]:
            for p in part.params:
                p.sum_view()
            grad = part.flat.grad_slice(part.start, part.stop)
        else:
            grad = part.grad  # zeros where no backward reached
        sums = part.flat.sum_slice(part.start, part.stop)
        values = sums if has_sums[0] else grad
        if self._share != 1:
            values *= values.dtype.type(self._share)
        return self.recorder.watch(
            "bucket", "", lambda: self._sum_widely(bucket, grad, sums, has_sums), nbytes=values.nbytes
        )

    def _sum_widely(self, bucket: Bucket, grad: Array, sums: Array, has_sums: Array) -> Work:
        """Add a bucket up over ranks, so that this one has what `part_here` says."""
        return self.comm.sum_widely(grad, sums, has_sums)

    def _land(self, bucket: Bucket) -> None:
        for p in bucket.range.params:
            p.drop_sum()


def weights_sha256(part: ModelPart, optimizer: Optimizer | None = None) -> str:
    """Return a hash of the whole model's weights, of their names and of every bit. Collective; the same on every rank.

    Args:
        optimizer: of this part: where it has what is trained, the parameters having it in half precision, the hash is
            of that.
    Raises:
        ValueError: two ranks hold a parameter of one name, and its weights differ.
    """
    masters = {} if optimizer is None else optimizer.whole_masters()
    weights = {p.name: masters.get(p.name, p.data) for p in part.parameters()}
    own = {name: hashlib.sha256(to_host(values).tobytes()).hexdigest() for name, values in weights.items()}
    everything: dict[str, str] = {}
    for rank, held in enumerate(part.comm.gather_objects(own)):
        for name, digest in held.items():
            if everything.setdefault(name, digest) != digest:
                raise ValueError(f"the weights of {name!r} on rank {rank} differ from those of a rank before it")
    lines = [f"{name} {everything[name]}" for name in sorted(everything)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
