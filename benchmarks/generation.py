"""Measure how fast a GPT writes, ours beside PyTorch's, both with a KV cache: tokens a second of one text.

    make bench-generation

From a prompt of 8 tokens until the context is full, the likeliest token each time, one thread, CPU times. Peers take
turns on one core, as in `engine.py`; a ratio is the median over pairs of neighbouring turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median

from engine_jobs import SIZES
from generation_steps import PROMPT
from pinned_workers import interleave, once
from results_file import FOLDER, keep

RESULTS = FOLDER / "generation.txt"
WRITERS = {"minigrad": "minigrad", "torch": "PyTorch", "minigrad-anew": "minigrad, without its cache"}
NUM_TURNS = {"nano-cpu": 10, "baby": 3}  # of each round


def report(num_rounds: int) -> Iterator[str]:
    """Measure; yield the lines as they are known."""
    yield from once(["machine"])
    yield f"medians over {num_rounds} rounds of new processes that take turns on one core, with one thread; CPU times"
    for size, num_turns in NUM_TURNS.items():
        num_tokens = SIZES[size]["context"] - len(PROMPT)
        writers = [writer for writer in WRITERS if size == "nano-cpu" or writer != "minigrad-anew"]  # which takes long
        jobs = {writer: ("text", writer, size) for writer in writers}
        seconds = interleave(jobs, num_rounds=num_rounds, num_turns=num_turns)
        for writer in writers:
            yield f"{f'{size}: {WRITERS[writer]}':<50}{num_tokens / median(seconds[writer]):>9,.0f} tokens/s"
        for other in writers[1:]:
            ratio = median(b / a for a, b in zip(seconds["minigrad"], seconds[other], strict=True))
            yield f"{f'{size}: minigrad / {WRITERS[other]}':<50}{ratio:>9.2f} x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of new processes (default: %(default)s)")
    args = parser.parse_args()
    lines = []
    for line in report(args.rounds):
        print(line, flush=True)
        lines.append(line)
    keep(lines, RESULTS, is_default=args == parser.parse_args([]))


if __name__ == "__main__":
    main()
