"""Run train_gpt.py many times in one job: the command lines are standard input's, one a line, on every rank alike.

    mpirun -n 4 python -m mpi4py tests/support/many_runs.py COMMAND_LINES

Each is run as a script is, by its own `main`, on the first ranks of the job that it needs. A line that fails ends the
job, as it would end a run of its own.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_gpt
from distributed import Communicator, world
from distributed.run import command_line
from distributed.run import folder as run_folder


def main() -> None:
    everyone = world()
    train_gpt.SAMPLE_TOKENS = 2
    run_folder.draw_plots = lambda *_, **__: []  # matplotlib's pictures know of no layout, and take half of the time
    for line in Path(sys.argv[1]).read_text().splitlines():
        size, *arguments = line.split()
        if everyone.rank == 0:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
        part = everyone.split(int(everyone.rank >= int(size)))
        if everyone.rank < int(size):
            run(part, arguments)
        everyone.barrier()


def run(comm: Communicator, arguments: list[str]) -> None:
    """Run the script as if these ranks were all that there are."""
    train_gpt.world = lambda **_: comm
    command_line.launcher_size = lambda: comm.size
    sys.argv = ["train_gpt.py", *arguments]
    train_gpt.main()


if __name__ == "__main__":
    command_line.run_script(main)
