"""Measure data parallelism over a slow link: two hosts of one core each, joined by 100 Mbit/s, method by method.

    make bench-slow-link
    make bench-slow-link MINUTES=3      measure for so long, keep what was found, and say what is left for another call

The hosts are made of this machine by `two_hosts`, as root. Every method trains the same GPT on the text that comes
with Python, with the same samples and the same learning rate: see `slow_link_job.py`. Speeds are of both ranks
together, of methods that take turns in the same processes, over whole periods of local steps, each between two turns
of steps that send nothing, of whose speed it is a share. Bytes are what a rank sends of gradients or weights. The
loss is that on text held back after 600 steps, of the weights that all ranks agree on; it does not hang on the link,
and is measured without. What changes it by a percent or less needs several seeds, of weights and samples: what it has
over plain gradients' is a mean over runs of the same seed, with the standard error of that.

The bound is what the wire alone allows, if all that computes took no longer: see `bound`.

What is to be reached, by one method: 90% of the tokens a second of a step that sends nothing, and a loss within 1% of
plain gradients'. The verdict counts a standard error as part of the loss.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from ddp import TWO_HOSTS
from rank_jobs import run_alone, run_job
from results_file import FOLDER, keep
from slow_link_job import BATCH_OF_A_RANK, CONFIG, METHODS, Method

RESULTS = FOLDER / "slow_link.txt"
UNFINISHED = Path("runs/slow_link")  # what is measured, until all is
RATE, BITS_A_SECOND = "100mbit", 100e6
JOB = "slow_link_job.py"
MEANINGS = {
    "alone": "nothing: ranks drift apart",
    "plain": "gradients as they are",
    "bfloat16": "gradients in bfloat16",
    "int8": "gradients in int8",
    "int4": "gradients in int4",
    "float4": "gradients in float4_e2m1fn",
    "powersgd": "PowerSGD, 4 columns",
    "topk": "top-k, a hundredth",
    "diloco": "DiLoCo, H = 30",
    "streaming": "streaming DiLoCo, H = 30",
    "mean": "mean of weights, H = 5",
    "mean_carried": "the same in int8, in the background",
}
NUM_ROUNDS = 3
NUM_SEEDS = {"plain": 4, "float4": 4, "int4": 2}  # of a loss, where one does not tell
NUM_STEPS = 600
PIECE_SECONDS = 80  # of a loss, before it saves and lets others have their turn
SPEED_SHARE = 0.90
LOSS_EXCESS = 0.01
FORWARD_SHARE = 1 / 3  # of a step's time: what comes before the first gradient

Found = dict[str, Any]


def bound(method: Method, bytes_a_step: float, step_seconds: float) -> float:
    """Return the largest share of the speed alone that the wire allows.

    A step's gradients can travel from the end of its forward on, and what local steps have learned in the steps of its
    delay; that encoding takes time, and that messages move only when a rank sees to it, is left out.

    Args:
        bytes_a_step: sent by each rank, which both can do at once.
        step_seconds: of a step that sends nothing.
    """
    wire = bytes_a_step * 8 / BITS_A_SECOND
    if method.every:
        apart = method.every / method.fragments  # steps from one agreement to the next
        exposed = max(0.0, wire * apart - method.delay * step_seconds) / apart
    else:
        exposed = max(0.0, wire - (1 - FORWARD_SHARE) * step_seconds)
    return step_seconds / (step_seconds + exposed)


def table(
    rounds: Sequence[Mapping[str, Sequence[float]]], sent: Mapping[str, float], losses: Mapping[str, Sequence[float]]
) -> Iterator[str]:
    """Set methods beside each other; say which of them reach both targets.

    Args:
        rounds: of each method, its tokens a second and those alone around it, round by round.
        losses: of each method, seed by seed.
    """
    titles = f"{'tokens/s':>10}{'of alone':>10}{'bound':>8}{'bytes a step':>14}{'loss':>8}{'over plain':>16}"
    yield f"{'what travels':<38}{titles}"
    reached = []
    alone = median(turn["alone"][0] for turn in rounds)
    step_seconds = 2 * BATCH_OF_A_RANK * CONFIG.context / alone
    for method, num_bytes in sent.items():
        speed = median(turn[method][0] for turn in rounds)
        share = median(turn[method][0] / turn[method][1] for turn in rounds)
        most = bound(METHODS[method], num_bytes, step_seconds)
        line = f"{MEANINGS[method]:<38}{speed:>10,.0f}{share:>10.0%}{most:>8.0%}{num_bytes:>14,.0f}"
        if losses.get(method) and losses.get("plain"):
            excess, error = mean_excess(losses[method], losses["plain"])
            deviation = "" if error is None else f" +- {error:.1%}"
            line += f"{fmean(losses[method]):>8.3f}{f'{excess:+.1%}{deviation}':>16}"
            if share >= SPEED_SHARE and excess + (error or 0.0) <= LOSS_EXCESS:
                reached.append(MEANINGS[method])
        yield line
    verdict = f"met by {'; '.join(reached)}" if reached else "missed"
    yield f"at least {SPEED_SHARE:.0%} of the speed alone, and a loss at most {LOSS_EXCESS:.0%} over plain: {verdict}"


def mean_excess(losses: Sequence[float], plain: Sequence[float]) -> tuple[float, float | None]:
    """Return how far losses are above plain ones, as a share of these, and the standard error: None of one seed."""
    excesses = [ours / theirs - 1 for ours, theirs in zip(losses, plain, strict=False)]
    return fmean(excesses), stdev(excesses) / math.sqrt(len(excesses)) if len(excesses) > 1 else None


def next_piece(found: Found, num_rounds: int) -> list[str] | None:
    """Return the arguments of the next job, None where all is measured."""
    if len(found["rounds"]) < num_rounds:
        return ["speed", *METHODS]
    for seed in range(max(NUM_SEEDS.values())):
        for name in METHODS:
            if name != "alone" and len(found["losses"].get(name, ())) <= seed < NUM_SEEDS.get(name, 1):
                where = ["--seed", str(seed), "--folder", str(UNFINISHED / "checkpoints")]
                return ["loss", name, *where, "--steps", str(NUM_STEPS), "--seconds", str(PIECE_SECONDS)]
    return None


def measure(launcher: Sequence[str], num_rounds: int, seconds: float) -> Found:
    """Go on with what is unfinished, at least by one piece, at most for about so long."""
    start = time.perf_counter()
    kept = UNFINISHED / "found.json"
    found: Found = json.loads(kept.read_text()) if kept.exists() else {"rounds": [], "bytes": {}, "losses": {}}
    while (piece := next_piece(found, num_rounds)) is not None:
        what, name, *_ = piece
        if what == "speed":
            result = run_job([TWO_HOSTS, "--rate", RATE, *launcher], JOB, *piece)
            found["rounds"].append(result["speeds"])
            found["bytes"] = result["bytes"]
        elif (loss := run_alone(JOB, *piece)["loss"]) is not None:
            found["losses"].setdefault(name, []).append(loss)
        UNFINISHED.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found))
        if time.perf_counter() - start > seconds:
            break
    return found


def report(launcher: Sequence[str], num_rounds: int, seconds: float) -> Iterator[str]:
    """Measure; yield the lines, of what is known."""
    trial = subprocess.run([TWO_HOSTS, launcher[0], "--version"], capture_output=True, text=True, check=False)
    if "Open MPI" not in trial.stdout:
        yield f"two hosts: not measured: {trial.stderr.strip() or 'needs Open MPI'}"
        return
    found = measure(launcher, num_rounds, seconds)
    libraries = ", ".join(f"{name} {version(name)}" for name in ("numpy", "mpi4py"))
    yield f"{processor()}; {libraries}; float32, one thread a rank; load {os.getloadavg()[0]:.1f} at the end"
    yield f"two hosts, {RATE}; medians of {len(found['rounds'])} rounds of 30 steps; losses after {NUM_STEPS} steps"
    several = [f"{len(losses)} of {MEANINGS[name]}" for name, losses in found["losses"].items() if len(losses) > 1]
    yield f"seeds of a loss: {', '.join([*several, '1 of each other'])}"
    yield from table(found["rounds"], found["bytes"], found["losses"])
    if next_piece(found, num_rounds) is not None:
        yield f"unfinished: the same command goes on with {UNFINISHED}"
    else:
        shutil.rmtree(UNFINISHED)


def processor() -> str:
    """Return the name of this machine's processor, where it is known."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", default="mpirun", help="the command that starts ranks, with its flags but -n")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="of speeds (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of measuring (default: until all is measured)")
    args = parser.parse_args()
    lines = list(report(args.launcher.split(), args.rounds, 60 * args.minutes))
    print("\n".join(lines))
    keep(lines, RESULTS, is_default=args.rounds == NUM_ROUNDS)


if __name__ == "__main__":
    main()
