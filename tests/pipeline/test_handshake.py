"""How a step begins: what all ranks know afterwards, and one line on every rank for a mistake on any of them."""

import contextlib
import re

import numpy as np
import pytest

from minigrad import rng
from pipeline import SCHEDULES, Schedule, ScheduleError
from pipeline.runtime.boundary import ArraySpec
from pipeline.runtime.handshake import Handshake, agree_on_orders
from pipeline.runtime.step import Mode

M = 3
X, Y = np.zeros((7, 5), np.float32), np.zeros((7, 2))


def open_on(comm, x, y, *, mode=Mode.TRAIN, **changed):
    """Begin a step in which the first rank reads x and the last one y."""
    handshake = Handshake(comm, num_microbatches=M, first_rank=0, last_rank=comm.size - 1)
    return handshake.begin(mode, x, y, **({"has_loss_fn": True, "tied": {}} | changed))


def on_ends(comm, x=X, y=Y):
    """Give x to the first rank and y to the last."""
    return x if comm.rank == 0 else None, y if comm.rank == comm.size - 1 else None


def shapes(arrays):
    return None if arrays is None else [array.shape for array in arrays]


def test_the_shapes_of_x_are_known_on_every_rank(ranks):
    def program(comm):
        given = open_on(comm, *on_ends(comm))
        return given.specs, given.sizes, shapes(given.inputs), shapes(given.targets)

    for rank, (specs, sizes, inputs, targets) in enumerate(ranks.run(program)):
        assert specs == [ArraySpec((n, 5), np.dtype(np.float32)) for n in (3, 2, 2)]
        assert sizes == [3, 2, 2]
        assert inputs == ([(3, 5), (2, 5), (2, 5)] if rank == 0 else None)
        assert targets == ([(3, 2), (2, 2), (2, 2)] if rank == ranks.size - 1 else None)


def test_the_shapes_of_a_list_are_known_on_every_rank(ranks):
    parts = [np.zeros((2, 4)), np.zeros((1, 6), np.int64), np.zeros((2, 4))]

    def program(comm):
        return open_on(comm, *on_ends(comm, parts, [np.zeros(2), np.zeros(1), np.zeros(2)])).specs

    assert ranks.run(program) == [[ArraySpec.of(part) for part in parts]] * ranks.size


def test_all_ranks_may_give_the_same_batch(ranks):
    ranks.run(lambda comm: open_on(comm, X, Y))


def test_without_a_loss_no_targets_are_needed(ranks):
    ranks.run(lambda comm: open_on(comm, X, None, mode=Mode.FORWARD))


def test_float_inputs_may_have_gradients(ranks):
    ranks.run(lambda comm: open_on(comm, [X, Y, X + 1], None, mode=Mode.FORWARD, input_grads=True))


def mixed(dtype):
    return [np.zeros(2), np.zeros(2, dtype), np.ones(2)]


ONE_RANK = {  # what (x, y) are on the ends, what else changes -> the message, without the rank
    "no x": ({"x": None}, {}, "rank 0.*the first stage needs an input x, got None"),
    "no y": ({"y": None}, {}, "rank {last}.*the last stage needs targets y, got None"),
    "no loss": (
        {},
        {"has_loss_fn": False},
        "rank {last}.*the last stage needs a loss_fn; give one to",
    ),
    "no axis": ({"x": np.float64(1)}, {}, "rank 0.*a batch needs a first axis of samples, got a scalar"),
    "no axis of y": ({"y": np.float64(1)}, {}, "rank {last}.*a batch needs a first axis of samples, got a scalar"),
    "few": ({"x": X[:2]}, {}, "rank 0.*at least one sample for each micro-batch, got 2 and 3"),
    "count": ({"x": [X]}, {}, "rank 0.*x: num_microbatches is 3, got a list of 1"),
    "count of y": ({"y": [Y, Y]}, {}, "rank {last}.*y: num_microbatches is 3, got a list of 2"),
    "empty": ({"x": [X, X[:0], X]}, {}, r"rank 0.*x: micro-batch 1 needs a first axis of samples, got shape \(0, 5\)"),
    "twice": ({"x": [X, Y, X]}, {}, "rank 0.*x: each micro-batch can be used only once, but 0 and 2 are the same"),
    "integers": ({"x": mixed(int)}, {"input_grads": True}, "rank 0.*input_grads needs a floating point x, got int64"),
    "axes": ({"x": np.zeros((7, *[1] * 8))}, {}, "rank 0.*at most 8 axes"),
    "axes of one": ({"x": [X, Y, np.zeros((7, *[1] * 8))]}, {}, "rank 0.*at most 8 axes"),
    "dtype": ({"x": np.zeros(7, "U1000000")}, {}, "rank 0.*a plain dtype, with a name of at most 8 letters"),
    "ragged": ({"x": [[[1, 2], [3]]] * 3}, {}, "rank 0.*inhomogeneous"),
    "samples": ({"y": Y[:6]}, {}, "same samples in every micro-batch, got 7 and 6 in all"),
    "sizes": ({"y": [Y[:2], Y[2:5], Y[5:]]}, {}, "same samples in every micro-batch, got 7 and 7 in all"),
}


