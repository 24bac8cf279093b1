"""Search orders under a memory limit, and hold them against published ones.

    python benchmarks/search.py                   published rows and V placements: five minutes
    python benchmarks/search.py --part exact      one table: published, v, or exact, which takes an hour

First the twelve rows of tables 5 and 6 of arXiv 2401.10241, whose ZB-2p column is the best order that its authors'
search found with twice the memory of 1F1B. Then V placements of 3 to 8 ranks at every memory from V-Min's to ZBV's, all
actions of one length, against what the public search of arXiv 2405.15362 reaches. Small problems with tight
memory are held against the solver's answer. Pure Python on one core.
"""

import argparse
import time
from pathlib import Path

from pipeline.schedules.exact import shortest
from pipeline.schedules.problem import Problem
from pipeline.schedules.schedule import round_robin, v_shape
from pipeline.schedules.search import MEASURES, PLACEMENTS, search

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


def exact_rows(seconds: float, solver_seconds: float) -> list[str]:
    """Return the table of small problems where the found order is longer than the bound, beside the solver's answer."""
    lines = ["   p    m    k  placement  measure    found   exact"]
    proved = equal = settled = count = 0
    for placement, (num_chunks, rank_of) in PLACEMENTS.items():
        for p, m in ((2, 2), (2, 4), (2, 6), (2, 8), (3, 2), (3, 4), (3, 6), (4, 2), (4, 4), (4, 8)):
            for k in range(num_chunks, num_chunks * p + 1):
                problem = Problem.of(
                    num_ranks=p, num_microbatches=m, rank_of=rank_of, num_stages=num_chunks * p, limit=k
                )
                for measure in MEASURES:
                    found = search(problem, measure=measure, seconds=seconds)
                    count += 1
                    if found.gap < 1e-6:
                        proved += 1
                        continue
                    exact = shortest(problem, found.orders, measure=measure, seconds=solver_seconds)
                    settled += exact.proved
                    equal += exact.proved and found.time <= exact.time * (1 + 1e-6)
                    answer = f"{exact.time:g}" if exact.proved else f"from {exact.least:.4g}"
                    lines.append(f"{p:4} {m:4} {k:4}  {placement:9}  {measure:8} {found.time:6g}  {answer}")
    lines.append(
        f"{count} problems: {proved} proved by a bound or by looking at all orders; "
        f"of the rest the solver settles {settled}, of which {equal} were found"
    )
    return lines


def main() -> None:
    """Print the tables, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=12.0, help="for a published row (default 12)")
    parser.add_argument("--v-seconds", type=float, default=4.0, help="for a V (default 4)")
    parser.add_argument("--tries", type=int, default=2000, help="for a V (default 2000)")
    parser.add_argument("--solver-seconds", type=float, default=60.0, help="for an exact answer (default 60)")
    parser.add_argument(
        "--part", choices=["published", "v", "exact"], help="one table only; the others are kept as they are"
    )
    arguments = parser.parse_args()
    tables = {
        "published": lambda: published_rows(arguments.seconds),
        "v": lambda: v_rows(arguments.v_seconds, arguments.tries),
        "exact": lambda: exact_rows(arguments.v_seconds, arguments.solver_seconds),
    }
    kept = RESULTS.read_text(encoding="utf-8").strip().split("\n\n") if RESULTS.exists() else []
    texts = dict(zip(tables, kept, strict=False))
    for part, table in tables.items():
        if arguments.part == part or (arguments.part is None and part != "exact"):
            texts[part] = "\n".join(table())
            print(texts[part], end="\n\n")
    RESULTS.write_text("\n\n".join(texts[part] for part in tables if part in texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
