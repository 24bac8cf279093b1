"""Measure minigrad beside PyTorch, in the same run: a GPT's step, a tiny op, the import, memory, recomputation.

    make bench-engine

Peers take turns on one core (`pinned_workers.py`), in new processes each round. A ratio is the median over pairs of
neighbouring turns, with the 10% and 90% quantiles in brackets. Times are CPU times. The rival is the fastest of three
ways to run PyTorch: eagerly, with fused AdamW, compiled. Which library is faster depends on the BLAS of each, so the
matrix products alone are measured too. Both have the same settings of malloc.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from engine_jobs import CHAIN
from pinned_workers import interleave, once
from results_file import FOLDER, keep

RESULTS = FOLDER / "engine.txt"

STEP_RATIO = {"nano-cpu": 0.78, "baby": 0.84}  # targets: minigrad's step over PyTorch's
PRODUCTS_RATIO = {"nano-cpu": 1.20, "baby": 1.13}  # over its own matrix products
# A processor's clock counts in both: what a chain of tiny products takes over the same in bare NumPy, and what
# `import minigrad` takes over `import numpy`.
TAPE_RATIO = 3.5
IMPORT_RATIO = 0.5
MEMORY_RATIO = 0.85

ENGINES = {
    "minigrad": "minigrad",
    "minigrad-exact": "minigrad, exact GELU",
    "minigrad-recompute": "minigrad, blocks recomputed",
    "gemm": "the matrix products in NumPy",
    "torch": "PyTorch",
    "torch-fused": "PyTorch, fused AdamW",
    "torch-exact": "PyTorch, exact GELU",
    "torch-compile": "PyTorch, compiled",
    "torch-gemm": "the matrix products in PyTorch",
}
RIVALS = {"torch", "torch-fused", "torch-compile"}  # ways to the same result: the best one counts
COMPARISONS = [  # beside the ones with targets
    ("minigrad-exact", "torch-exact"),
    ("torch", "torch-gemm"),
    ("gemm", "torch-gemm"),
    ("minigrad-recompute", "minigrad"),
]
DIGITS = {"": 0, "x": 2, "ms": 1, "us": 1, "MiB": 0, "GiB": 2, "nats": 4, "k": 0}  # of each unit
NUM_TURNS = {"nano-cpu": 8, "baby": 3}  # of each round


@dataclass(frozen=True)
class Line:
    """One line of the report.

    Attributes:
        target: the largest value that meets it, if there is one.
        spread: the 10% and 90% quantiles.
    """

    what: str
    measured: float
    unit: str
    target: float | None = None
    spread: tuple[float, float] | None = None

    def __str__(self) -> str:
        digits = DIGITS[self.unit]
        spread = f"[{self.spread[0]:.2f} {self.spread[1]:.2f}]" if self.spread else ""
        line = f"{self.what:<60}{self.measured:>9,.{digits}f} {self.unit:<5}{spread:<14}"
        if self.target is not None:
            verdict = "met" if self.measured <= self.target else "missed"
            line += f"<= {self.target:.{digits}f} {self.unit:<5}{verdict}"
        return line.rstrip()


def ratio(what: str, ours: Sequence[float], theirs: Sequence[float], target: float | None = None) -> Line:
    """Compare two series pair by pair."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    tenths = quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else ratios
    return Line(what, median(ratios), "x", target, (tenths[0], tenths[-1]))


def steps(size: str, engines: Sequence[str], num_rounds: int) -> Iterator[Line]:
    """Time a training step of a GPT."""
    jobs = {engine: ("step", engine, size) for engine in engines}
    seconds = interleave(jobs, num_rounds=num_rounds, num_turns=NUM_TURNS[size])
    for engine, values in seconds.items():
        yield Line(f"{size}, a step: {ENGINES[engine]}", 1e3 * median(values), "ms")
    rival = min(RIVALS & seconds.keys(), key=lambda engine: median(seconds[engine]))
    yield ratio(f"{size}: minigrad / {ENGINES[rival]}", seconds["minigrad"], seconds[rival], STEP_RATIO[size])
    yield ratio(f"{size}: minigrad / {ENGINES['gemm']}", seconds["minigrad"], seconds["gemm"], PRODUCTS_RATIO[size])
    for a, b in COMPARISONS:
        if a in seconds and b in seconds:
            yield ratio(f"{size}: {ENGINES[a]} / {ENGINES[b]}", seconds[a], seconds[b])


