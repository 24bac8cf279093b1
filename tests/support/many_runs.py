"""Run an example many times in one job: the command lines are a file's, one a line, on every rank alike.

    mpirun -n 4 python -m mpi4py tests/support/many_runs.py train_gpt SAMPLE_TOKENS COMMAND_LINES

Each is run as a script is, by its own `main`, on the first ranks of the job that it needs; above what it says on
stdout and on stderr stands the line itself. One that fails ends the job, as it would end a run of its own.
`jobs.run_lines` starts it.
"""

import sys
from pathlib import Path
from types import ModuleType

import lightly

from distributed import Communicator, world
from distributed.run import command_line


def main() -> None:
    everyone = world()
    _, name, sample_tokens, command_lines = sys.argv
    script = lightly.load(name, sample_tokens=int(sample_tokens))
    for line in Path(command_lines).read_text().splitlines():
        size, *arguments = line.split()
        if everyone.rank == 0:
            for stream in (sys.stdout, sys.stderr):
                stream.write(f"{line}\n")
                stream.flush()
        part = everyone.split(int(everyone.rank >= int(size)))
        if everyone.rank < int(size):
            run(script, part, arguments)
        everyone.barrier()


def run(script: ModuleType, comm: Communicator, arguments: list[str]) -> None:
    """Run the script as if these ranks were all that there are."""
    script.world = lambda **_: comm  # type: ignore[attr-defined]
    command_line.launcher_size = lambda: comm.size
    sys.argv = [f"{script.__name__}.py", *arguments]
    script.main()


if __name__ == "__main__":
    command_line.run_script(main)
