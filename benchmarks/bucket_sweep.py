"""Measure a data-parallel step over bucket sizes, and what `--bucket-mb auto` chooses among them, link by link.

    make bench-buckets
    make bench-buckets MINUTES=3    measure for so long, keep what was found, and say what is left for another call

The links are one host's memory, and what `two_hosts` makes of this machine, as root: see `bucket_sweep_job.py`, whose
sizes take turns in the same processes. A time is the median of steps, of the slower rank each; in brackets its
quartiles. Sizes that cut a model alike are one.

What is to be reached, on each link: the size that is chosen takes a step at most 2% longer than the best of all.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from ddp import TWO_HOSTS
from rank_jobs import run_job
from results_file import FOLDER, keep
from slow_link import processor

RESULTS = FOLDER / "bucket_sweep.txt"
UNFINISHED = Path("runs/bucket_sweep.json")  # what is measured, until all is
JOB = "bucket_sweep_job.py"
LINKS = {  # by name: what the job is started by, before mpirun, and how gradients travel
    "one host": ([], "plain"),
    "two hosts, 1 Gbit/s": ([TWO_HOSTS], "plain"),
    "two hosts, 100 Mbit/s": ([TWO_HOSTS, "--rate", "100mbit"], "plain"),
    "two hosts, 100 Mbit/s, int4": ([TWO_HOSTS, "--rate", "100mbit"], "int4"),
}
SECONDS = 140  # of a link
CHOICE_EXCESS = 0.02


def table(found: Mapping[str, Any]) -> Iterator[str]:
    """Set the sizes of one link beside each other; say whether the chosen one is among the best.

    Args:
        found: what the job has printed.
    """
    medians = {size: median(steps) for size, steps in found["seconds"].items()}
    best = min(medians, key=medians.__getitem__)
    for size, seconds in medians.items():
        low, _, high = quantiles(found["seconds"][size], n=4)
        marks = [mark for mark, it in (("best", best), ("chosen", found["chosen"])) if it == size]
        line = f"    {found['num_buckets'][size]:>3} buckets of {int(size) / 1024:>7,.0f} KiB {seconds * 1e3:>8.1f} ms"
        yield f"{line}  [{low * 1e3:.1f} {high * 1e3:.1f}]  {', '.join(marks)}".rstrip()
    excess = medians[found["chosen"]] / medians[best] - 1
    verdict = "met" if excess <= CHOICE_EXCESS else "missed"
    yield f"    {found['words']}"
    yield f"    over the best size: {excess:+.1%}, at most {CHOICE_EXCESS:.0%}: {verdict}"


def measure(launcher: Sequence[str], seconds: float) -> dict[str, Any]:
    """Go on with what is unfinished, at least by one link, at most for about so long."""
    start = time.perf_counter()
    found: dict[str, Any] = json.loads(UNFINISHED.read_text()) if UNFINISHED.exists() else {}
    for name, (hosts, hook) in LINKS.items():
        if name not in found:
            found[name] = run_job([*hosts, *launcher], JOB, hook, "--seconds", str(SECONDS))
            UNFINISHED.parent.mkdir(parents=True, exist_ok=True)
            UNFINISHED.write_text(json.dumps(found))
            if time.perf_counter() - start > seconds:
                break
    return found


def report(launcher: Sequence[str], seconds: float) -> Iterator[str]:
    """Measure; yield the lines, of what is known."""
    trial = subprocess.run([TWO_HOSTS, launcher[0], "--version"], capture_output=True, text=True, check=False)
    if "Open MPI" not in trial.stdout:
        yield f"two hosts: not measured: {trial.stderr.strip() or 'needs Open MPI'}"
        return
    found = measure(launcher, seconds)
    yield f"{processor()}; two ranks, nano-cpu, 12 sequences each; float32, one thread a rank"
    for name, of_link in found.items():
        yield name
        yield from table(of_link)
    if len(found) < len(LINKS):
        yield f"unfinished: the same command goes on with {UNFINISHED}"
    else:
        UNFINISHED.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", default="mpirun", help="the command that starts ranks, with its flags but -n")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of measuring (default: until all is measured)")
    args = parser.parse_args()
    lines = list(report(args.launcher.split(), 60 * args.minutes))
    print("\n".join(lines))
    keep(lines, RESULTS, is_default=True)


if __name__ == "__main__":
    main()
