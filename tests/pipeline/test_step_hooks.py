"""StepHooks: the hooks of a step out of those of its micro-batches."""

import numpy as np
import pytest

from minigrad import Hooks, Parameter
from pipeline.runtime.step_hooks import StepHooks


class Step:
    """A step by hand; `backward` and `finish` return the hooks that fired since the last time."""

    def __init__(self, num_forwards, late=()):
        self.events = []
        self.step_hooks = StepHooks(num_forwards, late)
        self.step_hooks.use(
            Hooks(
                on_start=lambda reached: self.events.append("start " + names(reached)),
                on_grad_ready=lambda p: self.events.append(p.name),
            )
        )

    def forward(self, *reached):
        self.step_hooks.forward_done(reached)

    def backward(self, *reached):
        hooks = self.step_hooks.backward_hooks()
        for p in reached:
            hooks.on_grad_ready(p)
        return self._news()

    def finish(self):
        self.step_hooks.finish()
        return self._news()

    def _news(self):
        events, self.events = self.events, []
        return events


def names(params):
    return " ".join(p.name for p in params)


@pytest.fixture
def abc():
    return [Parameter(np.zeros(1), name) for name in "abc"]


def test_a_parameter_is_ready_at_its_last_tape_once(abc):
    a, b, _ = abc
    step = Step(2)
    step.forward(a, b)
    step.forward(a, b)
    assert step.backward(b, a) == ["start a b"]
    assert step.backward(b, a) == ["b", "a"]
    assert step.finish() == []


def test_nothing_starts_before_the_last_forward(abc):
    a, b, c = abc
    step = Step(3)
    step.forward(a)
    assert step.backward(a) == []  # its count is zero, but a later forward may use it again
    step.forward(a, b)
    assert step.backward(b, a) == []
    step.forward(c)
    # At the first backward after the last forward: those at zero are ready at once, before any vjp.
    assert step.backward(c) == ["start a b c", "a", "b", "c"]


def test_a_parameter_of_some_micro_batches_is_ready_when_these_are_done(abc):
    a, b, _ = abc
    step = Step(3)
    for reached in ([a, b], [b], [b]):
        step.forward(*reached)
    assert step.backward(b, a) == ["start a b", "a"]
    assert step.backward(b) == []
    assert step.backward(b) == ["b"]


def test_late_parameters_fire_at_the_end_in_their_order_used_or_not(abc):
    a, b, c = abc
    step = Step(1, late=[c, b])
    step.forward(a, b)
    assert step.backward(a, b) == ["start a b c", "a"]
    assert step.finish() == ["c", "b"]


def test_a_late_parameter_at_zero_when_hooks_start_waits_for_the_end(abc):
    a, b, _ = abc
    step = Step(2, late=[a])
    step.forward(a)
    assert step.backward(a) == []
    step.forward(b)
    assert step.backward(b) == ["start a b", "b"]
    assert step.finish() == ["a"]


def test_a_frozen_late_parameter_does_not_fire(abc):
    a, b, _ = abc
    a.requires_grad = False
    step = Step(1, late=[a])
    step.forward(b)
    assert step.backward(b) == ["start b", "b"]
    assert step.finish() == []


def test_a_rank_without_a_backward_starts_at_the_end():
    assert Step(0).finish() == ["start "]


def test_between_ops_is_passed_on_and_missing_hooks_are_none(abc):
    a, _, _ = abc
    calls = []
    step_hooks = StepHooks(1, [a])
    step_hooks.use(Hooks(between_ops=lambda: calls.append(1)))
    step_hooks.forward_done([a])
    hooks = step_hooks.backward_hooks()
    hooks.between_ops()
    hooks.on_grad_ready(a)
    step_hooks.finish()
    assert calls == [1]
