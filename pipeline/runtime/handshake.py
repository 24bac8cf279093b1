"""How a step begins: ranks tell each other what they were given, and bad input raises on all of them.

One allgather of a fixed row of integers, before any message between stages. Without it a mistake on one rank
would leave the others waiting.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distributed.agreement import agree
from distributed.comm.communicator import Communicator
from minigrad import rng
from minigrad.autodiff.mode import check_told_again
from minigrad.backend import Array
from minigrad.words import counted
from pipeline.runtime import microbatch
from pipeline.runtime.boundary import SPEC_COLUMNS, ArraySpec
from pipeline.runtime.step import Batch, Mode, StepInputs
from pipeline.schedules.action import Action, Skips
from pipeline.schedules.schedule import Schedule
from pipeline.schedules.validate import validate


@dataclass(frozen=True)
class Handshake:
    """Begins the steps of one pipeline; made once, like the executor.

    Args:
        comm: the ranks of the pipeline.
        num_microbatches: that a batch of training is cut into; others are in at most so many.
        first_rank, last_rank: the ranks that hold the first and the last stage.
    """

    comm: Communicator
    num_microbatches: int
    first_rank: int
    last_rank: int

    def begin(
        self,
        mode: Mode,
        x: Batch | None,
        y: Batch | None,
        *,
        has_loss_fn: bool,
        tied: Mapping[str, bool | None],
        input_grads: bool = False,
        weights: Sequence[float] | None = None,
    ) -> StepInputs:
        """Check what every rank was given. Collective.

        Args:
            weights: of the micro-batches; see `PipelineExecutor.step`.
            has_loss_fn: whether this rank could compute a loss.
            tied: see `LocalStages.tied_states`.
        Raises:
            ValueError: the first rank's mistake, or a difference between ranks; the same message on every rank.
        """
        if self.comm.size > 1:
            check_told_again("the shapes of a batch")
        inputs: list[Array] | None = None
        targets: list[Array] | None = None
        weights_given: list[float] | None = None

        def prepare() -> Array:
            nonlocal inputs, targets, weights_given
            self._check_given(mode, x, y, has_loss_fn)
            inputs = None if x is None else self._cut(mode, x, "x")
            for part in inputs or ():
                ArraySpec.of(part).encode()  # for its errors
                if input_grads and not ArraySpec.of(part).is_float:
                    raise ValueError(f"input_grads needs a floating point x, got {part.dtype}")
            microbatch.check_used_once(inputs or ())
            targets = None if y is None else self._cut(mode, y, "y")
            if weights is not None:
                parts = targets if inputs is None else inputs
                weights_given = microbatch.check_weights(weights, None if parts is None else len(parts))
            states = [_TIED_STATES[state] for state in tied.values()]
            row = _row(inputs, targets, weights_given, is_list=isinstance(x, (list, tuple)))
            return np.array([*row, *states], np.int64)

        rows = agree(self.comm, prepare, num_columns=_NUM_COLUMNS + len(tied))
        _compare(rows[:, :_NUM_COLUMNS], self.first_rank)
        _compare_weights(rows[:, _WEIGHTS], self.last_rank)
        _compare_tied(tied, rows[:, _NUM_COLUMNS:])
        return StepInputs(inputs, targets, self._specs(rows[self.first_rank], inputs), weights_given)

    def _check_given(self, mode: Mode, x: Batch | None, y: Batch | None, has_loss_fn: bool) -> None:
        if self.comm.rank == self.first_rank and x is None:
            raise ValueError("the first stage needs an input x, got None")
        if self.comm.rank == self.last_rank and mode.has_loss:
            if not has_loss_fn:
                raise ValueError(
                    "the last stage needs a loss_fn; give one to PipelineExecutor, or use forward and backward"
                )
            if y is None:
                raise ValueError("the last stage needs targets y, got None")

    def _cut(self, mode: Mode, batch: Batch, name: str) -> list[Array]:
        """Cut a batch: exactly as the schedule of training wants it, elsewhere as it comes."""
        most = self.num_microbatches
        count = most if mode is Mode.TRAIN else microbatch.num_parts(batch, most)
        return microbatch.as_microbatches(batch, count, name)

    def _specs(self, row: Array, inputs: list[Array] | None) -> list[ArraySpec]:
        """Return shape and dtype of every micro-batch of x, on every rank.

        Args:
            row: what the first stage's rank told.
        """
        count = int(row[_NUM_PARTS])
        if not row[_IS_LIST]:
            first = ArraySpec.decode(row[_SPEC:_NUM_COLUMNS])
            sizes = microbatch.sizes(int(row[_NUM_SAMPLES]), count)
            return [ArraySpec((size, *first.shape[1:]), first.dtype) for size in sizes]
        table = np.zeros((count, SPEC_COLUMNS), np.int64)
        if self.comm.rank == self.first_rank:
            table[:] = [ArraySpec.of(part).encode() for part in inputs or ()]
        return [ArraySpec.decode(spec) for spec in self.comm.broadcast(table, root=self.first_rank).wait()]


def agree_on_orders(
    comm: Communicator,
    schedule: Schedule,
    stage_ids: Sequence[int],
    *,
    num_microbatches: int,
    trains: bool = True,
    skips: Skips = (),
) -> list[list[Action]] | None:
    """Return the order of every rank, known to be the same on all of them. Collective.

    Args:
        stage_ids: of the stages that this rank holds.
        trains: whether this rank could compute a loss; without one, forwards alone can run.
        skips: of the stages, as this rank knows them.
    Returns:
        None where no rank trains and the schedule does not allow these sizes.
    Raises:
        ValueError: the schedule does not allow these sizes, places other stages on a rank, or is not the same on all;
            the same message on every rank.
    """
    orders: list[list[Action]] | None = None

    def prepare() -> Array:
        nonlocal orders
        if num_microbatches < 1:
            raise ValueError(f"num_microbatches must be at least 1, got {num_microbatches}")
        try:
            orders = training_orders(schedule, comm.size, num_microbatches)
        except ValueError:
            if trains:
                raise
        num_stages = schedule.num_stages(comm.size)
        own = [stage for stage in range(num_stages) if schedule.rank_of(stage, comm.size) == comm.rank]
        if list(stage_ids) != own:
            raise ValueError(f"{schedule.name} places stages {own} on rank {comm.rank}, got {list(stage_ids)}")
        return np.array([num_microbatches, zlib.crc32(repr((orders, skips)).encode())], np.int64)

    rows = agree(comm, prepare, num_columns=2)
    for rank, row in enumerate(rows):
        if (row != rows[0]).any():
            raise ValueError(
                "all ranks of a pipeline need the same schedule, skip connections and num_microbatches, but ranks 0 "
                f"and {rank} differ, with {rows[0, 0]} and {row[0]} micro-batches"
            )
    return orders


def training_orders(schedule: Schedule, num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Return the order of every rank, checked to be a training step.

    Args:
        schedule: whose order is asked for.
        num_ranks: of the pipeline.
        num_microbatches: of a step.
    Raises:
        ValueError: the schedule does not allow these sizes, or is none.
    """
    orders = schedule.orders(num_ranks, num_microbatches)
    num_stages = schedule.num_stages(num_ranks)
    validate(orders, num_stages=num_stages, num_microbatches=num_microbatches, rank_of=schedule.rank_of)
    return orders


