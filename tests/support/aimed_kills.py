"""Kills aimed at every moment of a run, and the tally of how the runs end.

    python tests/support/aimed_kills.py --jobs 40 --log kills.jsonl     add so many jobs to a log
    python tests/support/aimed_kills.py --log kills.jsonl               print the table

Each job is of four ranks, which train the toy (`killed_job.py`) and save every five steps. They are killed six times or
so: twice at the moments whose turn it is, by themselves or as a pair, and always while they heal too. A job ends well
if its launcher returns 0 and all ranks have the weights, bit by bit, of a run that nobody was killed in; and if no
process of it is left.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from jobs import start
from killed_job import LOOP, SPANS, Shot
from toy_recovery import builder, digest, train

from distributed import LocalWorld
from distributed.comm.outcome import is_running

NUM_RANKS = 4
NUM_STEPS = 90
LIMIT_SECONDS = 240
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 4": {},
    "pp 4, 1f1b, buddies": {"pp": 4, "buddy_every": 5},
    "pp 4, zbv, buddies": {"pp": 4, "schedule": "zbv", "buddy_every": 5},
    "dp 2 x pp 2, 1f1b": {"pp": 2},
    "dp 2 x pp 2, zbv": {"pp": 2, "schedule": "zbv", "buddy_every": 10},
    "dp 4, zero 2, buddies": {"zero": 2, "buddy_every": 5},
    "dp 4, zero 1, buddies": {"zero": 1, "buddy_every": 5},
    "dp 4, int8, buddies": {"compress": "int8", "buddy_every": 5},
    "pp 4, v_half, buddies": {"pp": 4, "schedule": "v_half", "buddy_every": 5},
    "dp 2 x pp 2, v_half": {"pp": 2, "schedule": "v_half"},
    "dp 2 x pp 2, zero 2, shrinks": {"heal": "shrink", "pp": 2, "zero": 2, "exact": True, "buddy_every": 5},
    "dp 4, float16": {"precision": "float16"},
    "dp 4, shrinks": {"heal": "shrink", "exact": True},
    "dp 2 x pp 2, shrinks": {"heal": "shrink", "pp": 2, "exact": True},
    "dp 2, two spares": {"heal": "spares", "num_spares": 2, "exact": True},
    "pp 2, two spares": {"heal": "spares", "num_spares": 2, "pp": 2, "exact": True, "buddy_every": 5},
}
STEPS = (8, 24, 40, 56, 72)
"""Where a kill may come first: five times a job, with steps between to come back to a run that trains."""

AIMS = [phase for phase in SPANS if phase not in ("recovery", "newcomer")]


def plan(seed: int) -> list[Shot]:
    """Return the shots of a job: moments in turn, and every other time another kill while the ranks heal."""
    dice = random.Random(seed)
    shots = []
    for i, step in enumerate(STEPS):
        ranks = tuple(dice.sample(range(NUM_RANKS), 2 if (seed + i) % 4 == 0 else 1))
        if (seed + i) % 3 == 0:  # rank 0 commits a save, numbers the newcomers, prints
            ranks = tuple(dict.fromkeys((0, *ranks)))[: len(ranks)]
        shots.append(Shot(AIMS[(seed * len(STEPS) + i) % len(AIMS)], ranks, step))
        if (seed + i) % 3 == 1:
            others = [rank for rank in range(NUM_RANKS) if rank not in ranks]
            shots.append(Shot("recovery", (dice.choice(others),), step))
        elif (seed + i) % 6 == 2:
            shots.append(Shot("newcomer", (), step))
    return shots


def run(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run one job; return what became of it."""
    shots, layout = plan(seed), LAYOUTS[name]
    (folder / "plan.json").write_text(json.dumps([seed, shots]))
    script = str(Path(__file__).with_name("killed_job.py"))
    command = [sys.executable, "-m", "distributed.recovery", "-n", str(NUM_RANKS), script, str(folder)]
    began = time.monotonic()
    hung = False
    with start([*command, json.dumps(layout), str(NUM_STEPS)], folder, new_session=True) as job:
        try:
            output, errors = job.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            hung = True
            kill_all(job.pid, pids_in(folder))
            output, errors = job.communicate()
    lines = output.replace("\0", "").splitlines()
    digests = {tuple(json.loads(line)) for line in lines if line.startswith("[")}
    fired = [path.name.split("-") for path in folder.glob("fired-*")]
    by_shot = Counter(number for _, number, _, _ in fired)
    return {
        "layout": name,
        "seed": seed,
        "kills": Counter(phase for _, _, phase, _ in fired),
        "of rank 0": sum(rank == "0" for *_, rank in fired),
        "pairs": sum(count > 1 for count in by_shot.values()),
        "sources": Counter(line.removeprefix("healed from ") for line in lines if line.startswith("healed from ")),
        "restarts": errors.count("all ranks start again"),
        "code": job.returncode,
        "hung": hung,
        "orphans": sum(map(is_running, pids_in(folder))),
        "right": digests in undisturbed(name),
        "seconds": round(time.monotonic() - began, 1),
        "errors": errors[-3000:],
    }


