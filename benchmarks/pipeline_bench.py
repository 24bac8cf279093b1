"""Measure a pipeline of two stages beside torch.distributed.pipelining, and its idle time beside the simulator's.

    make bench-pipeline

Each job is a run of `pipeline_minigrad.py` or `pipeline_torch.py` on two ranks; they alternate over several rounds. A
figure is the median over rounds, with the smallest and the largest in brackets.

The bubble is the share of the makespan, from the first action's start to the last one's end, in which a rank computes
nothing, on average over ranks. The simulator predicts it from the times of the actions of a step recorded earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddp import Line, header, products, run, seconds
from engine_jobs import BATCH, SIZES
from rank_jobs import NUM_RANKS, Result, free_port, run_job
from results_file import FOLDER

RESULTS = FOLDER / "pipeline.txt"
SIZE = "baby"
NUM_MICROBATCHES = 8
TURNS = 4
TOKENS = BATCH[SIZE] * SIZES[SIZE]["context"]  # in a step

SPEED_RATIO = 1.25  # targets: over PyTorch's
IDEAL_PERCENT = 92.0
BUBBLE_POINTS = 3.0  # between measured and simulated


def speeds(ours: Sequence[Result], theirs: Sequence[Result]) -> Iterator[Line]:
    """Compare tokens a second, round by round."""
    one_f_one_b, zero_bubble, torch = (
        [TOKENS / s for s in seconds(results, name)]
        for results, name in ((ours, "1f1b"), (ours, "zero_bubble_h1"), (theirs, "torch"))
    )
    # Both ranks train alone at the same time, so a rate is that of one process beside a busy neighbour.
    alone, in_parts = ([TOKENS / s for s in seconds(ours, name)] for name in ("alone", "alone, micro-batches"))
    yield Line("minigrad, 1F1B", one_f_one_b, "tokens/s")
    yield Line("minigrad, zero-bubble H1", zero_bubble, "tokens/s")
    yield Line("PyTorch, 1F1B", torch, "tokens/s")
    yield Line("one process beside another one", alone, "tokens/s")
    yield Line("one process beside another one, in micro-batches", in_parts, "tokens/s")
    yield Line("minigrad / PyTorch, 1F1B", ratios(one_f_one_b, torch), "x", SPEED_RATIO)
    filled = NUM_RANKS * NUM_MICROBATCHES / (NUM_MICROBATCHES + NUM_RANKS - 1)
    for what, rates, target in (("", alone, IDEAL_PERCENT), (" in micro-batches", in_parts, None)):
        ideal = [100 * ratio / filled for ratio in ratios(one_f_one_b, rates)]
        yield Line(f"1F1B, share of the ideal: m / (m + 1) of two processes{what}", ideal, "%", target)
    yield Line("zero-bubble H1 / 1F1B", ratios(zero_bubble, one_f_one_b), "x")
    simulated = [result["makespan"]["1f1b"] / result["makespan"]["zero_bubble_h1"] for result in ours]
    yield Line("zero-bubble H1 / 1F1B, simulated", simulated, "x")


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def bubbles(results: Sequence[Result]) -> Iterator[Line]:
    """Set the measured idle time beside the simulated one."""
    for name in results[0]["idle"]:
        idle = [result["idle"][name] for result in results]
        for kind in ("predicted", "measured"):
            yield Line(f"{name}: bubble, {kind}", [100 * shares[kind] for shares in idle], "points")
        off = [100 * abs(shares["measured"] - shares["predicted"]) for shares in idle]
        yield Line(f"{name}: bubble, off", off, "points", limit=BUBBLE_POINTS)


def memory(result: Result) -> Iterator[str]:
    """Say how many micro-batches each stage held at most, and whether that is what the schedule promises."""
    for name, found in result["peaks"].items():
        is_right = found["peak"] == found["simulated"] and not any(found["left"])
        what = f"{name}: most micro-batches held, by stage; then 0"
        yield f"{what:<60} {found['peak']!s:<28} {found['simulated']}  {'met' if is_right else 'missed'}"


def report(launcher: Sequence[str], num_rounds: int) -> Iterator[str]:
    """Measure everything; yield the lines as they are known."""
    yield from header()
    job = [SIZE, "--microbatches", str(NUM_MICROBATCHES), "--turns", str(TURNS)]
    ours, theirs = [], []
    for _ in range(num_rounds):
        ours.append(run_job(launcher, "pipeline_minigrad.py", *job))
        first_blocks = ours[0]["layers"][0][0] - 1  # the first layer is the embedding
        flags = ["--blocks", str(first_blocks), "--port", str(free_port())]
        theirs.append(run_job(launcher, "pipeline_torch.py", *job, *flags))
    yield (
        f"{SIZE}, {NUM_RANKS} stages of {ours[0]['layers']} layers, {NUM_MICROBATCHES} micro-batches; "
        f"cores that a rank may use: {ours[0]['affinity']}, {theirs[0]['affinity']}"
    )
    yield f"medians of {num_rounds} rounds, the smallest and the largest in brackets"
    yield from map(str, speeds(ours, theirs))
    yield str(products(SIZE, 1))
    yield from map(str, bubbles(ours))
    yield from memory(ours[0])


if __name__ == "__main__":
    run(__doc__, report, RESULTS, rounds=3)
