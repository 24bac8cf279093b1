"""Start a job whose ranks may die: `python -m distributed.recovery -n 4 examples/gpt_recovery.py --steps 100`.

It is `mpirun` with what surviving needs, and with two things that mpirun cannot know: a job that lost ranks, healed and
came to its end has succeeded; and one that could not heal can go on where it was, on ranks that are all new.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from distributed.recovery.launcher import Launcher
from minigrad.command_parser import CommandParser

PROGRAM = "python -m distributed.recovery"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = CommandParser(PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, required=True, metavar="RANKS", help="number of ranks")
    parser.add_argument("script", help="a Python script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments").required = False
    given = parser.parse_args(argv)
    mpirun = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if given.n < 1 or mpirun is None or not Path(given.script).is_file():
        wrong = f"-n must be at least 1, got {given.n}" if given.n < 1 else f"there is no file {given.script}"
        print(f"{PROGRAM}: {'there is no mpirun' if mpirun is None else wrong}", file=sys.stderr)
        return 2
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    if (other := mpi_without_healing(version)) is not None:
        print(f"{PROGRAM}: ranks that may die need Open MPI 5, as make setup installs it, not {other}", file=sys.stderr)
        return 2
    ranks = ["-n", str(given.n), sys.executable, "-m", "mpi4py", given.script, *given.args]
    # Where somebody looks, a progress bar comes through as it is written.
    stream = ["--stream-buffering", "0"] if sys.stderr.isatty() else []
    return Launcher([mpirun, "--with-ft", "ulfm", *stream, *ranks], _environment(), _say).run()


def mpi_without_healing(version: str) -> str | None:
    """Return which MPI it is that cannot go on when a rank dies, or None.

    Args:
        version: what `mpirun --version` says.
    """
    found = re.search(r"\(Open MPI\) ((\d+)[\w.]*)", version)
    if found is None:
        return "MPICH" if "HYDRA" in version else "another MPI"
    return f"Open MPI {found[1]}" if int(found[2]) < 5 else None


def _say(line: str) -> None:
    print(f"{PROGRAM}: {line}", file=sys.stderr, flush=True)


def _environment() -> dict[str, str]:
    """Return the environment of the job: as many ranks as wanted, newcomers included, whatever the number of cores."""
    return {
        "OPENBLAS_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_opal_signal": "",  # Open MPI's handler of a crash may hang, and a rank that hangs is not dead
        "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",  # each host's slots before more on the first
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    } | os.environ


if __name__ == "__main__":
    sys.exit(main())
