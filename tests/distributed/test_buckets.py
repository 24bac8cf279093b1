"""Buckets: how gradients are packed, in which order they are launched, and the manager used on its own.

A plan is drawn as its buckets in launch order: `c b | a`. Sizes are float64 elements, and so are the limits here.
"""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed import DistributedDataParallel, GradientBucketManager, SoloCommunicator
from distributed.data_parallel.buckets import plan as planning
from distributed.data_parallel.buckets.plan import plan_buckets
from minigrad import FlatBuffer, Parameter, backward_with_hooks

ELEMENT_BYTES = 8


def make(**sizes):
    return [Parameter(np.zeros(size), name) for name, size in sizes.items()]


def drawn(plan):
    return " | ".join(" ".join(p.name for p in bucket.params) for bucket in plan)


def plan(params, bucket_size, last=()):
    return drawn(plan_buckets(params, bucket_size * ELEMENT_BYTES, last))


# The plan


@pytest.mark.parametrize(
    ("bucket_size", "expected"),
    [
        (1, "d | c | b | a"),
        (2, "d | c | b a"),
        (3, "d | c b | a"),
        (4, "d | c b a"),
        (100, "d c b a"),
    ],
)
def test_buckets_fill_up_in_the_order_of_the_backward(bucket_size, expected):
    assert plan(make(a=1, b=1, c=2, d=3), bucket_size) == expected


def test_the_first_and_the_last_bucket_are_small(monkeypatch):
    monkeypatch.setattr(planning, "EDGE_BUCKET_BYTES", 2 * ELEMENT_BYTES)
    params = make(a=1, b=1, c=1, d=1, e=1, f=1, g=1, h=1)
    assert plan(params, 100) == "h g | f e d c | b a"
    assert plan(params, 4) == "h g | f e | d c | b a"
    assert plan(params[:2], 100) == "b a"
    assert plan(params[:3], 100) == "c b | a"
    assert plan(make(a=50, b=1, c=1, d=50), 100) == "d | c b | a"


def test_a_gradient_larger_than_a_bucket_travels_alone():
    assert plan(make(a=1, b=9, c=1, d=1), 2) == "d c | b | a"


def test_a_bucket_does_not_end_behind_a_small_gradient(monkeypatch):
    """A bias is final with its weight, which comes after it: what lies before the two would wait for it."""
    params = make(w0=10, b0=1, w1=20, b1=1, w2=10, b2=1)
    assert plan(params, 32) == "b2 w2 b1 w1 | b0 w0"
    assert plan(params, 31) == "b2 w2 | b1 w1 | b0 w0"
    assert plan(params, 19) == "b2 w2 | b1 w1 | b0 w0"
    monkeypatch.setattr(planning, "EDGE_BUCKET_BYTES", 20 * ELEMENT_BYTES)
    assert plan(params, 100) == "b2 w2 | b1 w1 | b0 w0"


def test_a_bucket_has_one_dtype_and_the_one_that_is_finished_first_goes_first():
    kinds = {"a": np.float32, "b": np.float64, "c": np.float32, "d": np.float64, "e": np.float32}
    params = [Parameter(np.zeros(1, dtype), name) for name, dtype in kinds.items()]
    assert drawn(plan_buckets(params, 8)) == "d | e c | b | a"
    for bucket in plan_buckets(params, 1000):
        assert len({p.dtype for p in bucket.params}) == 1


def test_the_edges_are_small_in_launch_order_not_in_the_order_of_flats(monkeypatch):
    monkeypatch.setattr(planning, "EDGE_BUCKET_BYTES", 2 * ELEMENT_BYTES)
    # The float32 flat comes first and has a parameter that is finished last; float64 is launched before it.
    kinds = {"a": np.float32, "b": np.float64, "c": np.float64, "d": np.float64, "e": np.float32}
    params = [Parameter(np.zeros(2, dtype), name) for name, dtype in kinds.items()]
    assert drawn(plan_buckets(params, 1000)) == "d | c b | e a"


def test_what_an_edge_leaves_is_launched_where_it_is_finished(monkeypatch):
    monkeypatch.setattr(planning, "EDGE_BUCKET_BYTES", ELEMENT_BYTES)
    kinds = {"a": np.float64, "b": np.float32, "c": np.float64, "d": np.float64}
    params = [Parameter(np.zeros(1, dtype), name) for name, dtype in kinds.items()]
    assert drawn(plan_buckets(params, 1000)) == "d c | b | a"


