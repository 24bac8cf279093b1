"""Ranks die whose state no other rank has: shards of an optimizer, what a compression keeps. And other kinds of steps.

A run that goes on in the same layout has the bits of the undisturbed one, whichever kind it is.
"""

import functools

import numpy as np
import pytest
from toy_recovery import PHASES, builder, train

from distributed import LocalWorld
from distributed.comm.failure import Heal
from distributed.comm.local import Killed
from distributed.data_parallel.compression.few_bits import ErrorFeedback
from distributed.data_parallel.compression.low_rank import PowerSGD
from distributed.data_parallel.compression.top_k import TopK
from distributed.recovery import recovering
from minigrad import rng

KINDS = {
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 2, float16": {"zero": 2, "precision": "float16"},
    "zero 2, exact": {"zero": 2, "exact": True},
    "zero 2, muon": {"zero": 2, "muon": True},
    "zero 2, two stages": {"zero": 2, "pp": 2},
    "float16": {"precision": "float16"},
    "steps early": {"step_early": True},
    "zero 1, steps early": {"zero": 1, "step_early": True},
    "zero 2, steps early": {"zero": 2, "step_early": True},
    "int8": {"hook": lambda: ErrorFeedback("int8")},
    "powersgd": {"hook": lambda: PowerSGD(1)},
    "topk": {"hook": lambda: TopK(0.1)},
}
QUICK = ("zero 1", "zero 1, steps early", "zero 2, float16", "topk")
SHARED_OUT = [
    pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.long)
    for kind in KINDS
    if kind not in ("float16", "steps early")
]
"""Where each rank has something of its own."""


def world(size, deaths=None):
    return LocalWorld(size, survive=True, deaths=deaths, timeout_seconds=60)


def merged(results):
    return {name: values for result in results if result for name, values in result[0].items()}


@functools.cache
def undisturbed(size, kind):
    results = world(size).run(train, builder(**KINDS[kind]))
    return merged(results), results[0][1]


def disturbed(size, dies, kind, **how):
    """Train with deaths at given moments; return parameters, and the losses and recoveries of a rank that lived."""
    results = world(size).run(lambda comm: train(comm, builder(**KINDS[kind]), dies=dies, **how))
    return merged(results), *next(result for rank, result in enumerate(results) if rank not in dies)[1:]


def same_bits(parameters, expected):
    return parameters.keys() == expected.keys() and all(
        np.array_equal(parameters[name], expected[name]) for name in expected
    )


def check_same(kind, size, results):
    expected, losses = undisturbed(size, kind)
    parameters, seen, _ = results
    assert same_bits(parameters, expected)
    assert {step: values[-1] for step, values in seen.items()} == {step: losses[step][0] for step in seen}


@pytest.mark.parametrize("kind", SHARED_OUT)
def test_what_one_rank_alone_had_comes_from_its_buddy(kind):
    size = 4 if "stages" in kind else 3
    results = disturbed(size, {1: (2, "hook")}, kind, buddy_every=1)
    check_same(kind, size, results)
    assert [recovery.source for recovery in results[-1]] == ["a buddy's copy"]
    assert not results[-1][0].forgets


@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=[] if phase == "committed" else pytest.mark.long) for phase in PHASES]
)
def test_shards_come_from_a_buddy_at_every_moment(phase):
    results = disturbed(3, {0: (2, phase)}, "zero 2", buddy_every=2)
    check_same("zero 2", 3, results)
    assert [recovery.source for recovery in results[-1]] == ["a buddy's copy"]


@pytest.mark.parametrize("kind", ["zero 2", "int8"])
def test_without_buddies_it_goes_on_from_what_was_saved(kind):
    """All of the state must be whole and of one moment; what lives is not."""
    results = disturbed(2, {1: (2, "hook")}, kind)
    check_same(kind, 2, results)
    assert [(recovery.source, recovery.num_redone) for recovery in results[-1]] == [("the beginning", 2)]


@pytest.mark.parametrize(("kind", "phase"), [("float16", "hook"), ("steps early", "committed")])
def test_what_all_replicas_have_comes_from_one_that_lives(kind, phase):
    """What ops see in half precision follows too; and a step that begins early ends before ranks vote."""
    results = disturbed(3, {1: (2, phase)}, kind)
    check_same(kind, 3, results)
    assert [recovery.source for recovery in results[-1]] == ["a living rank"]


