"""Show where the time of a benchmark's training step goes: `python benchmarks/step_profile.py nano-cpu`.

`python -m minigrad.profiling` does the same for a script of your own, and says what the columns are.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from engine_jobs import SIZES, minigrad_step

from minigrad.profiling.calls import Calls, watching
from minigrad.profiling.floors import table

NUM_STEPS = {"tiny": 5, "nano-cpu": 20, "baby": 4}


def profiled(size: str, num_steps: int) -> Calls:
    """Train for some steps after one that compiles; return what was noted."""
    step = minigrad_step(size)
    step()
    with watching() as calls:
        for _ in range(num_steps):
            step()
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=list(SIZES))
    args = parser.parse_args()
    num_steps = NUM_STEPS[args.size]
    print(f"{args.size}, {num_steps} steps, one thread")
    for line in table(profiled(args.size, num_steps)):
        print(line)


if __name__ == "__main__":
    main()
