"""A run that goes on when ranks die: whichever call they die in, it ends with the parameters of the undisturbed run.

Ranks of a LocalWorld die at named moments of a step, or in their n-th call of a communicator, which no signal could be
as exact about; `test_recovery_mpi.py` has real kills.
"""

import functools
import re

import numpy as np
import pytest
from toy_recovery import PHASES, Toy, builder, train

from distributed import LocalWorld, SoloCommunicator
from distributed.comm.failure import Heal, RankFailure
from distributed.comm.local import Killed
from distributed.recovery import recovering
from distributed.recovery.attempts import UNHEALED
from distributed.recovery.buddies import Buddies
from distributed.recovery.state import Extent, MissingError, Snapshot, hand_over, state_of
from minigrad import rng
from minigrad.nn import Buffer

TIMEOUT_SECONDS = 20.0  # a wait that no death ends fails a test by then


def every_other(values):
    """Leave the others to `make test-long`."""
    return [pytest.param(value, marks=pytest.mark.long) if i % 2 else value for i, value in enumerate(values)]


def pairs(first, second):
    """Return all pairs; each value is in some that `make test` runs."""
    return [
        pytest.param(a, b, marks=[pytest.mark.long] if (i + j) % 2 else [])
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]


def world(size, deaths=None):
    return LocalWorld(size, survive=True, deaths=deaths, timeout_seconds=TIMEOUT_SECONDS)


def merged(results):
    """Join what the ranks hold; a rank that is dead and was not replaced holds nothing."""
    return {name: values for result in results if result for name, values in result[0].items()}


@functools.cache
def undisturbed(size, pp, schedule):
    results = world(size).run(train, builder(pp, schedule))
    return merged(results), results[0][1]


def disturbed(size, dies, pp=1, schedule="1f1b", **how):
    """Train with deaths at given moments; return parameters, and the losses and recoveries of a rank that lived."""
    results = world(size).run(lambda comm: train(comm, builder(pp, schedule), dies=dies, **how))
    return merged(results), next(result for rank, result in enumerate(results) if rank not in dies)


def same_bits(parameters, expected):
    return parameters.keys() == expected.keys() and all(
        np.array_equal(parameters[name], expected[name]) for name in expected
    )


