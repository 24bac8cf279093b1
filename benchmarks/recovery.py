"""Measure what surviving costs: a step where nobody dies, and the time from a kill until training goes on.

    make bench-recovery
    python benchmarks/recovery.py --log FILE --part vote        in parts of two minutes: adds what is measured to FILE,
    python benchmarks/recovery.py --log FILE --part copies      and reports all that is in it; --part kills too

All on two replicas of the GPT that `examples/train_gpt.py` trains by default. What surviving costs is measured within
one job: a plain loop and a loop of `recovering` take steps in turn, blocks of them where copies come now and then, so
that they meet the same clock and the same neighbours. The vote's own time, with what `commit` does besides the
optimizer's step, is that of the rank that came last, since the other one waits, as it would have in the next reduction.
In jobs with a kill rank 1 shoots itself in the middle of a backward; the kinds of jobs alternate.
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
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from pinned_workers import environment
from results_file import FOLDER, keep

from distributed import Communicator, DistributedDataParallel, SoloCommunicator, world
from distributed.data import TokenBatches
from distributed.recovery import Heal, recovering
from minigrad import Hooks, backward_with_hooks, cross_entropy
from minigrad.models import GPT, GPTConfig
from minigrad.optim import AdamW, Optimizer

BATCH, CONTEXT = 24, 64
NUM_STEPS, KILL_AT = 60, 20
COPY_EVERY = 10  # steps
NUM_ROUNDS = {"vote": 400, "copies": 36, "kills": 5}  # blocks of each loop; jobs of each kind
RESULTS = FOLDER / "recovery.txt"
COSTS = {"vote": ("ranks vote", 1, 0.01), "copies": ("and copy every 10 steps", COPY_EVERY, 0.03)}  # -> block, target
ITSELF = "the vote itself"
KILLS = {  # -> how ranks heal, spares, target in seconds
    "replaced": ("replace", 0, 3.0),
    "a spare steps in": ("spares", 1, 0.5),
    "goes on with fewer": ("shrink", 0, 0.5),
}
Log = list[tuple[str, list[float]]]  # (what, numbers)


def build(comm: Communicator, num_layers: int = GPTConfig.num_layers) -> Any:
    model = GPT(GPTConfig(context=CONTEXT, num_layers=num_layers))
    tokens = np.random.default_rng(0).integers(0, 256, 100_000)
    return SimpleNamespace(
        model=model,
        ddp=DistributedDataParallel(model, comm),
        optimizer=Optimizer(model.parameters(), AdamW(1e-3)),
        data=TokenBatches(tokens, batch_size=BATCH, context=CONTEXT, seed=0, rank=comm.rank, size=comm.size),
    )


def compute(training: Any, more: Hooks | None = None) -> None:
    """Do what of a step comes before the optimizer's."""
    x, y = training.data.next()
    training.optimizer.zero_grad()
    hooks = training.ddp.hooks(num_samples=len(x))
    backward_with_hooks(cross_entropy(training.model(x), y), hooks if more is None else hooks + more)
    training.ddp.wait()


def rehearse() -> None:
    """Take a step of one block by itself, as `examples/train_gpt.py` lets a spare do."""
    training = build(SoloCommunicator(), num_layers=1)
    compute(training)
    training.optimizer.step()


def plain_loop(comm: Communicator) -> Iterator[None]:
    training = build(comm)
    while True:
        compute(training)
        training.optimizer.step()
        yield


def surviving_loop(comm: Communicator, buddy_every: int, seconds: list[float]) -> Iterator[None]:
    """Train; note what each commit takes besides the optimizer's step."""
    stepped = 0.0

    def build_timed(comm: Communicator) -> Any:
        training = build(comm)
        step = training.optimizer.step

        def timed() -> None:
            nonlocal stepped
            start = time.perf_counter()
            step()
            stepped = time.perf_counter() - start

        training.optimizer.step = timed
        return training

    for attempt in recovering(comm, build_timed, num_steps=sys.maxsize, buddy_every=buddy_every):
        with attempt as training:
            compute(training)
            start = time.perf_counter()
            attempt.commit()
        seconds.append(time.perf_counter() - start - stepped)
        yield


def be_cost(part: str, num_rounds: int) -> None:
    """Let the loops have blocks in turn; rank 0 prints the seconds of each, by loop."""
    comm = world(survive=True)
    name, block, _ = COSTS[part]
    own: list[float] = []
    loops = [plain_loop(comm), surviving_loop(comm, COPY_EVERY if part == "copies" else 0, own)]
    seconds: list[list[float]] = [[] for _ in loops]
    for i in range(-1, num_rounds):
        for j in range(len(loops)):
            number = (i + j) % len(loops)
            start = time.perf_counter()
            for _ in range(block):
                next(loops[number])
            if i >= 0:
                seconds[number].append(time.perf_counter() - start)
    of_last = np.min(comm.gather_objects(own), axis=0)[block:].tolist()
    if comm.rank == 0:
        rows = list(zip([f"plain, {part}", name], seconds, strict=True))
        print(json.dumps([*rows, *([(ITSELF, of_last)] if part == "vote" else [])]), flush=True)


