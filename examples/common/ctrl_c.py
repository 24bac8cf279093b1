"""Start a launcher so that Ctrl-C saves and ends the run that it starts: `make train` does.

    python examples/common/ctrl_c.py mpirun -n 2 python -m mpi4py examples/train_gpt.py --dp 2

A terminal sends Ctrl-C to all processes in front of it, and Open MPI's mpirun kills its ranks a moment after one. So
the launcher gets a session of its own, which no Ctrl-C reaches; the first one is handed to it as SIGUSR1, which it
passes on to every rank, and on which a run saves and ends. A second one ends it at once.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(command: Sequence[str]) -> int:
    """Run a command to its end; return its exit code, as a shell would say it."""
    say("Ctrl-C saves and ends this run")
    let = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, SIGNALS)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until there is somebody to hand them to
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=let) as job:

        def save_and_end(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, end)
            say("\nCtrl-C: saves and ends the run; once more ends it at once")
            job.send_signal(signal.SIGUSR1)

        def end(number: int, frame: FrameType | None) -> None:
            job.terminate()

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGHUP, save_and_end)  # the terminal was closed
        signal.signal(signal.SIGINT, save_and_end)
        let()
        code = job.wait()
    return code if code >= 0 else 128 - code


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
