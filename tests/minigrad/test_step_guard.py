"""The guard of a step: what is not finite is skipped and counted, and too much of it ends the training."""

from math import inf, nan

import pytest

from minigrad.step_guard import StepGuard


@pytest.mark.parametrize("bad", [(nan, 1.0), (1.0, nan), (inf, 1.0), (1.0, -inf)])
def test_a_step_is_skipped_for_any_value_that_is_not_finite(bad):
    guard = StepGuard()
    assert guard.allows(1.0, 2.0)
    assert not guard.allows(*bad)
    assert guard.allows(0.0, 1e300)
    assert (guard.num_skipped, guard.num_in_a_row) == (1, 0)


def test_too_many_in_a_row_raise_and_a_good_one_between_starts_the_count_again():
    guard = StepGuard(max_in_a_row=2)
    for norms in [(nan, inf), (nan, nan)]:
        assert [guard.allows(norm) for norm in norms] == [False, False]
        assert guard.allows(1.0)
    assert (guard.allows(inf), guard.allows(inf)) == (False, False)
    with pytest.raises(FloatingPointError, match=r"no more than 2 steps in a row .* now got nan and 2\.0: go on"):
        guard.allows(nan, 2.0)
    assert guard.num_skipped == 7


def test_none_is_skipped_where_none_may_be():
    with pytest.raises(FloatingPointError, match=r"no more than 0 steps in a row .* now got inf"):
        StepGuard(max_in_a_row=0).allows(inf)
    with pytest.raises(ValueError, match="max_in_a_row must not be negative, got -1"):
        StepGuard(max_in_a_row=-1)
