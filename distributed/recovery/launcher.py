"""Starts a job whose ranks may die, and starts it again where it could not heal.

    mpirun ends with 0                                     the job is done
    its ranks note that all of them came to their end      done too: mpirun counts the dead, a job that healed does not
    an error of the script, a signal that was asked for    the end, with that exit code
    anything else: MPI crashed, or hung, or every rank     all ranks start again, and find the state where the others
    was killed, or mpirun was, or outlived them            left it (`rescue.py`), or where `restore` does

A job that is lost eleven times and has no new step to show is given up.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from distributed.comm.outcome import FOLDER, RUN, die_with_parent, forget, has_begun, read_end, read_run, somebody_left
from distributed.recovery.bereaved import Bereaved
from distributed.recovery.rescue import LOST_AT, begin_steps, read_steps
from distributed.recovery.stderr_filter import pass_on
from minigrad.words import counted

MOST_TRIES = 10  # of a job that does no step: kills may come faster than ranks start
GIVEN_UP = 1
_MEMORY = Path("/dev/shm")
_ASKED = {code for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) for code in (-s, 128 + s)}
_LAST_WORDS_SECONDS = 0.3  # for the other ranks to leave what they have
_BEREAVED_SECONDS = 5.0  # for an mpirun to end whose ranks died, or one of them before there was a world
_FAREWELL_SECONDS = 60.0  # for one to end whose ranks came to their end: on a busy machine it is late
_SILENCE_SECONDS = 5.0  # for the pipes of a job that was killed to close


class Launcher:
    """One job, however often it is started.

    Args:
        command: `mpirun` and all that follows.
        environment: of its ranks, besides the folder.
        say: tells a line to whoever looks on.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], say: Callable[[str], None]) -> None:
        self._command = command
        self._environment = environment
        self._say = say
        self._job: subprocess.Popen[bytes] | None = None  # while it runs
        self._is_asked_to_end = False
        self._undelivered: int | None = None  # a signal that came while none ran
        self._why: str | None = None  # the ranks' own words, of a job that is lost

    def run(self) -> int:
        """Run the job to its end; return its exit code."""
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        before = {number: signal.signal(number, self._on_signal) for number in signals}
        try:
            return self._run_to_end()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run_to_end(self) -> int:
        with tempfile.TemporaryDirectory(prefix="minigrad-", dir=_MEMORY if _MEMORY.is_dir() else None) as name:
            folder = Path(name)
            begin_steps(folder)
            num_steps, tries = 0, 0
            started: dict[str, str] = {}
            while True:
                code = self._run_once({FOLDER: name} | started)
                end = read_end(folder)
                if end is not None or not self._is_lost(code, folder):
                    return code if end is None else end
                done = read_steps(folder)
                tries = 1 if done > num_steps else tries + 1
                num_steps = max(done, num_steps)
                what = f"the job was lost after {counted(done, 'step')} ({self._why or describe(code)})"
                if tries > MOST_TRIES:
                    self._say(f"{what}, and {MOST_TRIES} times before without a step between: it is given up")
                    return GIVEN_UP
                self._say(f"{what}: all ranks start again")
                run = read_run(folder)
                started = {LOST_AT: str(time.time())} | ({RUN: run} if run is not None else {})
                forget(folder)

    def _run_once(self, variables: dict[str, str]) -> int:
        """Run mpirun until it ends, or ranks say that they are lost; return its exit code."""
        self._why = None
        lost = threading.Event()

        def lose(why: str) -> None:
            self._why = self._why or why
            lost.set()

        forwarded = [word for name in variables for word in ("-x", name)]  # to other hosts too
        self._job = job = subprocess.Popen(
            [self._command[0], *forwarded, *self._command[1:]],
            env=self._environment | variables,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that a terminal's Ctrl-C reaches it once, through this process
            preexec_fn=die_with_parent,
        )
        if self._undelivered is not None:
            job.send_signal(self._undelivered)
        assert job.stderr is not None
        stderr = threading.Thread(target=pass_on, args=(job.stderr.fileno(), sys.stderr.buffer, lose), daemon=True)
        stderr.start()
        bereaved, folder = Bereaved(job.pid), Path(variables[FOLDER])
        while job.poll() is None:
            if bereaved.seconds() > (_FAREWELL_SECONDS if somebody_left(folder) else _BEREAVED_SECONDS):
                lose("mpirun outlived its ranks and did not end")
            elif not has_begun(folder) and bereaved.seconds_without_a_rank() > _BEREAVED_SECONDS:
                lose("a rank died before all had met")
            if lost.wait(0.02):
                time.sleep(_LAST_WORDS_SECONDS)
                job.kill()  # its ranks die with it: see `die_with_parent`
                job.wait()
        self._job = None
        stderr.join(_SILENCE_SECONDS)
        job.stderr.close()
        return job.returncode

    def _is_lost(self, code: int, folder: Path) -> bool:
        if self._is_asked_to_end or code in _ASKED:
            return False
        nobody_left = has_begun(folder) and not somebody_left(folder)
        return self._why is not None or code < 0 or code > 128 or (code == 0 and nobody_left)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._is_asked_to_end = True
        if self._job is None:
            self._undelivered = number  # the next one gets it
        else:
            self._job.send_signal(number)


def describe(code: int) -> str:
    """Say what an exit code of mpirun means."""
    if code == 0:
        return "every rank died"
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"exit code {code}"
    return f"mpirun died of {name}" if code < 0 else f"a rank died of {name}"
