"""Measure data parallelism over a slow link: two hosts of one core each, joined by 100 Mbit/s, method by method.

    make bench-slow-link

The hosts are made of this machine by `two_hosts`, as root. Every method trains the same GPT on the text that comes with
Python, with the same samples and the same learning rate: see `slow_link_job.py`. Speeds are of both ranks together,
methods taking turns in the same processes, over whole periods of local steps. Bytes are what a rank sends of gradients
or weights. The loss is that on text held back after 600 steps, of the weights that all ranks agree on; it does not hang
on the link, and is measured without.

What is to be reached, by one method: 90% of the tokens a second of a step that sends nothing, and a loss within 1% of
plain gradients'.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from ddp import TWO_HOSTS, Result, header, run, run_job
from results_file import FOLDER

RESULTS = FOLDER / "slow_link.txt"
RATE = "100mbit"
JOB = "slow_link_job.py"
MEANINGS = {
    "alone": "nothing: ranks drift apart",
    "plain": "gradients as they are",
    "bfloat16": "gradients in bfloat16",
    "int8": "gradients in int8",
    "float8_e4m3fn": "gradients in float8",
    "powersgd": "PowerSGD, 4 columns",
    "topk": "top-k, a hundredth",
    "local_10": "local steps, H = 10",
    "local_30": "local steps, H = 30",
    "streaming_30": "streaming, H = 30",
}
SPEED_SHARE = 0.90
LOSS_EXCESS = 0.01


def measured_speeds(launcher: Sequence[str], num_rounds: int, methods: Sequence[str] = tuple(MEANINGS)) -> Result:
    """Measure tokens a second over the slow link, and bytes a step."""
    slow = [TWO_HOSTS, "--rate", RATE, *launcher]
    return run_job(slow, JOB, "speed", "--rounds", str(num_rounds), "--methods", *methods)


def measured_losses(launcher: Sequence[str]) -> dict[str, float]:
    """Measure validation losses, a method at a time."""
    losses: dict[str, float] = {}
    for method in MEANINGS:
        if method != "alone":
            losses |= run_job(launcher, JOB, "loss", "--methods", method)["losses"]
    return losses


def table(
    speeds: Mapping[str, Sequence[float]], sent: Mapping[str, float], losses: Mapping[str, float]
) -> Iterator[str]:
    """Set methods beside each other; say which of them reach both targets."""
    yield f"{'what travels':<30}{'tokens/s':>10}{'of alone':>10}{'bytes a step':>14}{'loss':>8}{'over plain':>12}"
    reached = []
    for method, values in speeds.items():
        share = median(values) / median(speeds["alone"])
        line = f"{MEANINGS[method]:<30}{median(values):>10,.0f}{share:>10.0%}{sent[method]:>14,.0f}"
        if method in losses:
            excess = losses[method] / losses["plain"] - 1
            line += f"{losses[method]:>8.3f}{excess:>+12.1%}"
            if share >= SPEED_SHARE and excess <= LOSS_EXCESS:
                reached.append(MEANINGS[method])
        yield line
    verdict = f"met by {'; '.join(reached)}" if reached else "missed"
    yield f"at least {SPEED_SHARE:.0%} of the speed alone, and a loss at most {LOSS_EXCESS:.0%} over plain: {verdict}"


def report(launcher: Sequence[str], num_rounds: int) -> Iterator[str]:
    """Measure everything; yield the lines as they are known."""
    yield from header()
    trial = subprocess.run([TWO_HOSTS, launcher[0], "--version"], capture_output=True, text=True, check=False)
    if "Open MPI" not in trial.stdout:
        yield f"two hosts: not measured: {trial.stderr.strip() or 'needs Open MPI'}"
        return
    fast = measured_speeds(launcher, num_rounds)
    yield f"two hosts, {RATE}; medians of {num_rounds} rounds of 30 steps; losses after 600 steps"
    yield from table(fast["speeds"], fast["bytes"], measured_losses(launcher))


if __name__ == "__main__":
    run(__doc__, report, RESULTS, rounds=3)