@pytest.mark.parametrize("layout", [{"zero": 1}, {"pp": 2}], ids=str)
def test_a_step_that_asks_other_ranks_for_a_norm_is_refused(layout):
    """It comes after the vote: where a rank died, some had the norm and stepped, others went on as if they had."""
    with pytest.raises(ValueError, match=r"call ddp\.clip_by_global_norm before attempt\.commit\(\)"):
        world(2).run(lambda comm: train(comm, builder(**layout, max_norm=1.0)))
    world(2).run(lambda comm: train(comm, builder(max_norm=1.0), num_steps=1))  # replicas know the norm


@pytest.mark.parametrize(("kind", "calls"), [("zero 2", 9), ("zero 2, float16", 10), ("int8", 10)])  # its votes
def test_a_spare_takes_nothing_with_it(kind, calls):
    """Shards that are being gathered, and what a compression has kept in a step that fails, live on those who train."""
    results = world(3, {2: calls}).run(lambda comm: train(comm, builder(**KINDS[kind]), num_spares=1))
    expected, _ = undisturbed(2, kind)
    assert same_bits(merged(results), expected)
    assert [recovery.source for recovery in results[0][2]] == ["a living rank"]
    assert results[0][2][0].step > 0


def test_a_rank_that_waits_does_not_say_where_to_go_on():
    """Two spares take the first places of a pipeline; then the first rank, its last stage, is left without one."""

    def restore(toy):
        toy.data.next()
        return 1

    dies = {0: (1, "begin"), 1: (2, "begin"), 2: (3, "begin")}
    how = {"heal": Heal.SPARES, "num_spares": 2, "usable": lambda living: living // 2 * 2}
    results = world(6).run(lambda comm: train(comm, builder(0), dies=dies, restore=restore, **how))
    assert [(r.source, r.step, r.num_ranks) for r in results[4][2]] == [
        ("the restore function", 1, 4),
        ("the restore function", 1, 4),
        ("the restore function", 1, 2),
    ]


@pytest.mark.parametrize("kind", [pytest.param("zero 2", marks=pytest.mark.long), "zero 2, exact"])
def test_shards_are_cut_anew_for_fewer_ranks(kind):
    expected, _ = undisturbed(4, kind)
    dies = {1: (2, "hook"), 3: (3, "begin")}
    parameters, _, recoveries = disturbed(4, dies, kind, heal=Heal.SHRINK, buddy_every=1)
    assert [(r.source, r.num_ranks) for r in recoveries] == [("a buddy's copy", 3), ("a buddy's copy", 2)]
    assert same_bits(parameters, expected) or "exact" not in kind
    for name, values in expected.items():
        np.testing.assert_allclose(parameters[name], values, rtol=1e-9, atol=1e-12)


def test_fewer_ranks_begin_anew_with_what_a_compression_keeps():
    """It is of the number of ranks. All else lives on each of them, so nothing is done again."""

    def program(comm):
        kept = []
        for attempt in recovering(comm, builder(**KINDS["topk"]), num_steps=3, heal=Heal.SHRINK, buddy_every=1):
            with attempt as toy:
                kept.append([memory.data.copy() for memory in toy.model.memories()])
                toy.optimizer.zero_grad()
                x, y = toy.data.next()
                with rng.scope(seed=3, step=attempt.step, first_sample=0):
                    toy.pipe.step(x, y, hooks=toy.ddp.hooks(num_samples=len(x)))
                toy.ddp.wait()
                if comm.rank == 2 and attempt.step == 1:
                    raise Killed
                attempt.commit()
            recoveries.append(attempt.recovery)
        return [any(memory.any() for memory in each) for each in kept]

    recoveries = []
    assert world(3).run(program)[:2] == [[False, True, False, True]] * 2
    assert {(r.source, r.step, r.forgets) for r in recoveries if r} == {("a living rank", 1, True)}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["zero 2", "powersgd"])
@pytest.mark.parametrize("calls", range(20, 110, 18))
def test_a_rank_with_state_of_its_own_may_die_in_any_call(kind, calls):
    results = world(3, {calls % 3: calls}).run(lambda comm: train(comm, builder(**KINDS[kind]), buddy_every=1))
    expected, _ = undisturbed(3, kind)
    assert same_bits(merged(results), expected)
