"""How a step opens: ranks tell each other what they were given, and bad input raises on all of them.

One allgather of a fixed row of integers, before any message between stages. Without it a mistake on one rank
would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distributed.communicator import Communicator
from minigrad import rng
from pipeline import microbatch
from pipeline.spec import SPEC_COLUMNS, Spec

Array = np.ndarray[Any, Any]
Batch = Array | Sequence[Array]


@dataclass(frozen=True)
class Opening:
    """What all ranks agree on.

    Attributes:
        inputs: this rank's micro-batches of x, if it was given x.
        targets: of y, if it was given y.
        specs: shape and dtype of the first stage's micro-batches, known on every rank.
    """

    inputs: list[Array] | None
    targets: list[Array] | None
    specs: list[Spec]

    @property
    def sizes(self) -> list[int]:
        """Samples of each micro-batch."""
        return [spec.shape[0] for spec in self.specs]


def open_step(
    comm: Communicator,
    x: Batch | None,
    y: Batch | None,
    *,
    num_microbatches: int,
    needs_x: bool,
    needs_y: bool,
    has_loss_fn: bool,
    first_rank: int,
    input_grads: bool = False,
) -> Opening:
    """Check what every rank was given. Collective.

    Args:
        needs_x: whether this rank holds the first stage; needs_y: the last one, and there is a loss.
        has_loss_fn: whether this rank could compute a loss.
        first_rank: the rank that holds the first stage.
    Raises:
        ValueError: the first rank's mistake, or a difference between ranks; the same message on every rank.
    """
    inputs: list[Array] | None = None
    targets: list[Array] | None = None

    def prepare() -> Array:
        nonlocal inputs, targets
        if needs_x and x is None:
            raise ValueError("the first stage needs an input x, got None")
        if needs_y and not has_loss_fn:
            raise ValueError(
                "the last stage needs a loss_fn; give one to PipelineExecutor, or use forward and backward"
            )
        if needs_y and y is None:
            raise ValueError("the last stage needs targets y, got None")
        if x is not None:
            inputs = microbatch.as_microbatches(x, num_microbatches, "x")
            if input_grads and not Spec.of(inputs[0]).is_float:
                raise ValueError(f"input_grads needs a floating point x, got {inputs[0].dtype}")
        if y is not None:
            targets = microbatch.as_microbatches(y, num_microbatches, "y")
        return _row(inputs, targets, is_list=isinstance(x, (list, tuple)))

    rows = agree(comm, prepare, num_columns=_NUM_COLUMNS)
    _compare(rows, first_rank)
    if rows[first_rank, _IS_LIST]:
        table = np.zeros((num_microbatches, SPEC_COLUMNS), np.int64)
        if comm.rank == first_rank:
            assert inputs is not None
            table[:] = [Spec.of(part).encode() for part in inputs]
        specs = [Spec.decode(row) for row in comm.broadcast(table, root=first_rank).wait()]
    else:
        first = Spec.decode(rows[first_rank, _SPEC:])
        sizes = microbatch.sizes(int(rows[first_rank, _NUM_SAMPLES]), num_microbatches)
        specs = [Spec((size, *first.shape[1:]), first.dtype) for size in sizes]
    return Opening(inputs, targets, specs)


def agree(comm: Communicator, prepare: Callable[[], Array], *, num_columns: int) -> Array:
    """Run a check on every rank; if it raises on any, raise the first such rank's message on all. Collective.

    Args:
        prepare: raises ValueError or TypeError for bad input; else returns (num_columns,) int64 to tell the others.
    Returns:
        (size, num_columns) the rows of all ranks.
    """
    row = np.zeros(1 + num_columns, np.int64)
    error: Exception | None = None
    try:
        row[1:] = prepare()
    except (ValueError, TypeError) as caught:
        row[0], error = 1, caught
    rows = comm.allgather(row).wait()
    if rows[:, 0].any():
        messages = comm.gather_objects(str(error))
        rank = int(rows[:, 0].argmax())
        raise ValueError(f"[rank {rank}] {messages[rank]}") from error
    return rows[:, 1:]


# The row that a rank tells the others: columns of integers.
_HAS_X, _HAS_Y, _IS_LIST, _NUM_SAMPLES, _NUM_TARGETS, _X_SIZES, _Y_SIZES, _SCOPE, _SPEC = range(9)
_NUM_COLUMNS = _SPEC + SPEC_COLUMNS


def _row(inputs: list[Array] | None, targets: list[Array] | None, *, is_list: bool) -> Array:
    scope = rng.current_scope()
    row = np.zeros(_NUM_COLUMNS, np.int64)
    row[_SCOPE] = 0 if scope is None else hash((scope.seed, scope.step, scope.first_sample))
    if inputs is not None:
        row[[_HAS_X, _IS_LIST]] = 1, is_list
        row[_NUM_SAMPLES] = sum(len(part) for part in inputs)
        row[_X_SIZES] = hash(tuple(len(part) for part in inputs))
        row[_SPEC:] = Spec.of(inputs[0]).encode()
    if targets is not None:
        row[_HAS_Y] = 1
        row[_NUM_TARGETS] = sum(len(part) for part in targets)
        row[_Y_SIZES] = hash(tuple(len(part) for part in targets))
    return row


def _compare(rows: Array, first_rank: int) -> None:
    """Raise, on all ranks alike, if what two ranks were given does not fit together."""
    first = rows[first_rank]
    for rank, row in enumerate(rows):
        if (
            row[_HAS_X]
            and (row[[_X_SIZES, *range(_SPEC, _NUM_COLUMNS)]] != first[[_X_SIZES, *range(_SPEC, _NUM_COLUMNS)]]).any()
        ):
            raise ValueError(
                "all ranks of a pipeline that are given x need the same batch, but the first micro-batch is "
                f"{Spec.decode(first[_SPEC:])} of {first[_NUM_SAMPLES]} samples on rank {first_rank} and "
                f"{Spec.decode(row[_SPEC:])} of {row[_NUM_SAMPLES]} samples on rank {rank}"
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
