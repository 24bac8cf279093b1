"""Measure data parallelism beside PyTorch's DistributedDataParallel over gloo: two ranks on one host, and on two.

    make bench-ddp

The two hosts are made of this machine by `two_hosts`, as root: one core each, joined by a cable of 1 Gbit/s. Each job
is a run of `ddp_minigrad.py` or `ddp_torch.py`. On one host both run at once and take turns of a few steps, so that
neighbours meet both alike; of two hosts there is one pair, where they alternate. A figure is the median over several
rounds, with the smallest and the largest in brackets.

On one host minigrad's gradients lie in memory that both ranks see, and gloo's travel over TCP; between hosts both use
TCP. PyTorch's DDP runs with gradient_as_bucket_view, static_graph, fused AdamW and buckets of several sizes; the best
size counts. Both loops are a forward, a backward and a step; our trainers take the norm of all gradients besides, which
has a line of its own. The whole machine: what a user would choose, a rank a core against one process with all threads.

Hidden is the part of the messages' own time by which a step does not get longer: 1 - (inside - alone) / messages. Its
bound is what is possible for these buckets if they travel one after the other, each from when it is ready, less the
CPU time of the transfer, which the only core of a host cannot give to the backward too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

from ddp_bound import exposed_seconds
from engine_jobs import BATCH, SIZES
from pinned_workers import interleave, once
from rank_jobs import NUM_RANKS, Job, Result, free_port, in_turns
from results_file import FOLDER, keep

RESULTS = FOLDER / "ddp.txt"
Report = Callable[[Sequence[str], int], Iterator[str]]  # (launcher, rounds) -> lines
TWO_HOSTS = str(Path(__file__).with_name("two_hosts"))
MLP_BATCH = 128  # over both ranks
TURNS = {"nano-cpu": 6, "baby": 2, "mlp": 200}
STEPS = {"nano-cpu": 4, "baby": 2, "mlp": 4}  # of a turn
MEBIBYTES = {"nano-cpu": (25, 1), "baby": (25, 4)}  # of DDP's buckets, on one host
TWO_HOSTS_MEBIBYTES = (25, 1, 0.5, 0.25)

SPEED_RATIO = {"nano-cpu": 1.25, "baby": 1.25}  # targets: over PyTorch's, on one host
MACHINE_RATIO = {"nano-cpu": 1.3, "baby": 1.2}  # over one process of PyTorch's with all threads
TWO_HOSTS_SPEED_RATIO = 1.25
HIDDEN_PERCENT = 80.0
SHARDED_RATIO = 1.03  # of a step with shards over one without, on one host
LOOPS = {  # of ours, on one host; a step of baby takes seconds
    "nano-cpu": ("plain", "zero1", "zero2", "joined", "uneven", "inside"),
    "baby": ("plain", "zero1", "zero2"),
}
MLP_SAMPLES_PER_SECOND = 35_000.0

VARIANTS = {
    "inside": "a step that reduces inside the backward",
    "after": "a step that reduces after the backward",
    "alone": "a step that reduces nothing",
    "messages": "the messages alone",
    "apart": "the messages alone, one by one",
    "asleep": "the messages alone, to a process that sleeps",
}


@dataclass(frozen=True)
class Line:
    """One line of the report.

    Attributes:
        values: one a round.
        target: the smallest median that meets it, if there is one.
        limit: the largest one.
    """

    what: str
    values: Sequence[float]
    unit: str
    target: float | None = None
    limit: float | None = None

    def __str__(self) -> str:
        digits = {"ms": 1, "x": 2, "points": 1}.get(self.unit, 0)
        middle, low, high = (f"{v:,.{digits}f}" for v in (median(self.values), min(self.values), max(self.values)))
        line = f"{self.what:<60}{middle:>8} {self.unit:<10}{f'[{low} {high}]':<18}"
        if self.target is not None:
            verdict = "met" if median(self.values) >= self.target else "missed"
            line += f">= {self.target:,.{digits}f} {self.unit}  {verdict}"
        if self.limit is not None:
            verdict = "met" if median(self.values) <= self.limit else "missed"
            line += f"<= {self.limit:,.{digits}f} {self.unit}  {verdict}"
        return line.rstrip()


class Host:
    """Where jobs run.

    Args:
        launcher: the command that starts ranks, with its flags but -n.
    """

    def __init__(self, launcher: Sequence[str]) -> None:
        self._launcher = list(launcher)

    def minigrad(self, size: str, batch: int, variants: Sequence[str] = ("inside",)) -> Job:
        return self._job("ddp_minigrad.py", size, batch, "--variants", *variants)

    def torch(self, size: str, batch: int, mebibytes: Sequence[float]) -> Job:
        buckets = map(str, mebibytes)
        return self._job("ddp_torch.py", size, batch, "--port", str(free_port()), "--mebibytes", *buckets)

    def _job(self, script: str, size: str, batch: int, *flags: str) -> Job:
        return Job((*self._launcher, "-n", str(NUM_RANKS)), script, (*_training(size, batch), *flags))


def _training(size: str, batch: int) -> list[str]:
    return [size, "--batch", str(batch), "--turns", str(TURNS[size]), "--steps", str(STEPS[size])]


def one_process(size: str) -> Job:
    """Train in one process of PyTorch's, with a thread a core and the batch of all ranks."""
    threads = str(os.cpu_count())
    return Job((), "ddp_torch.py", (*_training(size, NUM_RANKS * BATCH[size]), "--threads", threads), threads)


