"""Search orders under a memory limit, and hold them against published ones.

    python benchmarks/search.py

First the twelve rows of tables 5 and 6 of arXiv 2401.10241, whose ZB-2p column is the best order that its authors'
search found with twice the memory of 1F1B. Then V placements of 3 to 8 ranks at every memory from V-Min's to ZBV's, all
actions of one length, against what the public search of arXiv 2405.15362 reaches. Pure Python on one core.
"""

import argparse
import time
from pathlib import Path

from pipeline.schedules.problem import Problem
from pipeline.schedules.schedule import round_robin, v_shape
from pipeline.schedules.search import search

RESULTS = Path(__file__).parent / "results" / "search.txt"
ROWS = [  # ranks, micro-batches, F, B, W, message, M_W / M_B, bubble rates of ZB-H2 and ZB-2p
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.366, 0.1083, 0.0433),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.366, 0.0837, 0.0039),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.366, 0.0444, 0.0026),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.432, 0.0698, 0.0029),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.432, 0.0559, 0.0022),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.432, 0.0294, 0.0010),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.432, 0.0672, 0.0066),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.432, 0.0516, 0.0054),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.432, 0.0266, 0.0028),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.432, 0.0641, 0.0038),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.432, 0.0490, 0.0029),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.432, 0.0257, 0.0018),
]


def published_rows(seconds: float) -> list[str]:
    """Return the table of the twelve rows."""
    lines = ["   p    m   ZB-H2  ZB-2p   found    bound    gap, points  tries  seconds"]
    reached = better = close = 0
    for p, m, f, b, w, latency, deferred, zb_h2, zb_2p in ROWS:
        problem = Problem.of(
            num_ranks=p,
            num_microbatches=m,
            rank_of=round_robin,
            num_stages=p,
            forward=f,
            backward_input=b,
            backward_weight=w,
            latency=latency,
            deferred=deferred,
            limit=2 * p,
        )
        start = time.perf_counter()
        found = search(problem, measure="span", seconds=seconds)
        taken = time.perf_counter() - start
        rate = found.timeline.span_bubble_rate
        bound = 1 - found.timeline.ideal / found.bound.time
        reached += round(rate, 4) <= zb_2p
        better += rate < zb_h2
        close += rate - bound < 0.001
        lines.append(
            f"{p:4} {m:4}  {zb_h2:.4f} {zb_2p:.4f}  {rate:.5f}  {bound:.5f}  {max(0.0, 100 * (rate - bound)):11.5f}"
            f"  {found.num_tries:5}  {taken:7.1f}"
        )
    total = len(ROWS)
    lines.append(
        f"at most ZB-2p in {reached} of {total}, below ZB-H2 in {better}, within 0.1 points of the bound in {close}"
    )
    return lines


def v_rows(seconds: float, tries: int) -> list[str]:
    """Return the table of V placements; a number is a span bubble."""
    lines = ["   p    k  public search  found"]
    met = count = 0
    for p in range(3, 9):
        for k in range(2 * ((p + 4) // 3), 2 * p + 1):
            law = 3 * p - 1 - 3 * k + max(3 * p, p - 1 + 2 * (1 + (k + 1) // 2))
            problem = Problem.of(num_ranks=p, num_microbatches=3 * p, rank_of=v_shape, num_stages=2 * p, limit=k)
            bubble = search(problem, measure="span", seconds=seconds, num_tries=tries).timeline.span_bubble
            met += bubble <= law
            count += 1
            lines.append(f"{p:4} {k:4}  {law:13}  {bubble:5g}{'  longer' * (bubble > law)}")
    lines.append(f"at most the public search's in {met} of {count}")
    return lines


def main() -> None:
    """Print both tables and keep them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="for a row (default 20)")
    parser.add_argument("--tries", type=int, default=2000, help="for a V (default 2000)")
    arguments = parser.parse_args()
    lines = [*published_rows(arguments.seconds), "", *v_rows(arguments.seconds, arguments.tries)]
    print("\n".join(lines))
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
