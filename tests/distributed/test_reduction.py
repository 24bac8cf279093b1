"""How values of several ranks become one: order, rounding, and blocks."""

import numpy as np
import pytest

from distributed.comm import reduction
from distributed.comm.reduction import ReduceOp, combine, reduce_in_rank_order, sum_widely

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


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("narrow", [np.float32, np.float16])
@pytest.mark.parametrize("seed", range(3))
def test_wide_sums_are_rounded_once_whoever_has_wide_values(monkeypatch, num_ranks, narrow, seed):
    """Two narrow numbers too, which are added without a wide one: of any exponents, and where the sum is subnormal."""
    monkeypatch.setattr(reduction, "_BLOCK_ELEMENTS", 1000)
    draw = np.random.default_rng(seed)
    exponents = (
        draw.uniform(-44, 37, (num_ranks, 5003)) if narrow is np.float32 else draw.uniform(-7, 4, (num_ranks, 5003))
    )
    rows = (draw.standard_normal((num_ranks, 5003)) * 10.0**exponents).astype(narrow)
    rows[:, :10] = rows[0, :10] * np.where(np.arange(num_ranks) % 2, -1, 1)[:, None]
    expected = rows.astype(np.float64)[0]
    for row in rows.astype(np.float64)[1:]:
        expected = expected + row
    for wide in ([], [0], [num_ranks - 1], range(num_ranks)):
        parts = [row.astype(np.float64) if rank in wide else row.copy() for rank, row in enumerate(rows)]
        outs = [np.empty(5003, narrow), parts[0] if parts[0].dtype == narrow else np.empty(5003, narrow)]
        sum_widely(parts, outs, np.float64)
        for out in outs:
            np.testing.assert_array_equal(out, expected.astype(narrow))


def test_a_wide_sum_of_three_is_not_that_of_narrow_ones():
    parts = [np.array([x], np.float32) for x in (2**24, 1, 1)]
    out = np.empty(1, np.float32)
    sum_widely(parts, [out], np.float64)
    assert out == 2**24 + 2