def tape(num_rounds: int) -> Iterator[Line]:
    """Time a chain of tiny products."""
    names = {"numpy": "bare NumPy", "minigrad": "minigrad", "torch": "PyTorch"}
    seconds = interleave({name: ("chain", name) for name in names}, num_rounds=num_rounds, num_turns=5)
    for name, values in seconds.items():
        yield Line(f"a tiny product, record + backward: {names[name]}", 1e6 * median(values), "us")
    over = [1e6 * (ours - bare) for ours, bare in zip(seconds["minigrad"], seconds["numpy"], strict=True)]
    yield Line(f"the tape: minigrad over bare NumPy, {CHAIN} in a chain", median(over), "us")
    relative = [(ours - bare) / bare for ours, bare in zip(seconds["minigrad"], seconds["numpy"], strict=True)]
    yield Line("the tape over the bare product", median(relative), "x", TAPE_RATIO)


def imports(num_runs: int) -> Iterator[Line]:
    """Time the import, in new processes; the first one may compile and does not count."""
    answers = [once(["import"]) for _ in range(num_runs + 1)][1:]
    ours, numpy = (median(answer[name] for answer in answers) for name in ("seconds", "numpy"))
    yield Line("import minigrad over import numpy", 1e3 * ours, "ms")
    yield Line("import minigrad / import numpy", ours / numpy, "x", IMPORT_RATIO)
    yield Line("import minigrad: modules of mpi4py loaded", max(a["mpi"] for a in answers), "", 0)


def first_steps(size: str, engines: Sequence[str], num_runs: int) -> Iterator[Line]:
    """Time new processes until their first step is done, imports included. What is compiled once a machine is there."""
    for engine in engines:
        values = [once(["first", engine, size]) for _ in range(num_runs + 1)][1:]
        yield Line(f"{size}, imports and the first step: {ENGINES[engine]}", 1e3 * median(values), "ms")


def memory() -> Iterator[Line]:
    """Compare the peak memory of a step and what recomputation saves, in new processes."""
    rivals = sorted(RIVALS - {"torch-compile"})  # whose compiler's own memory would count
    peaks = {e: once(["memory", e, "baby"]) / 2**20 for e in ("minigrad", "minigrad-recompute", *rivals)}
    for engine, peak in peaks.items():
        yield Line(f"baby, peak memory: {ENGINES[engine]}", peak, "MiB")
    ours, rival = peaks["minigrad"], min(rivals, key=peaks.__getitem__)
    yield Line(f"baby, peak memory: minigrad / {ENGINES[rival]}", ours / peaks[rival], "x", MEMORY_RATIO)
    yield Line("baby, peak memory: recomputed / plain", peaks["minigrad-recompute"] / ours, "x")


def can_compile() -> bool:
    """Try torch.compile: it needs a C++ compiler, and fills the cache that later processes use."""
    try:
        once(["step", "torch-compile", "tiny"])
    except RuntimeError:
        return False
    return True


def report(num_rounds: int) -> Iterator[str]:
    """Measure everything; yield the lines as they are known."""
    yield from once(["machine"])
    yield (
        f"medians over {num_rounds} rounds of new processes that take turns on one core, with one thread; CPU times; "
        f"float32; AdamW; "
        f"load {os.getloadavg()[0]:.1f} when it began"
    )
    engines = [engine for engine in ENGINES if engine != "minigrad-recompute"]
    if not can_compile():
        engines.remove("torch-compile")
        yield "torch.compile does not work here: it needs a C++ compiler"
    yield from map(str, tape(num_rounds))
    yield from map(str, imports(3 * num_rounds))
    yield from map(str, first_steps("nano-cpu", ("minigrad", "torch-fused"), num_rounds))
    yield from map(str, steps("nano-cpu", engines, num_rounds))
    yield from map(str, memory())
    without_exact = [engine for engine in engines if "exact" not in engine]
    yield from map(str, steps("baby", [*without_exact, "minigrad-recompute"], num_rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="of new processes (default: %(default)s)")
    args = parser.parse_args()
    start = time.perf_counter()
    lines: list[str] = []
    for line in report(args.rounds):
        print(line, flush=True)
        lines.append(line)
    lines.append(f"took {(time.perf_counter() - start) / 60:.0f} minutes")
    keep(lines, RESULTS, is_default=args == parser.parse_args([]))


if __name__ == "__main__":
    main()
