"""The bound that `make bench-ddp` prints, against time lines drawn by hand."""

import pytest
from ddp_bound import exposed_seconds


@pytest.mark.parametrize(
    ("ready", "transfers", "exposed"),
    [
        ([10.0], [4.0], 4.0),  # one bucket, ready at the end: everything
        ([1, 2, 10.0], [3, 3, 0.5], 0.5),  # 1-4, 4-7, 10-10.5
        ([1, 2, 3.0], [3, 3, 0.5], 4.5),  # 1-4, 4-7, 7-7.5: the channel is what takes long
        ([3.0, 3.0], [1.0, 2.0], 3.0),  # all ready at the end
    ],
)
def test_buckets_travel_one_at_a_time(ready, transfers, exposed):
    assert exposed_seconds(ready, transfers, 0.0) == pytest.approx(exposed)


def test_moving_the_bytes_slows_the_backward():
    # half the core is gone from 2 to 6: computed 2 there, and 4 more until 10
    assert exposed_seconds([2.0, 8.0], [4.0, 1.0], 2.5) == pytest.approx(10 + 1 - 8)
    # the backward ends while the first bucket still travels: 2 of work from 2 to 6, the channel is busy until 12
    assert exposed_seconds([2.0, 4.0], [10.0, 2.0], 6.0) == pytest.approx(14 - 4)
