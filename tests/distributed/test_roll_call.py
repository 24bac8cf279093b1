"""What a rank says of the others when it has waited too long. Its MPI is a table of messages that have come."""

from collections.abc import Collection
from itertools import count
from types import SimpleNamespace

import pytest

from distributed.comm.mpi import roll_call
from distributed.comm.mpi.roll_call import RollCall

QUESTION, ANSWER = 0, 1


class Letters:
    """A communicator of mpi4py, of rank 0, to which all that others send has come."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.come: dict[tuple[int, int], list[object]] = {}
        self.sent: list[tuple[object, int, int]] = []

    def Get_size(self) -> int:
        return self.size

    def Get_rank(self) -> int:
        return 0

    def Iprobe(self, source: int, tag: int) -> bool:
        return bool(self.come.get((source, tag)))

    def recv(self, source: int, tag: int) -> object:
        return self.come[source, tag].pop(0)

    def isend(self, obj: object, dest: int, tag: int) -> None:
        self.sent.append((obj, dest, tag))


def said(size: int, waiting: Collection[int], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what rank 0 says of ranks of which some answer its first question."""
    letters = Letters(size)
    letters.come = {(rank, ANSWER): [(1, "barrier #3")] for rank in waiting}
    monkeypatch.setattr(roll_call, "_ANSWER_SECONDS", 0.01)
    words = RollCall(letters, [10 * rank for rank in range(size)]).ask(lambda: "nothing")
    assert letters.sent == [(1, rank, QUESTION) for rank in range(1, size)]
    return words


def test_each_rank_is_named_by_its_number_in_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(1, [], monkeypatch) == ""
    assert said(3, [1, 2], monkeypatch) == "; rank 10 waits for barrier #3; rank 20 waits for barrier #3"
    one = "; rank 20 has not come: it computes, or is gone"
    assert said(3, [1], monkeypatch) == f"; rank 10 waits for barrier #3{one}"
    assert said(3, [], monkeypatch) == "; ranks 10, 20 have not come: they compute, or are gone"


def test_of_many_ranks_some_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(10, range(1, 10), monkeypatch).count("waits for barrier #3") == 9
    words = said(12, range(1, 12), monkeypatch)
    assert words.count("waits for barrier #3") == 8
    assert words.endswith("; rank 80 waits for barrier #3; 3 more ranks wait")
    silent = "10, 20, 30, 40, 50, 60, 70, 80"
    assert said(9, [], monkeypatch) == f"; ranks {silent} have not come: they compute, or are gone"
    assert said(10, [], monkeypatch) == f"; ranks {silent}, ... have not come: they compute, or are gone"


def test_an_answer_to_an_earlier_question_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "_ANSWER_SECONDS", 0.01)
    letters = Letters(2)
    call = RollCall(letters, [0, 1])
    call.ask(lambda: "nothing")
    letters.come = {(1, ANSWER): [(1, "too late"), (2, "in time")]}
    assert call.ask(lambda: "nothing") == "; rank 1 waits for in time"


def test_answers_that_come_while_a_process_is_held_up_count(monkeypatch: pytest.MonkeyPatch) -> None:
    # It asked, was stopped until nobody was waited for any more, and told of ranks that had answered as silent.
    held_up = SimpleNamespace(monotonic=count(step=1000).__next__, sleep=lambda seconds: None)
    monkeypatch.setattr(roll_call, "time", held_up)
    assert said(3, [1, 2], monkeypatch) == "; rank 10 waits for barrier #3; rank 20 waits for barrier #3"


def test_whoever_asks_is_answered_while_one_asks_too() -> None:
    letters = Letters(3)
    letters.come = {(2, QUESTION): [7, 8], (1, ANSWER): [(1, "a")], (2, ANSWER): [(1, "b")]}
    assert RollCall(letters, [0, 1, 2]).ask(lambda: "the loss") == "; rank 1 waits for a; rank 2 waits for b"
    assert letters.sent[2:] == [((7, "the loss"), 2, ANSWER), ((8, "the loss"), 2, ANSWER)]