def seconds(results: Sequence[Result], variant: str) -> list[float]:
    """Return the median step of each round."""
    return [median(result["seconds"][variant]) for result in results]


def columns(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the median of each column."""
    return [median(column) for column in zip(*rows, strict=True)]


def compare(size: str, ours: Sequence[Result], theirs: Sequence[Result], target: float) -> Iterator[Line]:
    """Compare tokens a second, round by round, of a step without a norm with the best size of PyTorch's buckets."""
    speeds = [tokens(size) / s for s in seconds(ours, "plain")]
    peers = {name: [tokens(size) / s for s in seconds(theirs, name)] for name in theirs[0]["seconds"]}
    yield Line(f"{size}: minigrad", speeds, "tokens/s")
    for name, values in peers.items():
        yield Line(f"{size}: PyTorch DDP, buckets of {name}", values, "tokens/s")
    best = max(peers, key=lambda name: median(peers[name]))
    ratios = [ours / theirs for ours, theirs in zip(speeds, peers[best], strict=True)]
    yield Line(f"{size}: minigrad / PyTorch DDP with {best}", ratios, "x", target)


def tokens(size: str) -> int:
    """Return how many all ranks together train on in a step."""
    return NUM_RANKS * BATCH[size] * SIZES[size]["context"]


def products(size: str, num_rounds: int) -> Line:
    """Compare the matrix products of a step alone, on one core: what is the BLAS's doing."""
    jobs = {"gemm": ("step", "gemm", size), "torch-gemm": ("step", "torch-gemm", size)}
    taken = interleave(jobs, num_rounds=num_rounds, num_turns=3)
    ratios = [theirs / ours for ours, theirs in zip(taken["gemm"], taken["torch-gemm"], strict=True)]
    return Line(f"{size}: the matrix products alone, NumPy / PyTorch", ratios, "x")


def overlap(what: str, results: Sequence[Result], target: float | None = None) -> Iterator[Line]:
    """Say how much of the messages a step hides, and what it gains from that."""
    taken = {variant: seconds(results, variant) for variant in VARIANTS}
    for variant, meaning in VARIANTS.items():
        yield Line(f"{what}: {meaning}", [1e3 * s for s in taken[variant]], "ms")
    steps = zip(taken["inside"], taken["alone"], taken["messages"], strict=True)
    yield Line(f"{what}: hidden", [100 * (1 - (inside - alone) / own) for inside, alone, own in steps], "%", target)
    bounds = [
        1 - exposed_seconds(columns(r["ready"]), columns(r["transfers"]), median(r["cpu"])) / own
        for r, own in zip(results, taken["messages"], strict=True)
    ]
    yield Line(f"{what}: hidden, bound", [100 * bound for bound in bounds], "%")
    gains = [after / inside for after, inside in zip(taken["after"], taken["inside"], strict=True)]
    yield Line(f"{what}: gain over reducing after the backward", gains, "x")


def turns(results: Sequence[Result], variant: str, steps_a_turn: int) -> list[float]:
    """Return the median step of each turn, of all rounds."""
    steps = [result["seconds"][variant] for result in results]
    return [median(own[i : i + steps_a_turn]) for own in steps for i in range(0, len(own), steps_a_turn)]


def shards(size: str, results: Sequence[Result]) -> Iterator[Line]:
    """Say what shards cost in time, turn by turn, and what is left of the bytes of weights, gradients and state."""
    yield Line(f"{size}: a step without a norm", [1e3 * s for s in seconds(results, "plain")], "ms")
    plain = turns(results, "plain", STEPS[size])
    for level in (1, 2):
        own = turns(results, f"zero{level}", STEPS[size])
        ratios = [mine / theirs for mine, theirs in zip(own, plain, strict=True)]
        yield Line(f"{size}: ZeRO-{level} / without shards, by turns", ratios, "x", limit=SHARDED_RATIO)
        kept = [result["bytes"][f"zero{level}"] / result["bytes"]["plain"] for result in results]
        yield Line(f"{size}: ZeRO-{level}, bytes / without shards", kept, "x")


def joins(size: str, results: Sequence[Result]) -> Iterator[Line]:
    """Say what it costs that ranks may have different numbers of batches."""
    plain, joined, uneven = (seconds(results, name) for name in ("plain", "joined", "uneven"))
    asked = [mine / theirs for mine, theirs in zip(joined, plain, strict=True)]
    yield Line(f"{size}: a step in ddp.join / without", asked, "x")
    alone = [mine / theirs for mine, theirs in zip(uneven, joined, strict=True)]
    yield Line(f"{size}: likewise, one rank has samples / both have", alone, "x")


def early(size: str, results: Sequence[Result]) -> Iterator[Line]:
    """Say how much of the messages is hidden where the step begins before all buckets are there."""
    for variant in ("plain", "early"):
        steps = zip(*(seconds(results, name) for name in (variant, "alone", "messages")), strict=True)
        hidden = [100 * (1 - (own - alone) / messages) for own, alone, messages in steps]
        yield Line(f"{size}: hidden, {variant} step without a norm", hidden, "%")


def matching_batch(size: str, result: Result) -> int:
    """Return the batch whose backward takes about as long as the messages."""
    backward = columns(result["ready"])[-1]  # the last bucket is launched at its end
    return max(1, round(BATCH[size] * median(result["seconds"]["messages"]) / backward))


def one_host(host: Host, num_rounds: int) -> Iterator[str]:
    """Measure two ranks on this machine as it is."""
    for size in ("nano-cpu", "baby"):
        ours: list[Result] = []
        theirs: list[Result] = []
        alone: list[Result] = []
        for _ in range(num_rounds):
            mine = host.minigrad(size, BATCH[size], LOOPS[size])
            peer = host.torch(size, BATCH[size], MEBIBYTES[size])
            for results, result in zip((ours, theirs, alone), in_turns(mine, peer, one_process(size)), strict=True):
                results.append(result)
        if size == "nano-cpu":
            yield f"two ranks on one host; cores that a rank may use: {ours[0]['affinity']}, {theirs[0]['affinity']}"
        yield from map(str, compare(size, ours, theirs, SPEED_RATIO[size]))
        yield str(products(size, num_rounds))
        yield from map(str, shards(size, ours))
        if "inside" in LOOPS[size]:
            trainer = [tokens(size) / s for s in seconds(ours, "inside")]
            yield str(Line(f"{size}: minigrad's trainer, which takes a norm", trainer, "tokens/s"))
            yield from map(str, joins(size, ours))
        whole = [tokens(size) / s for s in seconds(alone, "torch")]
        yield str(Line(f"{size}: one PyTorch process, {os.cpu_count()} threads", whole, "tokens/s"))
        ratios = [tokens(size) / s / peer for s, peer in zip(seconds(ours, "plain"), whole, strict=True)]
        yield str(Line(f"{size}: minigrad / one PyTorch process", ratios, "x", MACHINE_RATIO[size]))
    mlp = [host.minigrad("mlp", MLP_BATCH // NUM_RANKS).result() for _ in range(num_rounds)]
    speeds = [MLP_BATCH / s for s in seconds(mlp, "inside")]
    yield str(Line(f"MLP, batch {MLP_BATCH} in all: minigrad", speeds, "samples/s", MLP_SAMPLES_PER_SECOND))


def two_hosts(host: Host, num_rounds: int) -> Iterator[str]:
    """Measure two hosts of one core each."""
    size = "nano-cpu"
    ours, theirs = [], []
    for _ in range(num_rounds):
        ours.append(host.minigrad(size, BATCH[size], (*VARIANTS, "plain", "early")).result())
        theirs.append(host.torch(size, BATCH[size], TWO_HOSTS_MEBIBYTES).result())
    batch = matching_batch(size, ours[0])
    matched = host.minigrad(size, batch, tuple(VARIANTS)).result()
    yield f"two hosts, 1 Gbit/s; cores that a rank may use: {ours[0]['affinity']}, {theirs[0]['affinity']}"
    yield from map(str, compare(size, ours, theirs, TWO_HOSTS_SPEED_RATIO))
    yield from map(str, overlap(size, ours, HIDDEN_PERCENT))
    yield from map(str, overlap(f"{size}, batch {batch}", [matched]))
    yield from map(str, early(size, ours))
    yield "fewer bytes over 100 Mbit/s: make bench-slow-link"


def header() -> Iterator[str]:
    """Say what machine and what libraries were measured."""
    yield from once(["machine"])
    yield (
        f"mpi4py {version('mpi4py')}; float32, AdamW, one thread a rank, glibc keeps freed memory; "
        f"load {os.getloadavg()[0]:.1f} when it began"
    )


def report(launcher: Sequence[str], num_rounds: int) -> Iterator[str]:
    """Measure everything; yield the lines as they are known."""
    yield from header()
    yield f"medians of {num_rounds} rounds, the smallest and the largest in brackets"
    yield from one_host(Host(launcher), num_rounds)
    trial = subprocess.run([TWO_HOSTS, launcher[0], "--version"], capture_output=True, text=True, check=False)
    if "Open MPI" in trial.stdout:
        yield from two_hosts(Host([TWO_HOSTS, *launcher]), num_rounds)
    else:
        yield f"two hosts: not measured: {trial.stderr.strip() or 'needs Open MPI'}"


def run(description: str | None, report: Report, results: Path, *, rounds: int) -> None:
    """Read the command line, print a report line by line, and keep it in a file."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", default="mpirun", help="the command that starts ranks, with its flags but -n")
    parser.add_argument("--rounds", type=int, default=rounds, help="of new processes (default: %(default)s)")
    args = parser.parse_args()
    start = time.perf_counter()
    lines = []
    for line in report(args.launcher.split(), args.rounds):
        print(line, flush=True)
        lines.append(line)
    lines.append(f"took {(time.perf_counter() - start) / 60:.0f} minutes")
    print(lines[-1])
    keep(lines, results, is_default=args.rounds == rounds)


if __name__ == "__main__":
    run(__doc__, report, RESULTS, rounds=2)
