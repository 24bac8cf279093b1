"""A family of MPI's communicators that fails as one, with an MPI of plain Python: what real kills hit by chance."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from distributed.comm.failure import Heal, RankFailure
from distributed.comm.mpi import family as module
from distributed.comm.mpi.family import MPIFamily


class MPIError(RuntimeError):
    def __init__(self, number, words=""):
        super().__init__(words)
        self.number = number

    def Get_error_class(self):
        return self.number


class Group:
    def __init__(self, members):
        self.members = members

    def Get_size(self):
        return len(self.members)


def translate(group, _, other):
    return [other.members.index(member) for member in group.members]


OTHER_ERROR, PROC_FAILED, PENDING, REVOKED = range(4)
MPI = SimpleNamespace(
    Exception=MPIError,
    ERR_PROC_FAILED=PROC_FAILED,
    ERR_PROC_FAILED_PENDING=PENDING,
    ERR_REVOKED=REVOKED,
    Group=SimpleNamespace(Translate_ranks=translate),
    Info=SimpleNamespace(Create=dict),
)


class Comm:
    """A communicator of some processes, of which some are dead."""

    def __init__(self, members, dead, *, vote=None):
        self.members, self.dead, self.vote = members, dead, vote
        self.num_revoked = 0

    def Get_group(self):
        return Group(self.members)

    def Get_failed(self):
        return Group([member for member in self.members if member in self.dead])

    def Get_size(self):
        return len(self.members)

    def Get_rank(self):
        return 0

    def Revoke(self):
        self.num_revoked += 1

    def Shrink(self):
        return Comm([member for member in self.members if member not in self.dead], self.dead)

    def allgather(self, process):
        return [process] * len(self.members)

    def Iagree(self, flag):
        return SimpleNamespace(Test=lambda: self.vote(flag))


@pytest.fixture(autouse=True)
def no_exit(monkeypatch):
    """Nothing is left to do at the exit of this process."""
    monkeypatch.setattr(module, "leave_at_exit", lambda world: None)
    monkeypatch.setattr(module, "atexit", SimpleNamespace(register=lambda leave: None))


def make(dead=(), vote=None):
    world = Comm([10, 11, 12], {*dead}, vote=vote)
    return MPIFamily(MPI, world, timeout_seconds=0.05), world


def test_the_first_look_that_finds_a_death_revokes_all_once():
    family, world = make()
    part = family.add(Comm([10, 11], world.dead))
    family.check()
    world.dead.add(12)
    for _ in range(2):
        with pytest.raises(RankFailure) as caught:
            family.check()
        assert caught.value.ranks == (2,)
    assert (world.num_revoked, part.num_revoked) == (1, 1)
    assert family.dead() == (2,)


@pytest.mark.parametrize("dead", [(), (11,)])
@pytest.mark.parametrize("number", [OTHER_ERROR, PROC_FAILED, PENDING, REVOKED])
def test_an_error_of_mpi_is_a_death_where_there_is_one_or_mpi_says_so(number, dead):
    family, world = make(dead)
    error = MPIError(number)
    found = family.translate(error)
    if dead or number != OTHER_ERROR:
        assert isinstance(found, RankFailure)
        assert world.num_revoked == 1
    else:
        assert found is error
        assert world.num_revoked == 0
    own = KeyError("a bug")
    assert family.translate(own) is own
    with pytest.raises(KeyError), family.guarded():
        raise own


def test_after_a_failure_each_error_of_mpi_is_that_failure():
    family, world = make((11,))
    first = family.translate(MPIError(REVOKED))
    world.dead.clear()
    assert family.translate(MPIError(OTHER_ERROR)) is first


def looks(family, num_looks, outcome, idle):
    """Vote yes; the outcome is there after some looks."""
    left = iter(range(num_looks))

    def vote(flag):
        if next(left, None) is not None:
            return False
        if isinstance(outcome, Exception):
            raise outcome
        np.testing.assert_array_equal(flag, 1)
        flag[0] = outcome
        return True

    family.world.vote = vote
    return family.vote(True, idle=idle)


@pytest.mark.parametrize("idle", [False, True])
def test_a_vote_has_the_outcome_of_all_or_fails_with_a_death_or_ends_in_time(idle):
    for outcome in (True, False):
        family, world = make()
        assert looks(family, 3, outcome, idle) is outcome
        assert world.num_revoked == 0
    family, world = make((11,))
    assert looks(family, 1, MPIError(PROC_FAILED), idle) is False
    assert world.num_revoked == 1
    family, _ = make()
    with pytest.raises(TimeoutError, match=r"no rank may wait longer than 0\.05 s, but a vote takes so"):
        looks(family, 10**9, True, idle)


def test_who_heals_without_the_dead_keeps_what_is_under_way_with_them():
    family, _ = make((11,))
    family.meet()
    before = weakref.ref(family)
    family = family.heal(Heal.SHRINK)
    gc.collect()
    assert family.world.members == [10, 12]
    assert (family.dead(), family.is_newcomer) == ((), False)
    assert before() is not None, "MPI still reads and writes its arrays"
    assert before().dead() == (1,)


@pytest.mark.parametrize("step", ["spawned", "agreed", "welcomed"])
def test_new_ranks_are_welcomed_or_the_job_is_lost_with_the_reason(step, monkeypatch):
    family, world = make((11,))
    family.meet()
    lost, welcomed = [], []
    monkeypatch.setattr(module, "lose", lost.append)

    def send(_, rank, tag):
        welcomed.append((rank, tag))
        raise MPIError(PROC_FAILED)  # it is dead again, which the next call sees

    class New(Comm):
        def Merge(self, *, high):
            assert not high
            return self

        def Split(self, color, key):
            assert (color, key) == (0, 0)
            return self

        def bcast(self, ranks, root):
            assert (ranks, root) == ([1], 0)

        def send(self, *message):
            send(*message)

    class Survivors(Comm):
        def Spawn_multiple(self, commands, arguments, counts, infos):
            assert (commands, counts, len(infos)) == (["/usr/bin/env"], [1], 1)
            if step == "spawned":
                raise MPIError(OTHER_ERROR, "no slots are left")
            return New([10, 13, 12], {*()})

        def Agree(self, yes):
            return yes if step == "welcomed" else 0

    world.Shrink = lambda: Survivors([10, 12], {*()})
    family = family.heal(Heal.REPLACE)
    if step == "welcomed":
        assert (lost, family.world.members, welcomed) == ([], [10, 13, 12], [(1, module._WELCOME)])
    else:
        assert (
            lost[0]
            == {
                "spawned": "new ranks could not be started: no slots are left",
                "agreed": "new ranks could not be started on every rank",
            }[step]
        )
        assert welcomed == []
