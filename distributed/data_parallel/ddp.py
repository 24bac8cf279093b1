"""Data parallelism: every rank holds the model, takes its own samples, and averages gradients with the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from distributed.agreement import same_on_all
from distributed.comm.communicator import Communicator
from distributed.data_parallel.buckets import DEFAULT_BUCKET_BYTES, GradientBucketManager
from distributed.data_parallel.comm_hooks import CommHook, allreduce
from minigrad.hooks import Hooks
from minigrad.nn import Buffer, Module
from minigrad.parameter import Parameter


class HasParameters(Protocol):
    """A module, or the stages of a pipeline."""

    def parameters(self) -> Sequence[Parameter]: ...


class DistributedDataParallel:
    """Keeps a model's replicas equal: broadcasts rank 0's parameters, then averages gradients inside backward.

        hooks = ddp.hooks(num_samples=len(x))
        with rng.scope(seed=seed, step=step, first_sample=ddp.first_sample):    # only where layers draw
            loss = loss_fn(model(x), y)                                         # the mean over this rank's samples
        backward_with_hooks(loss, hooks)
        ddp.wait()
        optimizer.step()

    A backward without the hooks accumulates on this rank alone. Making one is collective.

    Args:
        model: its parameters are all reduced, frozen ones too. Where it has `tied` parameters (stages of a pipeline),
            these get the last buckets.
        comm: the ranks that hold replicas.
        bucket_bytes, comm_hook: see `GradientBucketManager`.

    Attributes:
        first_sample: index of this rank's first sample in the batch of all ranks, as of the last `hooks`.
        share: of the samples that this rank has, likewise.

    Raises:
        ValueError: the ranks' parameters differ in name, shape or dtype, or their buckets do: by bucket_bytes, or by
            an optimizer made before that placed parameters otherwise. The same message on every rank.
    """

    def __init__(
        self,
        model: HasParameters,
        comm: Communicator,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        comm_hook: CommHook = allreduce,
    ) -> None:
        self.params = list(model.parameters())
        self._buffers = list(model.buffers()) if isinstance(model, Module) else []
        self.comm = comm.duplicate()  # launches inside a backward must not meet the caller's own collectives
        check_layout([*self.params, *self._buffers], self.comm)
        tied = getattr(model, "tied", ())
        self.buckets = GradientBucketManager(
            self.params, self.comm, bucket_bytes=bucket_bytes, last=tied, comm_hook=comm_hook
        )
        check_buckets(self.buckets, self.comm)
        self.buckets.move_gradients()
        self.first_sample = 0
        self.share = 1 / comm.size
        broadcast_params(self.params, self.comm)
        self.sync_buffers()

    def hooks(self, *, num_samples: int) -> Hooks:
        """Return the hooks for one backward over this rank's samples.

        Collective, and blocks for one small message: ranks weigh in the mean by their number of samples.

        Args:
            num_samples: of this rank in this step, over which its loss is the mean. Ranks hold consecutive samples.
        Raises:
            ValueError: num_samples is below 1 on some rank; the same message on every rank.
        """
        counts = self.comm.allgather(np.array([num_samples], np.int64)).wait()[:, 0]
        if counts.min() < 1:
            raise ValueError(f"every rank needs num_samples of at least 1, got {counts.tolist()} by rank")
        self.first_sample = int(counts[: self.comm.rank].sum())
        share = self.share = float(counts[self.comm.rank] / counts.sum())
        return Hooks(
            on_start=lambda reached: self.buckets.start(reached, share),
            on_grad_ready=self.buckets.mark_ready,
            between_ops=self.comm.progress,
        )

    def wait(self) -> None:
        """Block until all gradients are averaged over ranks; call it before clipping and stepping."""
        self.buckets.wait()

    def sync_buffers(self) -> None:
        """Overwrite the buffers of every rank with rank 0's. Collective.

        Done once when this is made. After that each rank's buffers are its own, since only their module knows what
        they mean; call it before evaluating or saving if training changes them.
        """
        for work in [self.comm.broadcast(buffer.data) for buffer in self._buffers]:
            work.wait()

    def mean(self, value: float) -> float:
        """Average a number over ranks, weighted as the gradients of the last `hooks`. Collective."""
        total = np.array([value * self.share])
        return float(self.comm.allreduce(total).wait()[0])


def broadcast_params(params: Iterable[Parameter], comm: Communicator, *, root: int = 0) -> None:
    """Overwrite the parameters of every rank with those of `root`. Collective."""
    params = list(params)
    # One by one: a rank may have placed them in its flats in an order of its own.
    for work in [comm.broadcast(p.data, root=root) for p in params]:
        work.wait()
    for p in params:
        p.note_change("broadcast")


def check_layout(params: Iterable[Parameter | Buffer], comm: Communicator) -> None:
    """Check that all ranks have the same parameters, and buffers, in the same order. Collective.

    Raises:
        ValueError: names the first that differs, and what two ranks have; the same message on every rank.
    """
    same_on_all(comm, "parameter", [f"{p.name!r} {p.dtype}{list(p.shape)}" for p in params])


def check_buckets(manager: GradientBucketManager, comm: Communicator) -> None:
    """Check that all ranks have the same parameters in the same place of the same bucket, and of memory. Collective.

    Raises:
        ValueError: names the first bucket that differs, and what two ranks have; the same message on every rank.
    """
    parts = [bucket.range for bucket in manager.buckets]
    entries = [f"{[p.name for p in part.params]} at {part.start} of {part.flat.grad.size}" for part in parts]
    same_on_all(comm, "bucket", entries)