def be_kill(name: str) -> None:
    """Train; rank 0 prints the longest time from one finished step to the next, and how much of it was healing."""
    heal, num_spares, _ = KILLS[name]
    comm = world(survive=True)
    ends: list[float] = []
    recovery_seconds = 0.0
    victim = comm.rank == 1 and not comm.is_newcomer
    how: dict[str, Any] = {"heal": Heal(heal), "num_spares": num_spares, "rehearse": rehearse}
    for attempt in recovering(comm, build, num_steps=NUM_STEPS, **how):
        if attempt.recovery is not None:
            recovery_seconds = attempt.recovery.seconds
        with attempt as training:
            dies = victim and attempt.step == KILL_AT
            compute(training, Hooks(on_grad_ready=lambda _: os.kill(os.getpid(), signal.SIGKILL)) if dies else None)
            attempt.commit()
            ends.append(time.perf_counter())
    if ends and attempt.comm.rank == 0:
        print(json.dumps([[name, [float(np.diff(ends[KILL_AT // 2 :]).max()), recovery_seconds]]]), flush=True)


def run_job(num_ranks: int, *args: str) -> Log:
    job = [sys.executable, "-m", "distributed.recovery", "-n", str(num_ranks), __file__, *args]
    output = subprocess.run(job, check=True, stdout=subprocess.PIPE, text=True, env=environment()).stdout
    log: Log = json.loads(next(line for line in output.splitlines() if line.startswith("[")))
    return log


def measure(part: str, num_rounds: int) -> Iterator[Log]:
    if part in COSTS:
        yield run_job(2, "--job", part, "--rounds", str(num_rounds))
        return
    for _ in range(num_rounds):
        for name, (_, num_spares, _) in KILLS.items():
            yield run_job(2 + num_spares, "--job", name)


def report(log: Log) -> list[str]:
    """Return medians and targets: of costs those of differences between blocks, with a 95% interval."""
    lines = [
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}, "
        "float32, 2 ranks"
    ]
    taken = {
        name: np.array([each for what, row in log if what == name for each in row])
        for name in {what for what, _ in log}
    }
    for part, (name, block, target) in COSTS.items():
        if name not in taken:
            continue
        plain = taken[f"plain, {part}"] / block
        step = float(np.median(plain))
        lines.append(f"where nobody dies, a step of {1e3 * step:.1f} ms; {len(plain)} blocks of {block} steps in turn")
        lines.append(f"{'':<28}{'us a step':>10}{'95% interval':>18}{'share':>8}{'target':>8}")
        lines.append(cost_line(name, taken[name] / block - plain, step, target))
        if part == "vote":
            lines.append(cost_line(ITSELF, taken[ITSELF], step, target))
    rows = {name: np.array([row for what, row in log if what == name]) for name in KILLS}
    counts = {len(found) for found in rows.values()}
    if counts != {0}:
        lines.append(f"rank 1 is killed, medians of {min(counts)} jobs of {NUM_STEPS} steps")
        lines.append(f"{'':<28}{'s to go on':>10}{'healing':>18}{'target':>8}")
    for name, found in rows.items():
        if len(found):
            gap, heal = np.median(found, axis=0)
            target = KILLS[name][2]
            lines.append(f"{name:<28}{gap:>10.2f}{heal:>18.2f}{target:>8.2f}  {'met' if gap <= target else 'missed'}")
    return lines


def cost_line(name: str, seconds: Any, step: float, target: float) -> str:
    """Return the median of what a step of so many seconds takes more, its interval and what is said of it."""
    middle, low, high = median_of(seconds)
    verdict = "met" if high <= target * step else "missed" if low > target * step else "not settled"
    interval = f"{1e6 * low:.0f} to {1e6 * high:.0f}"
    return f"{name:<28}{1e6 * middle:>10.0f}{interval:>18}{middle / step:>8.1%}{target:>8.0%}  {verdict}"


def median_of(values: Any) -> tuple[float, float, float]:
    """Return the median, and order statistics around it between which the true one lies with 95%."""
    ordered = np.sort(values)
    reach = 0.98 * len(ordered) ** 0.5
    low, high = max(0, int(len(ordered) / 2 - reach)), min(len(ordered) - 1, int(np.ceil(len(ordered) / 2 + reach)))
    return statistics.median(ordered), float(ordered[low]), float(ordered[high])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help=f"blocks of each loop, or jobs of each kind (default: {NUM_ROUNDS})")
    parser.add_argument("--part", choices=NUM_ROUNDS, action="append", help="measure only this (default: all)")
    parser.add_argument("--log", type=Path, help="a file that what is measured is added to")
    parser.add_argument("--job", choices=[*COSTS, *KILLS], help="be one job of the comparison")
    args = parser.parse_args()
    if args.job in COSTS:
        be_cost(args.job, args.rounds)
    elif args.job is not None:
        be_kill(args.job)
    else:
        log: Log = json.loads(args.log.read_text()) if args.log is not None and args.log.exists() else []
        for part in args.part or NUM_ROUNDS:
            for rows in measure(part, args.rounds or NUM_ROUNDS[part]):
                log += rows
                if args.log is not None:
                    args.log.write_text(json.dumps(log) + "\n")
        lines = report(log)
        print("\n".join(lines))
        keep(lines, RESULTS, is_default=args.log is not None or (args.rounds is None and args.part is None))


if __name__ == "__main__":
    main()
