"""PipelineTrainer: a training step of a model that is spread over the ranks of a pipeline, with replicas or without.

It knows a pipeline by what it needs of one, and `pipeline` knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Unpack

import numpy as np

from distributed.agreement import agree
from distributed.comm.communicator import Array, Communicator
from distributed.data_parallel.trainer import ReplicaOptions, Trainer, TrainingConfig, TrainingMetrics
from distributed.protocols import HasParameters
from distributed.trace.recorder import Recorder
from minigrad.autodiff.hooks import Hooks

Batch = Array | Sequence[Array]

_NOT_GIVEN = -1.0


class Pipeline(Protocol):
    """What runs forward and backward of a batch over the ranks of `comm`.

    A PipelineExecutor is one.
    """

    @property
    def comm(self) -> Communicator: ...

    @property
    def stages(self) -> HasParameters: ...

    @property
    def recorder(self) -> Recorder: ...

    def step(
        self, x: Batch | None, y: Batch | None, *, hooks: Hooks | None = None, weights: Sequence[float] | None = None
    ) -> float:
        """Add gradients of the batch's mean loss to those of the parameters; return it."""
        ...


class PipelineTrainer(Trainer):
    """A pipeline, its replicas and its optimizer.

    Making one, and every method, is collective over both.

        mesh = Mesh(comm, dp=2, pp=4)
        pipe = PipelineExecutor(stages, mesh.pp, schedule, num_microbatches=8, loss_fn=cross_entropy)
        trainer = PipelineTrainer(pipe, mesh.dp, TrainingConfig())
        for x, y in batches:
            metrics = trainer.step(x, y)

    Layers that draw see the scope around `step`: `rng.scope(seed=, step=, first_sample=)`.

    Args:
        pipe: runs the batches of one replica.
        replicas: the ranks that hold the same stages.
        config, options: see `Trainer`.
    """

    def __init__(
        self,
        pipe: Pipeline,
        replicas: Communicator,
        config: TrainingConfig,
        **options: Unpack[ReplicaOptions],
    ) -> None:
        super().__init__(pipe.stages, replicas, config, recorder=pipe.recorder, **options)
        self._pipe = pipe

    def step(
        self, x: Batch | None, y: Batch | None, *, weights: Sequence[float] | None = None, num_tokens: int = 0
    ) -> TrainingMetrics | None:
        """Run a batch of this replica; at the last one of a step average, clip, update.

        Args:
            x, y: see `PipelineExecutor`: the first stage's rank needs x, the last one's y.
            weights: over how many things the loss of each micro-batch is the mean, where these are no samples, as in
                `PipelineExecutor.step`; needed on the last stage's rank, in all replicas or in none.
            num_tokens: of this replica, for the speed; needed on one of its ranks.
        Returns:
            None while gradients are accumulated; else the same on every rank, but for two times.
        Raises:
            ValueError: no rank of the pipeline has samples, or some have other numbers of them; on all its ranks.
            FloatingPointError: too many steps in a row were not finite; the same on every rank.
        """
        num_samples, weight, num_tokens = self._agree(x, y, weights, num_tokens)

        def contribute(factor: float, hooks: Hooks | None) -> float:
            # A micro-batch's backward then starts from its weight over that of the step's first batch.
            factors = Hooks(mean_over=self._open.unit)
            return self._pipe.step(x, y, hooks=factors if hooks is None else hooks + factors, weights=weights)

        return self._take(contribute, num_samples, weight, num_tokens)

    def _agree(
        self, x: Batch | None, y: Batch | None, weights: Sequence[float] | None, num_tokens: int
    ) -> tuple[int, float | None, int]:
        """Return the numbers of samples, of what they weigh, if that is given, and of tokens, that some rank knows."""

        def own() -> Array:
            given = [_count(batch) for batch in (x, y) if batch is not None]
            if len(set(given)) > 1:
                raise ValueError(f"x and y must have as many samples, got {given[0]} and {given[1]}")
            weight = _NOT_GIVEN if weights is None else sum(weights)
            if weights is not None and not weight > 0:
                raise ValueError(f"the weights of a batch must sum to more than 0, got {weight}")
            return np.array([given[0] if given else _NOT_GIVEN, weight, num_tokens], np.float64).view(np.int64)

        rows = np.ascontiguousarray(agree(self._pipe.comm, own, num_columns=3)).view(np.float64)
        num_samples, weight, most_tokens = (sorted(set(column) - {_NOT_GIVEN}) for column in rows.T.tolist())
        if len(num_samples) != 1 or len(weight) > 1:
            raise ValueError(
                "the ranks of a pipeline that have x, y or weights must have those of one batch, got samples "
                f"{rows[:, 0].astype(int).tolist()} and weights {rows[:, 1].tolist()} by rank (-1: none)"
            )
        return int(num_samples[0]), weight[0] if weight else None, int(most_tokens[-1])


def _count(batch: Batch) -> int:
    return len(batch) if hasattr(batch, "shape") else sum(len(part) for part in batch)