def test_every_wait_of_the_family_ends_when_a_rank_dies():
    """Of those who wait for the dead rank, and of those who wait for one that has left."""

    def program(comm):
        part = comm.split(comm.rank // 2)
        if comm.rank == 0:
            raise Killed
        waits = [
            lambda: part.recv(np.empty(1), source=1 - part.rank, tag=0),
            lambda: comm.barrier(),
            lambda: part.allreduce(np.ones(2)).wait(),
            lambda: comm.isend(np.ones(1), dest=1, tag=3).wait(),
        ]
        for wait in waits:
            with pytest.raises(RankFailure) as caught:
                wait()
            assert caught.value.ranks == (0,)
        return comm.vote(True), comm.heal(Heal.SHRINK).gather_objects(comm.rank)

    assert world(4).run(program)[1:] == [(False, [1, 2, 3])] * 3


@pytest.mark.parametrize(("victim", "phase"), pairs([0, 2], PHASES))
def test_replaced_replicas_train_to_the_same_bits(victim, phase):
    expected, losses = undisturbed(3, 1, "1f1b")
    parameters, (_, seen, recoveries) = disturbed(3, {victim: (1, phase)})
    assert same_bits(parameters, expected)
    assert seen == losses  # each step once, with the loss of the undisturbed run
    assert [(r.source, r.step, r.num_redone, r.num_ranks) for r in recoveries] == [
        ("a living rank", 2 if phase == "committed" else 1, 0, 3)
    ]


@pytest.mark.parametrize("schedule", every_other(["1f1b", "gpipe", "zbv", "zero_bubble_h1"]))
def test_pipelines_are_replaced_out_of_their_replicas(schedule):
    expected, _ = undisturbed(4, 2, schedule)
    for dies in ({3: (1, "hook")}, {0: (1, "begin"), 3: (2, "hook")}):
        parameters, _ = disturbed(4, dies, 2, schedule)
        assert same_bits(parameters, expected)


@pytest.mark.parametrize("phase", PHASES)
def test_fewer_ranks_train_to_the_same_numbers(phase):
    """The batch is dealt anew, so that sums are taken in another order."""
    expected, _ = undisturbed(4, 1, "1f1b")
    parameters, (_, _, recoveries) = disturbed(4, {1: (1, phase), 3: (2, "hook")}, heal=Heal.SHRINK)
    assert [recovery.num_ranks for recovery in recoveries] == [3, 2]
    for name, values in expected.items():
        np.testing.assert_allclose(parameters[name], values, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("every", "phase"), pairs([1, 2], PHASES))
def test_a_stage_without_a_replica_comes_back_from_its_buddy(phase, every):
    expected, _ = undisturbed(2, 2, "1f1b")
    parameters, (_, _, recoveries) = disturbed(2, {1: (2, phase)}, 2, buddy_every=every)
    assert same_bits(parameters, expected)
    assert [recovery.source for recovery in recoveries] == ["a buddy's copy"]
    assert 1 <= recoveries[0].num_redone <= 2 * every


def test_a_buddy_counts_after_a_recovery_too():
    expected, _ = undisturbed(4, 4, "1f1b")
    parameters, (_, _, recoveries) = disturbed(4, {1: (2, "hook"), 3: (3, "hook")}, 4, buddy_every=1)
    assert same_bits(parameters, expected)
    assert [recovery.source for recovery in recoveries] == ["a buddy's copy"] * 2


@pytest.mark.parametrize(("victim", "calls"), pairs([0, 2], range(0, 90, 9)))
def test_a_rank_may_die_in_any_call(victim, calls):
    expected, _ = undisturbed(3, 1, "1f1b")
    results = world(3, {victim: calls}).run(train, builder())
    assert same_bits(merged(results), expected)


def test_a_death_is_told_at_once_by_one_rank_and_who_died_when_it_is_healed():
    said = []
    _, (_, _, recoveries) = disturbed(4, {0: (1, "hook"), 3: (2, "hook")}, heal=Heal.SHRINK, say=said.append)
    assert said == ["rank 0 died: the others go on without it", "rank 2 died: the others go on without it"]
    assert [recovery.dead for recovery in recoveries] == [(0,), (2,)]  # of three by then
    words = r"rank 0 died, healed in \d\.\d s: 3 ranks go on after step 1, from a living rank"
    assert re.fullmatch(words, str(recoveries[0]))


@pytest.mark.parametrize(
    ("heal", "follows"),
    [
        (Heal.REPLACE, "new ranks take their places"),
        (Heal.SPARES, "spares take their places as far as they are left"),
    ],
)
def test_several_deaths_are_told_together(heal, follows):
    """Also to newcomers, of whom one is rank 0 then."""
    said = []
    size, spares = (4, 2) if heal is Heal.SPARES else (3, 0)
    dies = {0: (1, "begin"), 1: (1, "begin")}
    _, (_, _, recoveries) = disturbed(size, dies, heal=heal, num_spares=spares, say=said.append)
    assert said == [f"ranks 0 and 1 died: {follows}"]
    assert [recovery.dead for recovery in recoveries] == [(0, 1)]


def test_without_buddies_it_starts_again():
    expected, _ = undisturbed(2, 2, "1f1b")
    parameters, (_, _, recoveries) = disturbed(2, {1: (2, "hook")}, 2)
    assert [(recovery.source, recovery.step, recovery.num_redone) for recovery in recoveries] == [
        ("the beginning", 0, 2)
    ]
    assert same_bits(parameters, expected)


def test_a_restore_function_says_where_to_go_on():
    def restore(toy):
        toy.data.next()
        return 1

    _, (_, seen, recoveries) = disturbed(2, {0: (3, "hook")}, 2, restore=restore)
    assert [(r.source, r.step, r.num_redone) for r in recoveries] == [("the restore function", 1, 2)]
    assert sorted(seen) == [1, 2, 3]  # it was asked at the beginning too


@pytest.mark.parametrize("calls", every_other(range(50, 110, 7)))
def test_a_death_while_others_recover(calls):
    expected, _ = undisturbed(3, 1, "1f1b")
    results = world(3, {0: 52, 1: calls}).run(train, builder())
    assert same_bits(merged(results), expected)


def test_what_a_failed_attempt_drew_and_changed_is_forgotten():
    """Data goes back, and buffers too: a forward writes into them before the death is seen."""

    def build(comm):
        toy = builder()(comm)
        next(iter(toy.model)).count = Buffer(np.zeros(1), "count")
        return toy

    def program(comm):
        drawn = []
        for attempt in recovering(comm, build, num_steps=3):
            with attempt as toy:
                x, y = toy.data.next()
                drawn.append(toy.data.state_dict()["position"])
                (counter,) = toy.model.buffers()
                counter.data[0] += 1
                if attempt.step == 1 and comm.rank == 1 and not comm.is_newcomer:
                    raise Killed
                toy.optimizer.zero_grad()
                with rng.scope(seed=3, step=attempt.step, first_sample=0):
                    toy.pipe.step(x, y, hooks=toy.ddp.hooks(num_samples=len(x)))
                toy.ddp.wait()
                attempt.commit()
        return drawn, counter.data[0]

    assert world(2).run(program) == [([12, 24, 24, 36], 3.0), ([24, 36], 3.0)]


@pytest.mark.parametrize(("victim", "phase"), pairs([0, 2], PHASES))
def test_a_spare_steps_in_and_the_bits_are_the_same(victim, phase):
    """The last of four ranks waits; the others have the places, and the sums, of a world of three.

    Rank 0 dies in the very first step.
    """
    expected, losses = undisturbed(3, 1, "1f1b")
    parameters, (_, seen, recoveries) = disturbed(4, {victim: (min(victim, 1), phase)}, heal=Heal.SPARES, num_spares=1)
    assert same_bits(parameters, expected)
    assert {step: losses[step] for step in seen} == seen
    assert [(r.source, r.num_redone, r.num_ranks) for r in recoveries] == [("a living rank", 0, 3)]


def test_spares_rehearse_and_nobody_else_does():
    rehearsed = []

    def program(comm):
        train(comm, builder(), num_steps=1, num_spares=1, rehearse=lambda: rehearsed.append(comm.rank))

    world(3).run(program)
    assert rehearsed == [2]


def test_spares_die_too_and_without_any_left_fewer_ranks_go_on():
    expected, _ = undisturbed(3, 1, "1f1b")
    parameters, (_, _, recoveries) = disturbed(4, {3: (0, "begin")}, heal=Heal.SPARES, num_spares=1)
    assert same_bits(parameters, expected)
    dies = {0: (1, "hook"), 1: (2, "reduced")}
    parameters, (_, _, recoveries) = disturbed(4, dies, heal=Heal.SPARES, num_spares=1)
    for name, values in expected.items():
        np.testing.assert_allclose(parameters[name], values, rtol=1e-9, atol=1e-12)
    assert [recovery.num_ranks for recovery in recoveries[-2:]] == [3, 2]


def test_ranks_that_no_layout_has_a_place_for_wait():
    """Of two pipelines of two stages three ranks are left: one pipeline, and a spare, which the next death needs."""
    expected, _ = undisturbed(2, 2, "1f1b")
    dies = {0: (1, "hook"), 1: (2, "begin")}
    results = world(4).run(
        lambda comm: train(comm, builder(2), dies=dies, heal=Heal.SHRINK, usable=lambda living: living // 2 * 2)
    )
    for name, values in expected.items():
        np.testing.assert_allclose(merged(results)[name], values, rtol=1e-9, atol=1e-12)
    assert [recovery.num_ranks for recovery in results[2][2]] == [2, 2]


def test_a_layout_without_a_rank_is_refused():
    with pytest.raises(ValueError, match="0 of 3 ranks would train, it must be at least 1"):
        world(3).run(lambda comm: next(recovering(comm, builder(), num_steps=1, usable=lambda living: 0)))


def test_spares_end_with_those_who_leave_the_loop_early():
    def program(comm):
        steps = []
        for attempt in recovering(comm, builder(), num_steps=9, num_spares=2):
            with attempt as toy:
                toy.optimizer.zero_grad()
                attempt.commit(take=False)
            steps.append(attempt.step)
            if attempt.step == 2:
                attempt.end()
        return steps

    assert world(4).run(program) == [[0, 1, 2], [0, 1, 2], [], []]


@pytest.mark.parametrize("calls", every_other(range(0, 60, 7)))
def test_a_rank_may_die_in_any_call_where_spares_wait(calls):
    expected, _ = undisturbed(3, 1, "1f1b")
    results = world(4, {calls % 4: calls}).run(lambda comm: train(comm, builder(), heal=Heal.SPARES, num_spares=1))
    assert same_bits(merged(results), expected)


def test_it_is_an_error_to_forget_the_commit_or_to_do_it_twice():
    attempt = next(recovering(SoloCommunicator(), builder(), num_steps=1))
    with pytest.raises(RuntimeError, match=r"ended without attempt\.commit"), attempt:
        pass
    attempt = next(recovering(SoloCommunicator(), builder(), num_steps=1))
    attempt.training.optimizer.zero_grad()
    attempt.commit()
    with pytest.raises(RuntimeError, match="was committed already"):
        attempt.commit()


def test_any_other_error_ends_the_run():
    def program(comm):
        for attempt in recovering(comm, builder(), num_steps=3):
            with attempt:
                raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        world(2).run(program)


def test_a_world_that_does_not_survive_ends_with_the_death():
    with pytest.raises(Killed):
        LocalWorld(2, deaths={1: 30}, timeout_seconds=TIMEOUT_SECONDS).run(train, builder())


def test_a_single_process_runs_the_same_loop():
    parameters, losses, recoveries = train(SoloCommunicator(), builder())
    expected, _ = undisturbed(3, 1, "1f1b")
    for name, values in expected.items():
        np.testing.assert_allclose(parameters[name], values, rtol=1e-9, atol=1e-12)
    assert sorted(losses) == [0, 1, 2, 3]
    assert recoveries == []


@pytest.mark.parametrize("survive", [False, True])
def test_one_rank_says_where_nobody_is_healed(survive):
    said = []
    LocalWorld(2, survive=survive).run(lambda comm: train(comm, builder(), num_steps=1, say=said.append))
    assert said == ([] if survive else [UNHEALED])


def test_votes_are_the_same_everywhere():
    def program(comm):
        first = comm.vote(True), comm.vote(comm.rank != 1)
        if comm.rank == 2:
            raise Killed
        return *first, comm.vote(True)

    assert world(3).run(program) == [(True, False, False)] * 2 + [None]


def test_newcomers_take_the_places_of_the_dead():
    def program(comm):
        if not comm.is_newcomer:
            if comm.rank in (1, 2):
                raise Killed
            assert not comm.vote(True)
            comm = comm.heal(Heal.REPLACE)
        return comm.rank, comm.size, comm.is_newcomer, comm.allreduce(np.array([comm.rank])).wait()[0]

    assert world(4).run(program) == [(0, 4, False, 6), (1, 4, True, 6), (2, 4, True, 6), (3, 4, False, 6)]


def test_only_a_world_that_survives_heals():
    with pytest.raises(RuntimeError, match="only a world that survives failures can heal"):
        SoloCommunicator().heal(Heal.SHRINK)


def test_state_is_handed_over_from_the_first_holder():
    def program(comm):
        a, b = Extent("a", 0, 3), Extent("b", 0, 4)
        held = {0: {a: np.full(3, 1.0)}, 1: {a: np.full(3, 1.0), b: np.full((2, 2), 2.0)}, 2: {}}[comm.rank]
        wanted = {a: np.zeros(3), b: np.zeros((2, 2))} if comm.rank != 1 else {a: np.zeros(3)}
        hand_over(comm, held, wanted)
        return {extent.name: values.ravel()[0] for extent, values in wanted.items()}

    assert world(3).run(program) == [{"a": 1, "b": 2}, {"a": 1}, {"a": 1, "b": 2}]


def test_shards_are_cut_anew_from_whatever_covers_them():
    """What a rank has itself comes first, then the first rank that has some of it, as far as that goes."""

    def program(comm):
        held = {
            0: {Extent("m", 0, 4): np.arange(4.0)},
            1: {Extent("m", 2, 7): 100 + np.arange(2.0, 7)},
            2: {Extent("m", 7, 10): np.arange(7.0, 10), Extent("m", 3, 3): np.empty(0)},
            3: {},
        }[comm.rank]
        start, stop = [(0, 3), (3, 6), (6, 10), (1, 9)][comm.rank]
        wanted = {Extent("m", start, stop): np.zeros(stop - start), Extent("m", 5, 5): np.empty(0)}
        hand_over(comm, held, wanted)
        return wanted[Extent("m", start, stop)].tolist()

    assert world(4).run(program) == [
        [0, 1, 2],
        [103, 104, 105],
        [106, 7, 8, 9],
        [1, 2, 3, 104, 105, 106, 7, 8],
    ]


@pytest.mark.parametrize("lost", [Extent("c", 0, 1), Extent("a", 0, 2)])
def test_what_nobody_holds_is_named_on_every_rank_and_nothing_is_written(lost):
    def program(comm):
        a = Extent("a", 0, 1)
        wanted = {a: np.zeros(1)} | ({lost: np.zeros(lost.stop)} if comm.rank else {})
        with pytest.raises(MissingError, match=rf"no living rank holds {lost.name}\[{lost.stop - 1}:{lost.stop}\]"):
            hand_over(comm, {a: np.ones(1)}, wanted)
        return wanted[a][0]

    assert world(2).run(program) == [0, 0]


def test_a_round_of_copies_counts_once_it_was_agreed_on():
    def program(comm):
        mine = np.full(2, float(comm.rank))
        arrays = {Extent(f"own{comm.rank}", 0, 2): mine, Extent("shared", 0, 1): np.ones(1)}
        buddies = Buddies(comm, arrays)
        buddies.begin(Snapshot(4, 4, {"position": 7}, frozenset(), arrays))
        mine += 10  # training goes on
        buddies.wait()
        assert buddies.complete is None
        buddies.agreed()
        return buddies.complete.step, {at.name: values[0] for at, values in sorted(buddies.complete.arrays.items())}

    assert world(3).run(program) == [
        (4, {"own0": 0, "own2": 2, "shared": 1}),
        (4, {"own0": 0, "own1": 1, "shared": 1}),
        (4, {"own1": 1, "own2": 2, "shared": 1}),
    ]


def test_a_tensor_without_a_name_is_refused():
    toy: Toy = builder()(SoloCommunicator())
    toy.model.parameters()[0].name = ""
    with pytest.raises(ValueError, match="recovery needs a name of its own for every tensor"):
        state_of(toy)
