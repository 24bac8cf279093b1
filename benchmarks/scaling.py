"""Measure what a second data-parallel rank brings: one process against two, interleaved, medians of several runs.

    make bench-scaling

Each job is its own run of this file with --batch, so that no job inherits another's warm caches. The model is the GPT
of `examples/train_gpt.py` with its default sizes. Tokens a second are those of the median step.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one a rank; NumPy reads it when it loads

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time

import numpy as np
from pinned_workers import environment
from results_file import FOLDER, keep

from distributed import DistributedDataParallel, world
from minigrad import backward_with_hooks, cross_entropy
from minigrad.models import GPT, GPTConfig
from minigrad.optim import AdamW, Optimizer

BATCH = 24  # sequences for each rank
CONTEXT = 64
RESULTS = FOLDER / "scaling.txt"


def measure(batch: int, num_steps: int) -> None:
    """Train on random bytes, `batch` sequences over all ranks, and print the tokens a second of the median step."""
    comm = world()
    rows = np.array_split(np.random.default_rng(0).integers(0, 256, (batch, CONTEXT + 1)), comm.size)[comm.rank]
    model = GPT(GPTConfig(context=CONTEXT))
    ddp = DistributedDataParallel(model, comm)
    optimizer = Optimizer(model.parameters(), AdamW(1e-3))
    seconds = []
    for _ in range(num_steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = cross_entropy(model(rows[:, :-1]), rows[:, 1:])
        backward_with_hooks(loss, ddp.hooks(num_samples=len(rows)))
        ddp.wait()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    affinity = comm.gather_objects(sorted(os.sched_getaffinity(0)))
    if comm.rank == 0:
        print(json.dumps({"tokens_per_second": batch * CONTEXT / statistics.median(seconds), "affinity": affinity}))


def compare(launcher: list[str], num_runs: int, num_steps: int, *, is_default: bool) -> None:
    """Run the three jobs in turn and print medians, ratios and targets."""
    jobs = {
        "1 process": ([], BATCH),
        "2 ranks, same batch a rank": ([*launcher, "-n", "2"], 2 * BATCH),
        "2 ranks, same batch in all": ([*launcher, "-n", "2"], BATCH),
    }
    speeds: dict[str, list[float]] = {name: [] for name in jobs}
    affinity = ""
    for _ in range(num_runs):
        for name, (prefix, batch) in jobs.items():
            job = [*prefix, sys.executable, __file__, "--batch", str(batch), "--steps", str(num_steps)]
            output = subprocess.run(job, check=True, stdout=subprocess.PIPE, text=True, env=environment()).stdout
            result = json.loads(output.splitlines()[-1])
            speeds[name].append(result["tokens_per_second"])
            affinity = f"cores a rank may use: {result['affinity']}"
    alone = speeds["1 process"]
    targets = {"1 process": None, "2 ranks, same batch a rank": 1.6, "2 ranks, same batch in all": 1.0}
    lines = [
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}, "
        f"float32, {affinity}",
        f"medians of {num_runs} interleaved runs of {num_steps} steps",
        f"{'':<28}{'tokens/s':>10}{'ratio':>8}{'target':>9}",
    ]
    for name, target in targets.items():
        ratio = statistics.median(a / b for a, b in zip(speeds[name], alone, strict=True))
        verdict = "" if target is None else f"{target:>8.2f}x  {'met' if ratio >= target else 'missed'}"
        lines.append(f"{name:<28}{statistics.median(speeds[name]):>10,.0f}{ratio:>7.2f}x{verdict}")
    print("\n".join(lines))
    keep(lines, RESULTS, is_default=is_default)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", default="mpirun", help="the command that starts ranks, with its flags but -n")
    parser.add_argument("--rounds", type=int, default=5, help="of each job (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="of each run (default: %(default)s)")
    parser.add_argument("--batch", type=int, help="be one job of the comparison: measure this batch")
    args = parser.parse_args()
    if args.batch is not None:
        measure(args.batch, args.steps)
    else:
        is_default = (args.rounds, args.steps) == (parser.get_default("rounds"), parser.get_default("steps"))
        compare(args.launcher.split(), args.rounds, args.steps, is_default=is_default)


if __name__ == "__main__":
    main()
