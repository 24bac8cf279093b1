"""Does a pair of a forward and a backward gain time where both run at once? dualpipev_overlap beside dualpipev.

    mpirun -n 2 python -m mpi4py benchmarks/pairs.py

Steps of both take turns in one job. Of each it prints the median step on the slower rank, and of some recorded steps,
on average over ranks, the seconds in which a rank computes and those in which it waits for a message.
"""

from __future__ import annotations

import argparse
from statistics import mean, median, quantiles

from engine_jobs import SIZES
from interleave import take_turns
from pipeline_minigrad import Training

from distributed import world
from pipeline import Timeline

NAMES = ("dualpipev", "dualpipev_overlap")
NUM_RECORDED = 2  # steps


def computing(timeline: Timeline) -> float:
    """Return the seconds that a rank computes."""
    return mean(timeline.busy(rank) for rank in range(len(timeline.rows)))


def waiting(timeline: Timeline) -> float:
    """Return the seconds that a rank idles until the last one has ended."""
    return mean(timeline.makespan_bubble(rank) for rank in range(len(timeline.rows)))


def main() -> None:
    """Print one line a schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="baby")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8, help="of each schedule, one step each")
    args = parser.parse_args()
    comm = world()
    pipes = {name: Training(comm, args.size, name, args.microbatches) for name in NAMES}
    steps = {name: training.step for name, training in pipes.items()}
    taken = take_turns(steps, args.turns, barrier=comm.barrier, gather=comm.gather_objects, steps_a_turn=1)["seconds"]
    recorded = {name: [training.recorded() for _ in range(NUM_RECORDED)] for name, training in pipes.items()}
    if comm.rank:
        return
    print(f"{args.size}, {comm.size} ranks, {args.microbatches} micro-batches; milliseconds")
    print("schedule             step  (quartiles)      computes  waits")
    for name in NAMES:
        low, _, high = (1e3 * value for value in quantiles(taken[name], n=4))
        busy, idle = (1e3 * median(map(what, recorded[name])) for what in (computing, waiting))
        print(f"{name:18} {1e3 * median(taken[name]):6.1f}  ({low:.1f} to {high:.1f})  {busy:8.1f} {idle:6.1f}")
    gains = [a / b - 1 for a, b in zip(taken["dualpipev"], taken["dualpipev_overlap"], strict=True)]
    print(f"dualpipev_overlap is faster by {100 * median(gains):.2f}% (median over turns)")


if __name__ == "__main__":
    main()
