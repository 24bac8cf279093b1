"""Search orders under a memory limit, and hold them against published ones.

    python benchmarks/search.py                   published rows and V placements: five minutes
    python benchmarks/search.py --part exact      one table: published, v, or exact, which takes an hour;
                                                  what it has is kept row by row, and it goes on from there

First the twelve rows of tables 5 and 6 of arXiv 2401.10241, whose ZB-2p column is the best order that its authors'
search found with twice the memory of 1F1B. Then V placements of 3 to 8 ranks at every memory from V-Min's to ZBV's, all
actions of one length, against what the public search of arXiv 2405.15362 reaches. Small problems at every memory are
held against the shortest order that there is: a bound, a look at all orders, or a solver says which that is, and where
none of them does in its time, the row says what is left. Pure Python on one core.
"""

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pipeline.schedules.bound import lower_bounds
from pipeline.schedules.exact import shortest
from pipeline.schedules.problem import Problem
from pipeline.schedules.schedule import round_robin, v_shape
from pipeline.schedules.search import MEASURES, PLACEMENTS, search

RESULTS = Path(__file__).parent / "results" / "search.txt"
PARTS = ("published", "v", "exact")
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


SMALL = ((2, 2), (2, 4), (2, 6), (2, 8), (3, 2), (3, 4), (3, 6), (4, 2), (4, 4), (4, 8))  # ranks, micro-batches
OPEN = "from"  # how the answer of a row begins that nobody has settled


def exact_rows(
    kept: list[str], seconds: float, solver_seconds: float, *, again: bool, stop: float
) -> Iterator[list[str]]:
    """Yield the table of small problems as far as it is known, after each new row.

    Args:
        kept: lines of an earlier table, whose rows stay.
        again: ask again where they have no answer.
        stop: begin no row after so many seconds.
    """
    known = {tuple(line.split()[:5]): line for line in kept if line[:4].strip().isdigit()}
    keys = [
        (str(p), str(m), str(k), placement, measure)
        for placement, (num_chunks, _) in PLACEMENTS.items()
        for p, m in SMALL
        for k in range(num_chunks, num_chunks * p + 1)
        for measure in MEASURES
    ]
    end = time.monotonic() + stop
    for key in [key for key in keys if key not in known or (again and f"  {OPEN} " in known[key])]:
        if time.monotonic() > end:
            return
        p, m, k, placement, measure = key
        num_chunks, rank_of = PLACEMENTS[placement]
        problem = Problem.of(
            num_ranks=int(p),
            num_microbatches=int(m),
            rank_of=rank_of,
            num_stages=num_chunks * int(p),
            limit=int(k),
        )
        answer = exact_row(problem, measure, seconds, solver_seconds)
        known[key] = f"{p:>4} {m:>4} {k:>4}  {placement:9}  {measure:8}{answer}"
        rows = [known[key] for key in keys if key in known]
        by = Counter(row.split()[7].rstrip(":") for row in rows)
        yield [
            "   p    m    k  placement  measure   bound   found  answer",
            *rows,
            f"{len(rows)} of {len(keys)} problems: {by['bound']} orders meet a bound, {by['all']} are the shortest of "
            f"all that there are, the solver judges {by['solver']} and finds {sum('shorter' in row for row in rows)} "
            f"shorter, and {by[OPEN]} are open",
        ]


def exact_row(problem: Problem, measure: str, seconds: float, solver_seconds: float) -> str:
    """Return the bound of a small problem, what a search finds, and who says how far it is from the best."""
    found = search(problem, measure=measure, seconds=seconds, num_tries=1_000_000)
    bound = max(bound.time for bound in lower_bounds(problem, span=measure == "span"))
    numbers = f" {bound:6g}  {found.time:6g}  "
    if found.gap < 1e-6:
        return numbers + ("bound" if found.time <= bound * (1 + 1e-6) else "all orders")
    exact = shortest(problem, found.orders, measure=measure, seconds=solver_seconds)
    shorter = f": shorter by {found.time - exact.time:g}" if exact.time < found.time * (1 - 1e-6) else ""
    if exact.proved:
        return f"{numbers}solver{shorter}"
    least = max(exact.least, found.bound.time)
    return f"{numbers}{OPEN} {least:g}{shorter}: gap at most {100 * (1 - least / exact.time):.2g}%"


def main() -> None:
    """Print the tables, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=12.0, help="for a published row (default 12)")
    parser.add_argument("--v-seconds", type=float, default=4.0, help="for a V (default 4)")
    parser.add_argument("--tries", type=int, default=2000, help="for a V (default 2000)")
    parser.add_argument("--small-seconds", type=float, default=20.0, help="for a small problem (default 20)")
    parser.add_argument("--solver-seconds", type=float, default=60.0, help="for its exact answer (default 60)")
    parser.add_argument("--again", action="store_true", help="ask again for the exact answers that are open")
    parser.add_argument("--stop", type=float, default=math.inf, help="begin no exact row after so many seconds")
    parser.add_argument("--part", choices=PARTS, help="one table only; the others are kept as they are")
    arguments = parser.parse_args()
    kept = RESULTS.read_text(encoding="utf-8").strip("\n").split("\n\n") if RESULTS.exists() else []
    texts = dict(zip(PARTS, kept, strict=False))
    tables: dict[str, Callable[[], Iterable[list[str]]]] = {
        "published": lambda: [published_rows(arguments.seconds)],
        "v": lambda: [v_rows(arguments.v_seconds, arguments.tries)],
        "exact": lambda: exact_rows(
            texts.get("exact", "").split("\n"),
            arguments.small_seconds,
            arguments.solver_seconds,
            again=arguments.again,
            stop=arguments.stop,
        ),
    }
    for part in [arguments.part] if arguments.part else ["published", "v"]:
        printed: set[str] = set()
        for lines in tables[part]():
            print("\n".join(line for line in lines if line not in printed), flush=True)
            printed.update(lines)
            texts[part] = "\n".join(lines)
            beside = RESULTS.with_suffix(".new")  # which takes its place, so that a command that is ended leaves one
            beside.write_text("\n\n".join(texts[name] for name in PARTS if name in texts) + "\n", encoding="utf-8")
            beside.replace(RESULTS)


if __name__ == "__main__":
    main()
