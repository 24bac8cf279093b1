"""The check of collectives by itself: its messages are rows that a test hands over."""

from collections.abc import Callable, Generator

import numpy as np
import pytest

from distributed.comm.calls import Call
from distributed.comm.mpi.call_check import CallCheck
from distributed.comm.mpi.progress import Steps
from distributed.comm.reduction import ReduceOp
from distributed.comm.work import Array


def rows_of(call: Call, where: str) -> Array:
    """Return what a rank sends for a call."""
    sent = []

    def gather(row: Array) -> Steps:
        sent.append(row.copy())
        return row[None]
        yield

    list(CallCheck(gather, "").compare(0, call, where))
    return sent[0]


def beside(other: Array) -> Callable[[Array], Steps]:
    """Return messages of two ranks, in one round: this one's row, and another's."""

    def gather(row: Array) -> Steps:
        yield
        return np.stack([row, other])

    return gather


def run(steps: Generator[None, None, None]) -> None:
    for _ in steps:
        pass


BARRIER = Call("barrier")


def test_equal_calls_pass_from_whatever_line() -> None:
    run(CallCheck(beside(rows_of(BARRIER, "b.py:2")), "").compare(0, BARRIER, "a.py:1"))


def test_calls_that_differ_are_named_and_no_later_call_passes() -> None:
    summed = Call("allreduce", np.zeros(3), op=ReduceOp.SUM)
    check = CallCheck(beside(rows_of(summed, "b.py:2")), " among ranks [4, 5]")
    rule = (
        r"collective #0 among ranks \[4, 5\] rank 0 calls barrier \(a.py:1\) and rank 1 calls allreduce of "
        r"float64\[3\] by SUM \(b.py:2\)$"
    )
    for number, call in enumerate((BARRIER, summed)):
        with pytest.raises(RuntimeError, match=rule):
            run(check.compare(number, call, "a.py:1"))


def test_calls_are_compared_in_the_order_of_their_launch() -> None:
    check = CallCheck(beside(rows_of(BARRIER, "")), "")
    first, second = (check.compare(number, BARRIER, "") for number in range(2))
    for _ in range(3):
        next(second)  # whose rows have come
    run(first)
    with pytest.raises(StopIteration):
        next(second)


def test_of_a_long_text_what_moves_is_compared_and_the_end_of_the_path_is_shown() -> None:
    # What the gradients are of filled the row from behind, so that calls of different shapes were equal.
    name, path = "w" * 300, "/long" * 100
    ours, theirs = (Call("allreduce", np.zeros(n), op=ReduceOp.MEAN, subject=name) for n in (3, 4))
    check = CallCheck(beside(rows_of(theirs, f"{path}/b.py:2")), "")
    with pytest.raises(RuntimeError, match=r"of float64\[3\] by MEAN.*long/a.py:1\).*of float64\[4\].*long/b.py:2\)"):
        run(check.compare(0, ours, f"{path}/a.py:1"))
