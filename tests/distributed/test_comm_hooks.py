"""Comm hooks: when what was narrowed is wide again."""

import numpy as np
import pytest

from distributed import SoloCommunicator, Work
from distributed.data_parallel.comm_hooks import compressed


class Narrow(Work):
    """A sum that has arrived at its third test; a wait for it fails as often as is said."""

    def __init__(self, result, num_failures=0):
        self.result, self.num_tests, self.num_failures = result, 0, num_failures

    def test(self):
        self.num_tests += 1
        return self.num_tests >= 3

    def wait(self):
        if self.num_failures:
            self.num_failures -= 1
            raise KeyboardInterrupt
        return self.result


def travelling(num_failures=0):
    """Return wide gradients whose sum is 7, and the work that brings it."""
    comm = SoloCommunicator()
    comm.allreduce = lambda narrow: Narrow(np.full_like(narrow, 7), num_failures)
    wide = np.ones(4)
    return wide, compressed(np.float16)(wide, comm)


def test_it_is_done_only_once_the_wide_gradients_hold_the_sum():
    wide, work = travelling()
    assert [work.test(), work.test()] == [False, False]
    np.testing.assert_array_equal(wide, 1)
    assert work.test()
    np.testing.assert_array_equal(wide, 7)
    wide[:] = 5  # whoever has them now may write into them
    assert work.test()
    assert work.wait() is wide
    np.testing.assert_array_equal(wide, 5)


def test_a_wait_that_was_interrupted_has_not_brought_it():
    wide, work = travelling(num_failures=1)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    np.testing.assert_array_equal(wide, 1)
    assert not work.test()
    assert work.wait() is wide
    np.testing.assert_array_equal(wide, 7)