@pytest.mark.parametrize("case", ONE_RANK)
def test_a_mistake_on_one_rank_is_one_line_on_all(ranks, case):
    ends, changed, message = ONE_RANK[case]

    def program(comm):
        with pytest.raises(ValueError, match=message.format(last=comm.size - 1)) as caught:
            open_on(comm, *on_ends(comm, **ends), **changed)
        assert open_on(comm, *on_ends(comm)).sizes == [3, 2, 2]  # nothing is left behind
        return str(caught.value)

    messages = ranks.run(program)
    assert len(set(messages)) == 1
    assert "\n" not in messages[0]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    ("x", "spec", "num_samples"),
    [
        (X[:6], "float32[2, 5]", 6),
        (X[:, :4], "float32[3, 4]", 7),
        (X.astype(np.float64), "float64[3, 5]", 7),
        ([X[:3], X[3:4], X[4:]], "float32[3, 5]", 7),  # cut otherwise
    ],
)
def test_two_ranks_with_different_batches_are_told_on_all(ranks, x, spec, num_samples):
    def program(comm):
        message = re.escape(
            "all ranks of a pipeline that are given x need the same batch, cut alike, but the first micro-batch is "
            f"float32[3, 5] of 7 samples on rank 0 and {spec} of {num_samples} samples on rank {comm.size - 1}"
        )
        with pytest.raises(ValueError, match=message) as caught:
            open_on(comm, x if comm.rank == comm.size - 1 else X, Y)
        open_on(comm, X, Y)
        return str(caught.value)

    assert len(set(ranks.run(program))) == 1


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("other", [None, {"seed": 2}, {"step": 4}, {"first_sample": 8}])
def test_different_random_scopes_are_told_on_all(ranks, other):
    same = {"seed": 1, "step": 3, "first_sample": 0}

    def program(comm):
        own = same if comm.rank < comm.size - 1 else other and same | other
        message = rf"same rng.scope \(seed, step, first_sample\), but ranks 0 and {comm.size - 1} differ"
        scope = contextlib.nullcontext() if own is None else rng.scope(**own)
        with scope, pytest.raises(ValueError, match=message) as caught:
            open_on(comm, X, Y)
        with rng.scope(**same):
            open_on(comm, X, Y)
        return str(caught.value)

    assert len(set(ranks.run(program))) == 1


@pytest.mark.ranks(3, 4)
def test_a_tied_parameter_frozen_on_one_rank_only_is_told_on_all(ranks):
    def program(comm):
        # `a` is on ranks 1 and 2, frozen; `b` on 0 and 2.
        a, b = {0: (None, True), 1: (False, None), 2: (False, False)}.get(comm.rank, (None, None))
        message = (
            "a tied parameter is frozen on all ranks that hold it or on none, "
            "but 'b' is frozen on rank 2 and not on rank 0"
        )
        with pytest.raises(ValueError, match=message) as caught:
            open_on(comm, X, Y, tied={"a": a, "b": b})
        open_on(comm, X, Y, tied={"a": a, "b": None if b is None else True})
        return str(caught.value)

    assert len(set(ranks.run(program))) == 1


# The orders, when an executor is made


def orders_on(comm, *, schedule="1f1b", stage_ids=None, num_microbatches=M):
    own = [comm.rank] if stage_ids is None else stage_ids
    return agree_on_orders(comm, SCHEDULES[schedule], own, num_microbatches=num_microbatches)


def test_orders_are_those_of_the_schedule(ranks):
    def program(comm):
        assert orders_on(comm) == SCHEDULES["1f1b"].orders(comm.size, M)

    ranks.run(program)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_microbatches": 0}, "num_microbatches must be at least 1, got 0"),
        ({"num_microbatches": 1.5}, "cannot be interpreted as an integer"),
        ({"stage_ids": []}, r"1f1b places stages \[{last}\] on rank {last}, got \[\]"),
        ({"stage_ids": [9]}, r"1f1b places stages \[{last}\] on rank {last}, got \[9\]"),
    ],
)
def test_a_mistake_on_one_rank_alone_is_one_line_on_all(ranks, changed, message):
    def program(comm):
        last = comm.size - 1
        with pytest.raises(ValueError, match=rf"\[rank {last}\] .*" + message.format(last=last)) as caught:
            orders_on(comm, **(changed if comm.rank == last else {}))
        orders_on(comm)
        return str(caught.value)

    messages = ranks.run(program)
    assert len(set(messages)) == 1
    assert "\n" not in messages[0]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("changed", [{"num_microbatches": 4}, {"schedule": "gpipe"}])
def test_different_orders_are_told_on_all(ranks, changed):
    def program(comm):
        last = comm.size - 1
        given = changed.get("num_microbatches", M)
        message = (
            "all ranks of a pipeline need the same schedule, skip connections and num_microbatches, "
            f"but ranks 0 and {last} differ, with 3 and {given} micro-batches"
        )
        with pytest.raises(ValueError, match=message) as caught:
            orders_on(comm, **(changed if comm.rank == last else {}))
        orders_on(comm)
        return str(caught.value)

    assert len(set(ranks.run(program))) == 1


def test_orders_that_are_no_schedule_are_drawn(ranks):
    lazy = Schedule("lazy", lambda rank, num_ranks, num_microbatches: [])

    def program(comm):
        with pytest.raises(ValueError, match="every stage runs every micro-batch") as caught:
            agree_on_orders(comm, lazy, [comm.rank], num_microbatches=2)
        assert isinstance(caught.value.__cause__, ScheduleError)

    ranks.run(program)
