"""Why buckets come late: each cause by made-up times, and by a model that has it, on a clock that counts ops."""

import numpy as np
import pytest

import minigrad as mg
from distributed import DistributedDataParallel, SoloCommunicator
from distributed.comm.work import CompletedWork
from distributed.data_parallel.overlap import SeenBucket, overlap_report, why_late
from minigrad.autodiff.hooks import Hooks

MIB = 1 << 20


def bucket(number, ready, arrived, *, launched=None, num_bytes=MIB, tied=False):
    ready = {f"w{number}.{i}": time for i, time in enumerate(ready)}
    launched = max(ready.values()) if launched is None else launched
    return SeenBucket(f"bucket {number} of 3, w{number}.0", num_bytes, ready, launched, arrived, tied)


def test_what_is_hidden_wants_no_word():
    buckets = [bucket(0, [0.1, 0.2], 0.5), bucket(1, [0.4, 0.6], 0.8), bucket(2, [0.9, 1.0], 1.04)]
    assert why_late(buckets, 0.0, 1.0) == [
        "2 of 3 buckets were there when the backward ended, and all within 5% of its time"
    ]


def test_a_last_bucket_has_nothing_to_hide_behind():
    buckets = [bucket(0, [0.1, 0.2], 0.5), bucket(1, [0.4, 0.6], 0.8), bucket(2, [1.0], 1.5)]
    assert why_late(buckets, 0.0, 1.0)[1:] == [
        "bucket 2 of 3, w2.0 (1 MiB) was complete last, at 100% of the backward, and took 500.0 ms by itself: it is "
        "one gradient, which no bucket cuts"
    ]
    assert why_late([*buckets[:2], bucket(2, [0.9, 1.0], 1.5)], 0.0, 1.0)[1].endswith("smaller buckets leave less")


def test_a_slow_link_is_behind():
    buckets = [bucket(0, [0.1, 0.2], 0.9), bucket(1, [0.4, 0.6], 1.6), bucket(2, [0.9, 1.0], 1.7)]
    assert why_late(buckets, 0.0, 1.0)[1:] == [
        "the link was behind by 600.0 ms when the backward ended: 3 MiB take longer than it hides; send fewer bytes, "
        "or compute more between two steps"
    ]


def test_an_order_that_holds_others_up():
    buckets = [bucket(0, [0.8, 0.9], 1.2), bucket(1, [0.1], 1.3, launched=0.9), bucket(2, [0.3], 1.4, launched=0.9)]
    lines = why_late(buckets, 0.0, 1.0)
    assert lines[1] == (
        "bucket 1 of 3, w1.0 (1 MiB) and 1 more had to wait for bucket 0 of 3, w0.0 (1 MiB), which comes before and "
        "was complete at 90% of the backward, by w0.1: the order is learned in the first step"
    )
    assert not any("link" in line for line in lines), "it would have had time"


def test_a_gradient_far_behind_its_neighbours():
    buckets = [bucket(0, [0.1, 0.2, 1.0], 1.3)]
    assert why_late(buckets, 0.0, 1.0)[1] == (
        "w0.2 was final at 100% of the backward, the 2 other gradients of bucket 0 of 3, w0.0 (1 MiB) at 20% of the "
        "backward: used in two places? smaller buckets let the others go before"
    )


def test_tied_weights_come_after_the_backward():
    buckets = [bucket(0, [0.1, 0.2], 0.5), bucket(1, [1.1], 1.5, tied=True)]
    lines = why_late(buckets, 0.0, 1.0)
    assert lines[1:] == [
        "bucket 1 of 3, w1.0 (1 MiB): tied weights are final only when their stages have added them up, after it"
    ]


# -- models ---------------------------------------------------------------------------------------


class OpClock:
    """A clock on which an op of the backward takes a second, and so does a reduction that somebody waits for."""

    def __init__(self):
        self.time = 0.0

    def start(self):
        pass

    def now(self):
        return self.time

    def end_of(self, work):
        return self.time

    def seconds(self, moment):
        return moment

    def tick(self):
        self.time += 1.0