def is_well(result: dict[str, Any]) -> bool:
    """Return whether a job ended as if nobody had been killed."""
    return bool(result["right"] and not result["hung"] and not result["orphans"] and result["code"] == 0)


@cache
def undisturbed(name: str) -> list[set[tuple[str, str]]]:
    """Return what ranks end with that nobody kills: threads, which add up in the same order.

    With exact sums what one rank alone ends with has the same bits, and they may be all in its hands at last.
    """
    layout = {key: value for key, value in LAYOUTS[name].items() if key not in LOOP}
    sizes = [NUM_RANKS - LAYOUTS[name].get("num_spares", 0), *([1] if layout.get("exact") else [])]
    runs = [LocalWorld(size).run(lambda comm: train(comm, builder(**layout), num_steps=NUM_STEPS)) for size in sizes]
    return [{digest(result[0]) for result in results} for results in runs]


def pids_in(folder: Path) -> Iterator[int]:
    return (int(path.name.removeprefix("process-")) for path in folder.glob("process-*"))


def kill_all(session: int, pids: Iterable[int]) -> None:
    """Kill what is left of a job: the launchers, by their group, and the ranks, which have groups of their own."""
    with suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)
    for pid in filter(is_running, pids):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def table(results: list[dict[str, Any]]) -> str:
    """Return the tally of some jobs."""
    lines = [f"{'layout':<24}{'jobs':>6}{'kills':>7}{'restarts':>10}{'as undisturbed':>16}{'hung':>6}{'orphans':>9}"]
    for name in [*LAYOUTS, "all"]:
        own = [result for result in results if name in ("all", result["layout"])]
        if own:
            kills = sum(sum(result["kills"].values()) for result in own)
            sums = [sum(int(result[what]) for result in own) for what in ("restarts", "hung", "orphans")]
            well = sum(map(is_well, own))
            lines.append(f"{name:<24}{len(own):>6}{kills:>7}{sums[0]:>10}{well:>16}{sums[1]:>6}{sums[2]:>9}")
    kills_by_phase: Counter[str] = sum((Counter(result["kills"]) for result in results), Counter())
    sources: Counter[str] = sum((Counter(result["sources"]) for result in results), Counter())
    lines += ["", "aimed at: " + ", ".join(f"{phase} {kills_by_phase[phase]}" for phase in SPANS)]
    of_rank_0, pairs = (sum(result[what] for result in results) for what in ("of rank 0", "pairs"))
    lines += [f"of them rank 0: {of_rank_0}; two at once: {pairs} times"]
    lines += ["state from: " + ", ".join(f"{source} {count}" for source, count in sources.most_common())]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=0, help="to run, each of the next layout (default: none)")
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="of the jobs (default: all in turn)")
    parser.add_argument("--seed", type=int, default=0, help="of the first job in the log (default: 0)")
    parser.add_argument("--log", type=Path, required=True, help="a line for each job")
    parser.add_argument("--keep", type=Path, help="also write the table here")
    args = parser.parse_args()
    names = args.layout or list(LAYOUTS)
    for _ in range(args.jobs):
        seed = args.seed + (len(args.log.read_text().splitlines()) if args.log.exists() else 0)
        folder = Path(tempfile.mkdtemp(prefix="kills-"))
        result = run(names[seed % len(names)], seed, folder)
        with args.log.open("a") as log:
            log.write(json.dumps(result) + "\n")
        if is_well(result):
            shutil.rmtree(folder)
        else:
            sys.stderr.write(f"{folder} has what is left of seed {seed}, which did not end well\n")
    text = table([json.loads(line) for line in args.log.read_text().splitlines()])
    sys.stdout.write(text + "\n")
    if args.keep is not None:
        args.keep.write_text(text + "\n")


if __name__ == "__main__":
    main()
