"""Ranks as threads of one process: the whole of `Communicator` without MPI, for tests and notebooks.

`LocalWorld(4).run(program)` calls `program(comm)` on four threads. It is stricter than MPI where that finds mistakes:
collectives that do not match are named, a wait that lasts too long says what every rank waits for, results land in an
array only at wait() or test(), and with `synchronous_sends=True` no send completes before its receive is posted. It is
no way to go faster: one lock guards everything.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping
from typing import Any

from distributed.comm.communicator import MAX_MESSAGE_ELEMENTS
from distributed.comm.local.communicator import LocalCommunicator
from distributed.comm.local.job import Ended, Family, Job, Killed
from distributed.comm.settings import check_timeout


class LocalWorld:
    """A world of `size` ranks, each a thread of this process.

    Args:
        size: number of ranks.
        synchronous_sends: a send completes only once its receive is posted, like MPI's Ssend; else at once.
        timeout_seconds: longest single wait before TimeoutError tells what each rank waits for.
        max_message_elements: see `Communicator`.
        survive: a rank that raises `Killed` is dead to the others, who go on: see `failure.py`.
        deaths: rank -> the number of its call of a communicator, from 0, in which it dies; for tests.
    Raises:
        ValueError: size < 1, or timeout_seconds is not above 0.
    """

    def __init__(
        self,
        size: int,
        *,
        synchronous_sends: bool = False,
        timeout_seconds: float = 60.0,
        max_message_elements: int = MAX_MESSAGE_ELEMENTS,
        survive: bool = False,
        deaths: Mapping[int, int] | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"a LocalWorld needs at least 1 rank, got {size}")
        check_timeout(timeout_seconds)
        self.size = size
        self.synchronous_sends = synchronous_sends
        self.timeout_seconds = timeout_seconds
        self.max_message_elements = max_message_elements
        self.survive = survive
        self.deaths = dict(deaths or {})

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """Call program(comm, *args) on every rank and return the results by rank.

        Each rank starts in its own copy of the caller's context variables. Its thread is over when this returns, unless
        it goes on computing after another rank has failed.

        Raises:
            BaseException: what any rank raised first, with a note of the rank; ranks that wait for others end silently.
        """
        results: list[Any] = [None] * self.size
        caller = contextvars.copy_context()
        threads: list[tuple[int, threading.Thread]] = []

        def start(rank: int, family: Family, is_newcomer: bool = True) -> None:
            comm = LocalCommunicator.of_world(
                job, family, rank, max_message_elements=self.max_message_elements, is_newcomer=is_newcomer
            )
            run = caller.copy().run
            thread = threading.Thread(target=run, args=(run_rank, comm, rank), name=f"rank {rank}", daemon=True)
            threads.append((rank, thread))
            thread.start()

        def run_rank(comm: LocalCommunicator, rank: int) -> None:
            try:
                results[rank] = program(comm, *args)
            except Ended:
                pass
            except Killed as error:
                if not self.survive:
                    job.fail(error)
                job.die(rank)
                return  # a newcomer may be in its place already
            except BaseException as error:
                error.add_note(f"[rank {rank}]")
                job.fail(error)
            job.end(rank)

        job = Job(self.size, self.synchronous_sends, self.timeout_seconds, start, self.deaths, self.survive)
        family = Family(job, range(self.size))
        try:
            for rank in range(self.size):
                start(rank, family, is_newcomer=False)
            job.join()
        except BaseException as error:  # Ctrl-C too takes the ranks down
            job.fail(error)
            raise
        finally:
            for rank, thread in threads:
                if job.has_ended(rank):  # its thread is about to end too; one that computes is left behind
                    thread.join()
        return results
