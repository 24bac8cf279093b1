"""Start a job whose ranks may die: `python -m distributed.recovery -n 4 examples/gpt_recovery.py --steps 100`.

It is `mpirun` with what surviving needs, and with one thing that mpirun cannot know: a job that lost ranks, healed and
came to its end has succeeded. So the exit code is 0 then, and what Open MPI says about the dead is left out.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from distributed.comm.mpi_family import OUTCOME

PROGRAM = "python -m distributed.recovery"
_KILLED = (137, 142, 14)  # what mpirun makes of SIGKILL, and of SIGALRM, which ends a rank that is stuck
# What Open MPI says about the dead: whole lines, and words that it ends with no newline, so that anything may follow.
_NOISE = re.compile(rb"NBC_Progress: .*|-{60,}|prterun noticed .*|signal (9 \(Killed\)|14 \(Alarm clock\))\.|\s*")
_UNENDED_NOISE = b"LAUNCHER JOB OBJECT NOT FOUND"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, required=True, metavar="RANKS", help="number of ranks")
    parser.add_argument("script", help="a Python script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    given = parser.parse_args(argv)
    mpirun = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if given.n < 1 or mpirun is None or not Path(given.script).is_file():
        wrong = f"-n must be at least 1, got {given.n}" if given.n < 1 else f"there is no {given.script}"
        print(f"{PROGRAM}: {'there is no mpirun' if mpirun is None else wrong}", file=sys.stderr)
        return 2
    command = [
        mpirun,
        "--with-ft",
        "ulfm",
        "-n",
        str(given.n),
        sys.executable,
        "-m",
        "mpi4py",
        given.script,
        *given.args,
    ]
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder) / "ended-well"
        job = subprocess.Popen(command, env=_environment() | {OUTCOME: str(outcome)}, stderr=subprocess.PIPE)
        assert job.stderr is not None
        filtering = threading.Thread(target=_pass_on, args=(job.stderr,))
        filtering.start()
        while True:
            try:
                code = job.wait()
                break
            except KeyboardInterrupt:
                pass  # mpirun has it too, and passes it on
        filtering.join()
        return 0 if code in _KILLED and outcome.exists() else code


def _environment() -> dict[str, str]:
    """Return the environment of the job: as many ranks as wanted, newcomers included, whatever the number of cores."""
    return {
        "OPENBLAS_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    } | os.environ


def _pass_on(stderr: IO[bytes]) -> None:
    """Copy what the job says, but for what Open MPI says about ranks that die."""
    for line in stderr:
        sys.stderr.buffer.write(without_noise(line))
        sys.stderr.buffer.flush()


def without_noise(line: bytes) -> bytes:
    """Return a line without what Open MPI says about ranks that die: b"" where there is nothing else in it."""
    said = line.replace(b"\0", b"").replace(_UNENDED_NOISE, b"")
    return b"" if _NOISE.fullmatch(said.rstrip(b"\n")) else said


if __name__ == "__main__":
    sys.exit(main())
