"""How a job ends when a rank fails: its own words first, then every rank, at once.

Without it the other ranks would wait for ever for the rank that is gone. This file knows no MPI: it is given a call
that ends all ranks.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from distributed.comm.outcome import job_folder, last_words, lose


class JobEnd:
    """Ends every rank of the job with one rank's words.

    Args:
        rank: of this process, for its words.
        abort: ends all ranks with an exit status; may block, as MPI's own can over a cut link.
        loses: exceptions that are no fault of the program, after which a launcher that can starts the job again.
        limit_seconds: how long it may; then this process ends by itself.
    """

    def __init__(
        self,
        rank: int,
        abort: Callable[[int], object],
        *,
        loses: tuple[type[Exception], ...] = (),
        limit_seconds: float = 5.0,
    ) -> None:
        self._rank = rank
        self._abort = abort
        self._loses = loses
        self._limit_seconds = limit_seconds

    def __call__(self, message: str, status: int = 1) -> NoReturn:
        """Print the message, each line after this rank, and end every rank."""
        prefix = f"[rank {self._rank}] "
        last_words("".join(f"{prefix}{line}\n" for line in message.splitlines()))
        watchdog = threading.Timer(self._limit_seconds, os._exit, (status,))
        watchdog.daemon = True
        watchdog.start()
        self._abort(status)
        os._exit(status)

    def on_uncaught_exception(self) -> None:
        """Make an exception that nobody catches, on any thread, end the job.

        Under `python -m mpi4py` this hook still speaks first, and MPI is gone before that one could. SystemExit is no
        exception here: a script that calls sys.exit(2) on every rank ends with 2; where only some ranks call it,
        `python -m mpi4py` is what ends the others.
        """
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, self._loses) and job_folder() is not None:
            lose(f"[rank {self._rank}] {kind.__name__}: {error}")
        self("".join(traceback.format_exception(kind, error, trace)))

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            self("".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)))