# The row that a rank tells the others: columns of integers.
_HAS_X, _HAS_Y, _IS_LIST, _NUM_PARTS, _NUM_SAMPLES, _NUM_TARGETS, _X_SIZES, _Y_SIZES, _SCOPE = range(9)
_WEIGHTS, _SPEC = 9, 10
_NO_WEIGHTS = 0
_NUM_COLUMNS = _SPEC + SPEC_COLUMNS
_TIED_STATES = {None: 0, False: 1, True: 2}  # in a column for each tied parameter: not here, frozen, trained


def _row(
    inputs: list[Array] | None, targets: list[Array] | None, weights: list[float] | None, *, is_list: bool
) -> Array:
    scope = rng.current_scope()
    row = np.zeros(_NUM_COLUMNS, np.int64)
    row[_SCOPE] = 0 if scope is None else hash((scope.seed, scope.step, scope.first_sample))
    row[_WEIGHTS] = _NO_WEIGHTS if weights is None else hash(tuple(weights)) or 1
    if inputs is not None:
        row[[_HAS_X, _IS_LIST, _NUM_PARTS]] = 1, is_list, len(inputs)
        row[_NUM_SAMPLES] = sum(len(part) for part in inputs)
        row[_X_SIZES] = hash(tuple(len(part) for part in inputs))
        row[_SPEC:] = ArraySpec.of(inputs[0]).encode()
    if targets is not None:
        row[_HAS_Y] = 1
        row[_NUM_TARGETS] = sum(len(part) for part in targets)
        row[_Y_SIZES] = hash(tuple(len(part) for part in targets))
    return row


def _batch(row: Array) -> str:
    """Say what a rank was given as x."""
    return f"{ArraySpec.decode(row[_SPEC:])} of {counted(int(row[_NUM_SAMPLES]), 'sample')}"


def _compare(rows: Array, first_rank: int) -> None:
    """Raise, on all ranks alike, if what two ranks were given does not fit together."""
    first = rows[first_rank]
    for rank, row in enumerate(rows):
        if (
            row[_HAS_X]
            and (row[[_X_SIZES, *range(_SPEC, _NUM_COLUMNS)]] != first[[_X_SIZES, *range(_SPEC, _NUM_COLUMNS)]]).any()
        ):
            raise ValueError(
                "all ranks of a pipeline that are given x need the same batch, cut alike, but the first micro-batch is "
                f"{_batch(first)} on rank {first_rank} and {_batch(row)} on rank {rank}"
            )
        if row[_HAS_Y] and row[_Y_SIZES] != first[_X_SIZES]:
            raise ValueError(
                f"x on rank {first_rank} and y on rank {rank} must have the same samples in every micro-batch, "
                f"got {first[_NUM_SAMPLES]} and {row[_NUM_TARGETS]} in all"
            )
        if row[_SCOPE] != first[_SCOPE]:
            raise ValueError(
                "all ranks of a pipeline must run in the same rng.scope (seed, step, first_sample), "
                f"but ranks {first_rank} and {rank} differ"
            )


def _compare_weights(weights: Array, last_rank: int) -> None:
    """Raise, on all ranks alike, where a rank's weights are not those that the losses will be weighed by."""
    for rank, given in enumerate(weights):
        if given not in (_NO_WEIGHTS, weights[last_rank]):
            raise ValueError(
                f"weights: the rank of the last stage, {last_rank}, needs them, and others give the same or none, "
                f"but rank {rank} gave others"
            )


def _compare_tied(tied: Mapping[str, bool | None], states_of: Array) -> None:
    """Raise, on all ranks alike, where the sum of a tied gradient would miss a rank."""
    for name, states in zip(tied, states_of.T, strict=True):
        frozen, trained = (np.flatnonzero(states == _TIED_STATES[state]) for state in (False, True))
        if frozen.size and trained.size:
            raise ValueError(
                f"a tied parameter is frozen on all ranks that hold it or on none, but {name!r} is frozen on "
                f"rank {frozen[0]} and not on rank {trained[0]}"
            )
