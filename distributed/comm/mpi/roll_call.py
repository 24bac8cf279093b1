"""What every rank waits for, asked when one of them has waited too long.

    rank 0, whose time is up       question  ->  every other rank
    a rank that waits as well      answer    ->  rank 0
    a rank that computes, or is gone, says nothing

Questions cost nothing while nobody asks: only a rank that waits, and has waited for a while, looks for them. This file
knows no MPI: it is given a communicator of mpi4py, whose messages are the roll call's alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

_QUESTION, _ANSWER = 0, 1  # tags
_ANSWER_SECONDS = 1.0  # ranks that wait answer within LOOK_SECONDS, on a busy machine too
_NAMED_RANKS = 8  # of a large job a few examples say enough
LOOK_SECONDS = 0.05  # how long a rank waits before it looks whether somebody asks, and then again


class RollCall:
    """Asks the other ranks what they wait for, and answers those that ask.

    Args:
        comm: of all ranks of the job.
        members: the world rank of each of its ranks.
    """

    def __init__(self, comm: Any, members: Sequence[int]) -> None:
        self._comm = comm
        self._members = members
        self._others = [rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()]
        self._num_questions = 0
        self._sent: list[Any] = []  # requests, which must live until they are done

    def answer(self, waits_for: Callable[[], str]) -> None:
        """Tell every rank that has asked what this one waits for."""
        for rank in self._others:
            while self._comm.Iprobe(rank, _QUESTION):
                question = self._comm.recv(source=rank, tag=_QUESTION)
                self._sent.append(self._comm.isend((question, waits_for()), rank, _ANSWER))

    def ask(self, waits_for: Callable[[], str]) -> str:
        """Ask all other ranks, and describe what they say.

        `; rank 1 waits for barrier #3; rank 2 does not wait`.

        Args:
            waits_for: of this rank, whom another may be asking too.
        """
        self._num_questions += 1
        self._sent += [self._comm.isend(self._num_questions, rank, _QUESTION) for rank in self._others]
        answers: dict[int, str] = {}
        deadline, is_over = time.monotonic() + _ANSWER_SECONDS, False
        while len(answers) < len(self._others) and not is_over:
            is_over = time.monotonic() > deadline  # then one look more, if this process was held up meanwhile
            self.answer(waits_for)
            for rank in self._others:
                while self._comm.Iprobe(rank, _ANSWER):
                    question, answer = self._comm.recv(source=rank, tag=_ANSWER)
                    if question == self._num_questions:  # not one that came too late
                        answers[rank] = answer
            if not is_over:
                time.sleep(1e-3)
        silent = [self._members[rank] for rank in self._others if rank not in answers]
        return _describe({self._members[rank]: answer for rank, answer in sorted(answers.items())}, silent)


def _describe(answers: dict[int, str], silent: Sequence[int]) -> str:
    parts = [f"rank {rank} waits for {answer}" for rank, answer in answers.items()]
    if len(parts) > _NAMED_RANKS + 1:  # to leave out one would save nothing
        parts[_NAMED_RANKS:] = [f"{len(parts) - _NAMED_RANKS} more ranks wait"]
    if silent:
        names = ", ".join(map(str, silent[:_NAMED_RANKS])) + (", ..." if len(silent) > _NAMED_RANKS else "")
        parts.append(
            f"rank {names} has not come: it computes, or is gone"
            if len(silent) == 1
            else f"ranks {names} have not come: they compute, or are gone"
        )
    return "".join(f"; {part}" for part in parts)
