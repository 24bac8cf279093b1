"""Measure what surviving costs: a step where nobody dies, and the time from a kill until training goes on.

    make bench-recovery

Each job is its own run of this file with --job, on two replicas of the GPT that `examples/train_gpt.py` trains by
default; the kinds of jobs alternate. In the jobs with a kill rank 1 shoots itself in the middle of a backward.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one a rank; NumPy reads it when it loads

import argparse
import json
import platform
import signal
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from pinned_workers import environment
from results_file import FOLDER, keep

from distributed import Communicator, DistributedDataParallel, world
from distributed.data import TokenBatches
from distributed.recovery import Heal, recovering
from minigrad import Hooks, backward_with_hooks, cross_entropy
from minigrad.models import GPT, GPTConfig
from minigrad.optim import AdamW, Optimizer

BATCH, CONTEXT = 24, 64
NUM_STEPS, NUM_WARMUP_STEPS = 60, 10
KILL_AT = 20
RESULTS = FOLDER / "recovery.txt"
# name -> survive, heal, steps between two rounds of copies in a buddy's memory, spares, whether rank 1 is killed
JOBS: dict[str, tuple[bool, str, int, int, bool]] = {
    "ends with a death": (False, "replace", 0, 0, False),
    "survives": (True, "replace", 0, 0, False),
    "survives, copies every 10 steps": (True, "replace", 10, 0, False),
    "replaced": (True, "replace", 0, 0, True),
    "a spare steps in": (True, "spares", 0, 1, True),
    "goes on with fewer": (True, "shrink", 0, 0, True),
}
TARGETS = {
    "survives": 1.01,
    "survives, copies every 10 steps": 1.03,
    "replaced": 3.0,
    "a spare steps in": 0.5,
    "goes on with fewer": 0.5,
}


def build(comm: Communicator) -> Any:
    model = GPT(GPTConfig(context=CONTEXT))
    tokens = np.random.default_rng(0).integers(0, 256, 100_000)
    return SimpleNamespace(
        model=model,
        ddp=DistributedDataParallel(model, comm),
        optimizer=Optimizer(model.parameters(), AdamW(1e-3)),
        data=TokenBatches(tokens, batch_size=BATCH, context=CONTEXT, seed=0, rank=comm.rank, size=comm.size),
    )


def run_job(name: str) -> None:
    """Train; rank 0 prints the median step, and the longest time from one finished step to the next."""
    survive, heal, buddy_every, num_spares, is_killed = JOBS[name]
    comm = world(survive=survive)
    ends: list[float] = []
    recovery_seconds = 0.0
    victim = is_killed and comm.rank == 1 and not comm.is_newcomer
    how: dict[str, Any] = {"heal": Heal(heal), "buddy_every": buddy_every, "num_spares": num_spares}
    for attempt in recovering(comm, build, num_steps=NUM_STEPS, **how):
        if attempt.recovery is not None:
            recovery_seconds = attempt.recovery.seconds
        with attempt as training:
            x, y = training.data.next()
            training.optimizer.zero_grad()
            hooks = training.ddp.hooks(num_samples=len(x))
            if victim and attempt.step == KILL_AT:
                hooks += Hooks(on_grad_ready=lambda _: os.kill(os.getpid(), signal.SIGKILL))
            backward_with_hooks(cross_entropy(training.model(x), y), hooks)
            training.ddp.wait()
            attempt.commit()
            ends.append(time.perf_counter())
    if ends and attempt.comm.rank == 0:
        steps = np.diff(ends)
        result = {
            "step": float(np.median(steps[NUM_WARMUP_STEPS:])),
            "gap": float(steps.max()),
            "heal": recovery_seconds,
        }
        print(json.dumps(result), flush=True)


def measure(name: str) -> dict[str, float]:
    num_ranks = 2 + JOBS[name][3]
    job = [sys.executable, "-m", "distributed.recovery", "-n", str(num_ranks), __file__, "--job", name]
    output = subprocess.run(job, check=True, stdout=subprocess.PIPE, text=True, env=environment()).stdout
    result: dict[str, float] = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return result


def compare(num_runs: int, *, is_default: bool) -> None:
    """Run the jobs in turn; print medians, ratios and targets."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in JOBS}
    for _ in range(num_runs):
        for name in JOBS:
            results[name].append(measure(name))
    plain = [result["step"] for result in results["ends with a death"]]
    lines = [
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}, "
        f"float32, 2 ranks, medians of {num_runs} interleaved runs of {NUM_STEPS} steps",
        f"{'where nobody dies':<36}{'ms a step':>10}{'ratio':>8}{'target':>8}",
    ]
    for name, (_, _, _, _, is_killed) in JOBS.items():
        steps = [result["step"] for result in results[name]]
        if is_killed:
            gap = statistics.median(result["gap"] for result in results[name])
            heal = statistics.median(result["heal"] for result in results[name])
            verdict = "met" if gap <= TARGETS[name] else "missed"
            lines.append(f"{name:<36}{gap:>10.2f}{heal:>8.2f}{TARGETS[name]:>8.2f}  {verdict}")
            continue
        ratio = statistics.median(a / b for a, b in zip(steps, plain, strict=True))
        target = TARGETS.get(name)
        verdict = "" if target is None else f"{target:>8.2f}  {'met' if ratio <= target else 'missed'}"
        lines.append(f"{name:<36}{1e3 * statistics.median(steps):>10.1f}{ratio:>8.3f}{verdict}")
        if name == "survives, copies every 10 steps":
            lines.append(f"{'rank 1 is killed':<36}{'s to go on':>10}{'healing':>8}{'target':>8}")
    print("\n".join(lines))
    keep(lines, RESULTS, is_default=is_default)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each job (default: %(default)s)")
    parser.add_argument("--job", choices=JOBS, help="be one job of the comparison")
    args = parser.parse_args()
    if args.job is not None:
        run_job(args.job)
    else:
        compare(args.rounds, is_default=args.rounds == parser.get_default("rounds"))


if __name__ == "__main__":
    main()