def test_parameters_that_are_left_out_leave_a_gap_that_no_bucket_spans():
    params = make(a=1, b=1, c=1, d=1)
    FlatBuffer.adopt(params)
    assert plan([params[0], params[1], params[3]], 100) == "d | b a"


def test_the_last_ones_have_buckets_of_their_own_at_the_end():
    params = make(a=1, b=1, c=1, d=1)
    a, _, c, _ = params
    assert plan(params, 100, last=[c, a]) == "d | b | c | a"


def test_only_last_ones():
    params = make(a=1, b=1)
    assert plan(params, 100, last=params) == "a | b"


def test_a_model_is_cut_into_enough_buckets_to_overlap_something(monkeypatch):
    monkeypatch.setattr(planning, "EDGE_BUCKET_BYTES", 2 * ELEMENT_BYTES)
    monkeypatch.setattr(planning, "LEAST_BUCKET_BYTES", 2 * ELEMENT_BYTES)
    params = [Parameter(np.zeros(4), f"p{i}") for i in range(32)]
    sizes = [len(bucket.range.params) for bucket in GradientBucketManager(params, SoloCommunicator()).buckets]
    assert sizes == [1, 1, *[2] * 14, 1, 1]
    few = GradientBucketManager([Parameter(np.zeros(1), f"q{i}") for i in range(4)], SoloCommunicator())
    assert [len(bucket.range.params) for bucket in few.buckets] == [2, 2]  # none is smaller than an edge


def test_a_size_that_is_asked_for_is_taken_whatever_it_leaves_to_overlap(monkeypatch):
    monkeypatch.setattr(planning, "EDGE_BUCKET_BYTES", 2 * ELEMENT_BYTES)
    params = [Parameter(np.zeros(4), f"p{i}") for i in range(32)]
    asked = GradientBucketManager(params, SoloCommunicator(), bucket_bytes=64 * ELEMENT_BYTES)
    assert [len(bucket.range.params) for bucket in asked.buckets] == [1, 15, 15, 1]


def test_no_parameters_make_no_bucket():
    manager = GradientBucketManager([], SoloCommunicator())
    assert manager.num_buckets == 0
    manager.reset()
    manager.wait()


def test_memory_in_another_order_is_cut_as_it_lies():
    a, b, c = params = make(a=1, b=1, c=1)
    FlatBuffer.adopt([c, b, a])  # in memory: a b c
    assert plan(params, 2) == "c | a b"
    assert plan(params, 1) == "c | b | a"