class SeenLate(CompletedWork):
    """A reduction that is there only when somebody waits for it."""

    def __init__(self, result, clock):
        super().__init__(result)
        self._clock = clock

    def test(self):
        return False

    def wait(self):
        self._clock.tick()
        return super().wait()


class Chain:
    """x @ a @ b @ ..., in the order `runs`, of parameters in the order of `names`."""

    def __init__(self, names, runs, tied=(), num_inputs=4):
        self._params = {name: mg.Parameter(np.eye(4, dtype=np.float32), name) for name in names}
        first = mg.Parameter(np.ones((num_inputs, 4), np.float32), runs[0])
        self._params[runs[0]] = first
        self._num_inputs = num_inputs
        self._runs = runs
        self.tied = [self._params[name] for name in tied]

    def parameters(self):
        return list(self._params.values())

    def loss(self):
        h = mg.Tensor(np.ones((2, self._num_inputs), np.float32))
        for name in self._runs:
            h = h @ self._params[name]
        return mg.mean(h)


def report(model, bucket_bytes=64, late_bytes=0):
    """Return what is said of a step, where reductions of at least `late_bytes` come late and all others at once."""
    clock = OpClock()

    def hook(grad, comm):
        return SeenLate(grad, clock) if grad.nbytes >= late_bytes else CompletedWork(grad)

    ddp = DistributedDataParallel(model, SoloCommunicator(), bucket_bytes=bucket_bytes, comm_hook=hook)
    ddp.recorder._clock = clock
    with ddp.recorder:
        mg.backward_with_hooks(model.loss(), ddp.hooks(num_samples=2) + Hooks(between_ops=clock.tick))
        ddp.wait()
    return overlap_report(ddp)


NAMES = "abcdefgh"


def test_layers_that_run_as_they_are_declared_hold_nobody_up():
    lines = report(Chain(NAMES, NAMES))
    assert lines[0].startswith("0 of 8 buckets were there when the backward ended; the last one came")
    assert not any("had to wait" in line or "two places" in line for line in lines)


def test_layers_declared_in_another_order_are_named():
    lines = report(Chain(NAMES, "h" + NAMES[:-1]))  # the last one declared runs first
    assert "bucket 1 of 8, g (64 B) and 4 more had to wait for bucket 0 of 8, h (64 B), which comes" in lines[1]
    assert "complete at 88% of the backward, by h:" in lines[1]


def test_a_weight_used_at_both_ends_is_named():
    lines = report(Chain(NAMES, "h" + NAMES), bucket_bytes=256)
    assert any(
        line.startswith("h was final at 88% of the backward, the 3 other gradients of bucket 0") for line in lines
    )


def test_a_pipelines_tied_weights_are_named():
    lines = report(Chain(NAMES, NAMES, tied="a"))
    assert any(line.startswith("bucket 7 of 8, a (64 B): tied weights are final only when") for line in lines)


def test_what_no_loss_depends_on_is_named():
    with pytest.warns(UserWarning, match="no rank's loss depends on g"):
        lines = report(Chain(NAMES, "abcdefh"))
    assert lines[-1] == "no loss depends on g: 64 B of zeros travel for nothing; leave them out"


def test_a_large_gradient_that_is_last_is_named():
    lines = report(Chain(NAMES, NAMES, num_inputs=100), late_bytes=65)
    assert lines[0] == "7 of 8 buckets were there when the backward ended; the last one came 1,000.0 ms later"
    assert lines[1:] == [
        "bucket 7 of 8, a (1.56 KiB) was complete last, at 88% of the backward, and took 2,000.0 ms by itself: it is "
        "one gradient, which no bucket cuts"
    ]


def test_nothing_is_said_of_a_step_that_nobody_recorded():
    ddp = DistributedDataParallel(Chain(NAMES, NAMES), SoloCommunicator())
    assert overlap_report(ddp) == []
    mg.backward_with_hooks(ddp.model.loss(), ddp.hooks(num_samples=2))
    ddp.wait()
    assert overlap_report(ddp) == []
