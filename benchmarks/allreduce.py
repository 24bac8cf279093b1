"""Measure the mean of a gradient over the ranks of one host: shared memory against the MPI library's own Allreduce.

    mpirun -n 2 --bind-to none python benchmarks/allreduce.py

Three ways, in turn within each round, float32; a time is the median over rounds of the slowest rank's:
    MPI         comm.Allreduce(MPI.IN_PLACE, gradient), blocking, and the division
    in place    the gradient lies in comm.buffer()
    copied      it does not, and is copied in and out
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from results_file import FOLDER, keep

from distributed import Communicator, ReduceOp, describe, world

RESULTS = FOLDER / "allreduce.txt"
TARGETS = {16: 1.5, 64: 2.0}  # in place against MPI


def ways(comm: Communicator, num_elements: int) -> dict[str, Callable[[], object]]:
    """Make a gradient for each way, and the way to average it."""
    from mpi4py import MPI

    plain = np.full(num_elements, comm.rank, np.float32)
    shared = comm.buffer(num_elements, np.float32)
    shared[:] = plain
    outside = plain.copy()
    inside = comm.buffer(num_elements, np.float32)

    def by_mpi() -> None:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, plain)
        plain.__imul__(np.float32(1 / comm.size))

    def copied() -> None:
        inside[:] = outside
        outside[:] = comm.allreduce(inside, op=ReduceOp.MEAN).wait()

    return {"MPI": by_mpi, "in place": lambda: comm.allreduce(shared, op=ReduceOp.MEAN).wait(), "copied": copied}


def measure(comm: Communicator, num_elements: int, num_rounds: int) -> dict[str, float]:
    """Return the milliseconds of each way."""
    milliseconds: dict[str, list[float]] = {}
    jobs = ways(comm, num_elements)
    for number in range(num_rounds + 1):
        for name, average in jobs.items():
            comm.barrier()
            start = time.perf_counter()
            average()
            seconds = np.array([time.perf_counter() - start])
            if number > 0:  # the first touches the memory
                milliseconds.setdefault(name, []).append(1e3 * comm.allreduce(seconds, op=ReduceOp.MAX).wait()[0])
    return {name: statistics.median(values) for name, values in milliseconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[1, 4, 16, 64], help="default: 1 4 16 64")
    parser.add_argument("--rounds", type=int, default=25, help="default: %(default)s")
    args = parser.parse_args()
    comm = world()
    start_line = describe(comm)
    lines = [start_line, f"{'MiB':>4}{'MPI ms':>10}{'in place':>10}{'copied':>10}{'ratios':>14}{'target':>8}"]
    for mebibytes in args.mebibytes:
        times = measure(comm, mebibytes << 18, args.rounds)
        ratios = [times["MPI"] / times[name] for name in ("in place", "copied")]
        target = TARGETS.get(mebibytes, 0.0)
        verdict = f"{target:>7.1f}x {'met' if ratios[0] >= target else 'missed'}" if target else ""
        columns = "".join(f"{times[name]:>10.2f}" for name in ("MPI", "in place", "copied"))
        lines.append(f"{mebibytes:>4}{columns}{ratios[0]:>7.1f}x{ratios[1]:>5.1f}x{verdict}")
    if comm.rank == 0:
        print("\n".join(lines))
        keep(lines, RESULTS, is_default=args == parser.parse_args([]))


if __name__ == "__main__":
    main()
