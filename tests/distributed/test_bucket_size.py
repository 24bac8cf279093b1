"""The bucket size that is chosen: its model against a simulation, its fit, and one answer on all ranks."""

import math
import re

import numpy as np
import pytest

from distributed.data_parallel import bucket_size
from distributed.data_parallel.bucket_size import (
    SMALLEST_BYTES,
    BucketChoice,
    Link,
    added_seconds,
    best_bucket_bytes,
    choose_bucket_bytes,
    measure_link,
)
from distributed.data_parallel.comm_hooks import compressed
from distributed.data_parallel.compression.feedback import FeedbackHook
from distributed.data_parallel.compression.few_bits import ErrorFeedback
from distributed.data_parallel.compression.low_rank import PowerSGD
from distributed.data_parallel.compression.top_k import TopK
from minigrad.models import MLP

HOOKS = ("int4", "powersgd", "topk", "float16")
FITTING = [  # latency, seconds a byte and of a launch; bytes of gradients, seconds of backward
    (Link(1e-3, 1e-8), 10_000_000, 0.2),
    (Link(1e-5, 1e-9), 10_000_000, 0.2),
    (Link(5e-2, 1e-8), 10_000_000, 0.2),  # latencies count
    (Link(1e-4, 1e-7), 3_000_001, 0.1),  # the link is too slow to hide anything
    (Link(1e-4, 1e-8), 5000, 0.01),  # two of the smallest buckets, the second one short
    (Link(1e-4, 1e-8), 100, 0.01),  # less than one
    (Link(1e-3, 1e-8), 10_000_000, 0.0),
    (Link(0.0, 1e-8), 1 << 24, 0.3),
    (Link(2e-3, 0.0), 1 << 24, 0.3),
    (Link(2e-5, 2e-10, 1e-4), 3_337_216, 0.06),  # one host
    (Link(1e-3, 8e-8, 2e-4), 3_337_216, 0.06),
    (Link(0.0, 0.0, 1e-3), 3_000_001, 0.1),
]


def evenly(num_bytes):
    """Return what cuts so many bytes into parts of a size."""
    return lambda size: [min(size, num_bytes - start) for start in range(0, num_bytes, size)]


def simulated(size: int, link: Link, num_bytes: int, backward_seconds: float) -> float:
    """Let each bucket wait for its gradients and for the link, one after another; return what that adds."""
    end = launches = 0.0
    for start in range(0, num_bytes, size):
        stop = min(start + size, num_bytes)
        launches += link.launch
        ready = backward_seconds * stop / num_bytes + launches
        end = max(end, ready) + link.latency + link.seconds_a_byte * (stop - start)
    return end - backward_seconds


@pytest.mark.parametrize("case", FITTING)
def test_what_is_added_is_what_a_simulation_adds(case):
    link, num_bytes, backward_seconds = case
    for size in [SMALLEST_BYTES << i for i in range(14)] + [5000, 999_999, 3_000_000, 9_999_999]:
        added = added_seconds(evenly(num_bytes)(size), link, backward_seconds)
        assert added == pytest.approx(simulated(size, *case), abs=1e-9)


def test_a_short_last_bucket_is_not_what_counts_most():
    """The one before it still travels when the backward ends: of it 1 ms is left, after the last one's latency 0.1."""
    link = Link(1e-4, 1e-7)
    assert added_seconds([1_000_000, 1_000_000, 1], link, 0.3) == pytest.approx(0.1 + 2e-4 + 1e-7, rel=1e-3)
    assert added_seconds([1_000_000, 1_000_000], link, 0.3) == pytest.approx(0.1 + 1e-4)
    assert added_seconds([], link, 0.3) == 0


@pytest.mark.parametrize("case", FITTING)
def test_a_step_with_the_best_size_is_within_2_percent_of_a_sweep_over_all_sizes(case):
    link, num_bytes, backward_seconds = case
    swept = [math.ceil(SMALLEST_BYTES * 1.03**i) for i in range(300)]
    swept = [size for size in swept if size <= num_bytes] + [num_bytes]
    best = best_bucket_bytes(link, evenly(num_bytes), backward_seconds)
    least = min(simulated(size, *case) for size in swept)
    assert backward_seconds + simulated(best, *case) <= 1.02 * (backward_seconds + least)
    assert best >= SMALLEST_BYTES


def test_launches_keep_buckets_from_becoming_as_small_as_can_be():
    """On one host messages take microseconds: 8 KiB were chosen, and 400 launches made the backward longer."""
    model = evenly(3_337_216), 0.06
    assert best_bucket_bytes(Link(5e-6, 2e-10), *model) <= 16 << 10
    sizes = [best_bucket_bytes(Link(5e-6, 2e-10, launch), *model) for launch in (1e-6, 1e-5, 1e-4, 1e-3)]
    assert sizes == sorted(set(sizes))
    assert 256 << 10 < sizes[2] < 3_337_216


