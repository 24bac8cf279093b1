"""How values of several ranks become one: order, rounding, and blocks."""

import numpy as np
import pytest

from distributed.comm import reduction
from distributed.comm.reduction import ReduceOp, combine, reduce_in_rank_order

OPS = {ReduceOp.SUM: np.add.reduce, ReduceOp.MIN: np.min, ReduceOp.MAX: np.max, ReduceOp.MEAN: np.mean}


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 33])
def test_blocks_give_what_the_whole_gives(monkeypatch, op, num_ranks, n):
    monkeypatch.setattr(reduction, "_BLOCK_ELEMENTS", 8)
    rows = np.random.default_rng(n).integers(-9, 9, (num_ranks, n)).astype(np.float64)
    expected = OPS[op](rows, axis=0)
    result = np.empty(n)
    reduce_in_rank_order(list(rows), op, [result])
    np.testing.assert_allclose(result, expected, rtol=1e-15)
    reduce_in_rank_order(list(rows), op, list(rows))  # into the very arrays that it reads
    np.testing.assert_array_equal(rows, np.tile(result, (num_ranks, 1)))


def test_sums_are_taken_in_rank_order():
    parts = [np.array([x]) for x in (1e16, 1.0, -1e16, 1.0)]
    assert combine(parts, ReduceOp.SUM, np.empty(1)) == ((1e16 + 1.0) - 1e16) + 1.0


def test_half_precision_is_rounded_once():
    parts = [np.array([x], np.float16) for x in (2048, 1, 1)]  # 2048 + 1 is 2048 in float16
    result = np.empty(1, np.float16)
    reduce_in_rank_order(parts, ReduceOp.SUM, [result])
    assert result == 2050