@settings(deadline=None, max_examples=60)
@given(
    specs=st.lists(
        st.tuples(st.integers(0, 6), st.sampled_from([np.float32, np.float64]), st.integers(0, 9)), max_size=12
    ),
    bucket_bytes=st.integers(1, 80),
)
def test_every_parameter_is_in_one_bucket_and_no_bucket_is_too_large(specs, bucket_bytes):
    params = [Parameter(np.zeros(size, dtype), f"p{i}") for i, (size, dtype, _) in enumerate(specs)]
    last = [p for p, (_, _, chance) in zip(params, specs, strict=True) if chance == 0]
    plan = plan_buckets(params, bucket_bytes, last)
    assert sorted(p.name for bucket in plan for p in bucket.params) == sorted(p.name for p in params)
    for bucket in plan:
        size = sum(p.size for p in bucket.params)
        assert bucket.grad.shape == (size,)
        small = bucket.grad.nbytes - bucket.params[-1].data.nbytes  # what a larger one may have come with
        assert bucket.grad.nbytes <= bucket_bytes or small < max(1, bucket_bytes // planning.SMALL_SHARE)
        assert {p.dtype for p in bucket.params} == {bucket.grad.dtype}
    place = {p: i for i, p in enumerate(params)}
    finished = [min(place[p] for p in bucket.params) for bucket in plan[: len(plan) - len(last)]]
    assert finished == sorted(finished, reverse=True)
    assert [bucket.params for bucket in plan[len(plan) - len(last) :]] == [(p,) for p in last]


# The manager alone


def test_gradients_from_elsewhere_are_averaged(ranks):
    def program(comm):
        layout = [("embed", 5, np.float32), ("scale", 1, np.float64), ("head", 3, np.float32)]
        manager = GradientBucketManager(layout, comm, bucket_bytes=16)
        assert manager.num_buckets == 3
        for step in range(3):  # no zero_grad: whoever computes them overwrites them
            manager.reset()
            assert manager.num_launched == 0
            for place, (name, size, dtype) in enumerate(layout):
                grad = manager.grad(name)
                assert (grad.shape, grad.dtype) == ((size,), dtype)
                grad[:] = (comm.rank + 1) * 10**place + step
                manager.mark_ready(name)
            assert manager.num_launched == 3
            manager.wait()
            for place, (name, size, _) in enumerate(layout):
                mean = (comm.size + 1) / 2 * 10**place + step
                np.testing.assert_allclose(manager.grad(name), np.full(size, mean), rtol=1e-6)

    ranks.run(program)


def test_shares_weigh_the_mean(ranks):
    def program(comm):
        manager = GradientBucketManager([("w", 2, np.float64)], comm)
        total = comm.size * (comm.size + 1) / 2
        manager.reset(share=(comm.rank + 1) / total)
        manager.grad("w")[:] = [1, comm.rank]
        manager.mark_ready("w")
        manager.wait()
        mean = sum((rank + 1) * rank for rank in range(comm.size)) / total
        np.testing.assert_allclose(manager.grad("w"), [1, mean], rtol=1e-12)

    ranks.run(program)


def test_a_gradient_that_nobody_wrote_counts_as_zero(ranks):
    def program(comm):
        manager = GradientBucketManager([("a", 2, np.float64), ("b", 2, np.float64)], comm)
        for p in manager.params:
            p.grad_view()[:] = 7  # left from another time
            p.grad = None
        manager.reset()
        manager.grad("a")[:] = 1
        manager.mark_ready("a")
        manager.mark_ready("b")
        manager.wait()
        np.testing.assert_array_equal(manager.grad("a"), [1, 1])
        np.testing.assert_array_equal(manager.grad("b"), [0, 0])

    ranks.run(program)


@pytest.mark.parametrize("sizes", [(3, 5, 7), (4, 4, 4)])  # a wrong pairing of equal sizes would raise nothing
def test_buckets_are_launched_in_their_order_whatever_the_order_of_arrival(ranks, sizes):
    names = ["a", "b", "c"]

    def program(comm):
        layout = [(name, size, np.float64) for name, size in zip(names, sizes, strict=True)]
        manager = GradientBucketManager(layout, comm, bucket_bytes=1)
        manager.reset()
        launched = []
        arrival = names[comm.rank % 3 :] + names[: comm.rank % 3]
        for name in arrival:
            manager.grad(name)[:] = (comm.rank + 1) * (1 + names.index(name))
            manager.mark_ready(name)
            launched.append(manager.num_launched)
        manager.wait()
        for place, name in enumerate(names):
            expected = np.full(sizes[place], (comm.size + 1) / 2 * (1 + place))
            np.testing.assert_allclose(manager.grad(name), expected, rtol=1e-12)
        return launched

    # c, b, a is the order of the buckets: rank 0 brings c last, rank 1 second, rank 2 first and then a.
    by_rank = [[0, 0, 3], [0, 2, 3], [1, 1, 3], [0, 0, 3]]
    assert ranks.run(program) == by_rank[: ranks.size]


def test_a_launch_waits_for_the_last_gradient_of_its_bucket(ranks):
    def program(comm):
        manager = GradientBucketManager([(name, 1, np.float64) for name in "abcd"], comm, bucket_bytes=16)
        manager.reset()
        launched = []
        for name in "cdba":
            manager.mark_ready(name)
            launched.append(manager.num_launched)
        manager.wait()
        assert launched == [0, 1, 1, 2]

    ranks.run(program)


# Calls in the wrong order


def alone(comm=None):
    return GradientBucketManager([(name, 1, np.float64) for name in "abc"], comm or SoloCommunicator(), bucket_bytes=8)


def test_ready_twice_is_refused(ranks):
    def program(comm):
        manager = alone(comm)
        manager.reset()
        manager.mark_ready("b")
        rule = rf"\[rank {comm.rank}\] on_grad_ready\('b'\) called twice in one backward; pending: c, a$"
        with pytest.raises(RuntimeError, match=rule):
            manager.mark_ready("b")
        manager.mark_ready("a")
        manager.mark_ready("c")
        manager.wait()

    ranks.run(program)


def test_wait_with_pending_gradients_names_them(ranks):
    def program(comm):
        manager = alone(comm)
        manager.reset()
        manager.mark_ready("c")
        rule = rf"\[rank {comm.rank}\] wait\(\) before every gradient was ready; .* call cancel\(\) .*; pending: b, a$"
        with pytest.raises(RuntimeError, match=rule):
            manager.wait()
        manager.mark_ready("a")
        manager.mark_ready("b")
        manager.wait()

    ranks.run(program)


def test_wait_without_a_reduction_is_refused():
    manager = alone()
    rule = re.escape("[rank 0] wait() without a reduction; run a backward with the hooks first")
    with pytest.raises(RuntimeError, match=rule):
        manager.wait()
    manager.reset()
    for name in "abc":
        manager.mark_ready(name)
    manager.wait()
    with pytest.raises(RuntimeError, match=rule):
        manager.wait()


def test_ready_outside_a_backward_is_refused():
    manager = alone()
    with pytest.raises(RuntimeError, match=r"\[rank 0\] on_grad_ready\('a'\) outside a backward; call reset\(\) first"):
        manager.mark_ready("a")


def test_reset_before_wait_is_refused():
    manager = alone()
    manager.reset()
    manager.mark_ready("c")
    rule = r"a new backward before the last one was reduced to the end; call wait\(\), or .* cancel\(\); pending: b, a$"
    with pytest.raises(RuntimeError, match=rule):
        manager.reset()
    manager.mark_ready("b")
    manager.mark_ready("a")
    manager.wait()
    manager.reset()


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_buckets_need_a_size(bucket_bytes):
    with pytest.raises(ValueError, match=f"bucket_bytes must be positive, got {bucket_bytes}"):
        GradientBucketManager([("w", 1, np.float64)], SoloCommunicator(), bucket_bytes=bucket_bytes)


def test_a_name_given_twice_is_refused():
    with pytest.raises(ValueError, match=r"parameter names must be unique, got 'w' twice: shapes \(3,\) and \(2,\)"):
        GradientBucketManager([("w", 2, np.float64), ("w", 3, np.float64)], SoloCommunicator())


def test_an_unknown_name_is_refused():
    manager = alone()
    manager.reset()
    with pytest.raises(KeyError, match="nobody"):
        manager.mark_ready("nobody")
    with pytest.raises(KeyError, match="nobody"):
        manager.grad("nobody")


# A gradient that is there from the step before


class Heads:
    """Two weights, of which a loss reaches one."""

    def __init__(self):
        self.a, self.b = (Parameter(np.ones(5, np.float32), name) for name in "ab")

    def parameters(self):
        return [self.a, self.b]


KINDS = [{}, {"sums": "exact"}, {"zero": 1}, {"zero": 1, "sums": "exact"}, {"zero": 2}, {"step_early": True}]
KINDS += [{"zero": 1, "step_early": True}, {"zero": 2, "step_early": True}]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_reduced_already_is_not_added_up_again(ranks, kind):
    # A step that resets some gradients and reaches those alone sent the others once more. An exact sum, which nobody
    # weights anew, came out as often as there are ranks, and one of shards (zero=1) was of what lay beside them.
    def program(comm):
        model = Heads()
        ddp = DistributedDataParallel(model, comm, **kind)

        def step(p):
            p.grad = None
            backward_with_hooks((p * (1.0 + comm.rank)).sum(), ddp.hooks(num_samples=1))
            ddp.wait()

        model.b.requires_grad = False
        step(model.a)
        if kind.get("zero") != 2 or comm.size == 1:  # which has a place for sums that go on, and adds zeros
            model.b.requires_grad = True
            with pytest.raises(RuntimeError, match="a second reduction of 'a': its grad is "):
                step(model.b)
            ddp.cancel()
        model.a.requires_grad, model.b.requires_grad = False, True
        step(model.b)
        return {name: grad[0] for name, grad in ddp.buckets.whole_grads().items()}

    mean = (1 + ranks.size) / 2
    kept = mean if kind.get("zero") == 2 and ranks.size > 1 else 0.0
    assert ranks.run(program) == [{"a": kept, "b": mean}] * ranks.size