def test_a_quick_start_wants_small_buckets_and_a_slow_one_large_ones():
    sizes = [best_bucket_bytes(Link(latency, 1e-8), evenly(10_000_000), 0.2) for latency in (1e-6, 1e-4, 1e-2, 1.0)]
    assert sizes == sorted(set(sizes))
    assert sizes[0] < 2 * SMALLEST_BYTES
    assert sizes[-1] == 10_000_000, "one bucket has all"


def test_of_equals_the_fewest_messages():
    assert best_bucket_bytes(Link(0.0, 0.0), evenly(1 << 20), 0.1) == 1 << 20
    assert best_bucket_bytes(Link(1.0, 1.0, 1.0), evenly(0), 0.0) == SMALLEST_BYTES


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("value", [-1, math.inf, math.nan])
def test_what_is_no_time_is_refused(place, value):
    given = [1e-3, 1e-8, 1e-5, 0.1]
    given[place] = value
    name = ("latency", "seconds_a_byte", "launch", "backward_seconds")[place]
    with pytest.raises(ValueError, match=re.escape(f"{name} must be at least 0 and finite, got {value}")):
        best_bucket_bytes(Link(*given[:3]), evenly(1000), given[3])


def test_gradients_that_are_not_cut_count_as_they_travel():
    """Every size from 1 MB to 8 MB cuts this model into the same two buckets, and none is better than the other."""

    def cut(size):
        return [8_000_000, 1_000_000] if size < 9_000_000 else [9_000_000]

    assert best_bucket_bytes(Link(1e-3, 1e-8), cut, 0.2) == 4_500_000
    assert best_bucket_bytes(Link(1.0, 1e-8), cut, 0.2) == 9_000_000


def test_a_line_is_found_again_and_noise_of_the_largest_does_not_decide():
    sizes = [4 << 10 << 2 * i for i in range(6)]
    fitted = Link.fit(sizes, [1e-4 + 2e-9 * size for size in sizes])
    assert (fitted.latency, fitted.seconds_a_byte) == pytest.approx((1e-4, 2e-9))
    times = [1e-4 + 2e-9 * size for size in sizes]
    times[-1] *= 1.2
    assert Link.fit(sizes, times).latency == pytest.approx(1e-4, rel=0.1)
    assert Link.fit(sizes, [0.0] * 6).seconds_a_byte == pytest.approx(0), "a clock that stands still"
    assert Link.fit(sizes, times[::-1]).seconds_a_byte == 0, "no message is quicker for being larger"


@pytest.mark.ranks(1, 2, 3)
def test_all_ranks_have_rank_0s_answer(ranks):
    def program(comm):
        params = MLP([40, 30, 2]).parameters()
        choice = choose_bucket_bytes(comm, params, 0.01 + comm.rank)
        assert choice.backward_seconds == 0.01
        assert 0 < choice.link.launch < 1
        num_bytes = sum(p.data.nbytes for p in params)
        assert SMALLEST_BYTES <= choice.bucket_bytes <= num_bytes
        comm.allreduce(np.ones(3)).wait()  # no message is left over
        return choice

    assert len(set(ranks.run(program))) == 1


@pytest.mark.ranks(2)
def test_a_backward_that_is_no_time_is_refused_on_all(ranks):
    def program(comm):
        with pytest.raises(ValueError, match="backward_seconds must be at least 0 and finite, got nan"):
            choose_bucket_bytes(comm, MLP([3, 2]).parameters(), math.nan if comm.rank == 0 else 1.0)

    ranks.run(program)


@pytest.mark.ranks(2)
def test_a_slow_link_is_measured_with_few_bytes(ranks, monkeypatch):
    seen = []
    monkeypatch.setattr(bucket_size, "_seconds_of", lambda hook, array, comm: (0.0, seen.append(array.nbytes) or 0.1))
    ranks.run(measure_link)
    assert max(seen) == SMALLEST_BYTES * 16


def test_a_choice_says_what_it_was_made_for():
    choice = BucketChoice(1 << 18, Link(1e-3, 1e-2 / 2**20, 5e-5), 0.2)
    assert str(choice) == (
        "buckets of 256 KiB: one takes 1 ms and 10 ms a MiB, 0.05 ms of it in the call, beside a backward of 200 ms"
    )


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("hook", [ErrorFeedback("int4"), PowerSGD(), TopK(), compressed(np.float16)], ids=HOOKS)
def test_a_comm_hooks_buckets_are_measured_as_it_sends_them(ranks, monkeypatch, hook):
    measured = []
    seconds_of = bucket_size._seconds_of

    def note(comm_hook, array, comm):
        measured.append(comm_hook)
        return seconds_of(comm_hook, array, comm)

    monkeypatch.setattr(bucket_size, "_seconds_of", note)

    def program(comm):
        choice = choose_bucket_bytes(comm, MLP([40, 30, 2]).parameters(), 0.01, hook)
        assert choice.link.latency + choice.link.seconds_a_byte > 0

    ranks.run(program)
    assert all(isinstance(each, type(hook)) for each in measured)
    if isinstance(hook, FeedbackHook):
        assert all(each.sent_bytes > 0 for each in measured)
        assert (hook.sent_bytes, hook.buffers()) == (0, []), "it has sent and kept nothing"
