"""`python -m pipeline search`: the shortest order for given times, links and memory."""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial
from pathlib import Path

from pipeline.cli import files, flags
from pipeline.cli.memory import add_measured, measured_of
from pipeline.cli.schedule_flags import add_skip_bytes, add_skips, check_skip_bytes
from pipeline.schedules.csv_file import dump
from pipeline.schedules.drawing.svg import picture, svg
from pipeline.schedules.exact import check_solvable, shortest
from pipeline.schedules.held import Measured, search_within
from pipeline.schedules.placed import problem_of, shared
from pipeline.schedules.problem import Problem
from pipeline.schedules.search import MEASURES, PLACEMENTS, Found, search_placements
from pipeline.schedules.timeline import Timeline
from pipeline.schedules.words import amount

HELP = "find the shortest order for given times, links and memory, and how short it could be"

_LARGE = 10_000  # actions, whose first order takes seconds

_PER_RANK = {
    "forward": ("time of a forward of one micro-batch", flags.durations, 1.0),
    "backward-input": ("time of the input half of a backward", flags.durations, 1.0),
    "backward-weight": ("time of the weight half of a backward", flags.durations, 1.0),
    "activations": ("memory that a micro-batch takes from its forward to its backward", flags.memories, 1.0),
    "deferred": ("memory that it takes from the input half of its backward to the weight half", flags.memories, 0.0),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `search` takes."""
    parser.add_argument("--ranks", type=flags.count, default=4, metavar="P", help="ranks (default 4)")
    parser.add_argument("--microbatches", type=flags.count, default=8, metavar="M", help="micro-batches (default 8)")
    what = "stages on the ranks: one each, two in a loop, two in a V, or the best of all (default)"
    parser.add_argument("--placement", choices=[*PLACEMENTS, "all"], default="all", help=what)
    for option, (what, read, default) in _PER_RANK.items():
        text = f"{what} on a rank; with commas, one for each stage (default {default:g})"
        parser.add_argument(f"--{option}", type=read, default=default, metavar="X", help=text)
    what = "time until another rank has what an action made (default 0)"
    parser.add_argument("--latency", type=flags.latency, default=0.0, metavar="T", help=what)
    what = "what a rank may hold, in the unit of --activations: 8GiB, or 8 (default: any amount)"
    parser.add_argument("--memory", type=flags.memories, default=math.inf, metavar="X", help=what)
    what = "what a rank holds in any case: weights, their gradients, optimizer state (default 0)"
    parser.add_argument("--static", type=flags.memories, default=0.0, metavar="X", help=what)
    add_measured(parser)
    add_skips(parser)
    add_skip_bytes(parser)
    what = "what is to be short: everything, or the longest span of a rank (default makespan)"
    parser.add_argument("--measure", choices=list(MEASURES), default="makespan", help=what)
    what = "begin no try after (default 10)"
    parser.add_argument("--seconds", type=flags.duration, default=10.0, metavar="S", help=what)
    parser.add_argument("--seed", type=int, default=0, help="of the random rules (default 0)")
    what = "then ask a solver for the shortest order that there is, for S seconds at most (60); needs highspy"
    parser.add_argument("--exact", type=flags.duration, nargs="?", const=60.0, metavar="S", help=what)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the order, to draw, check and run")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the order against time")


def run(arguments: argparse.Namespace) -> None:
    """Search each placement, and print the best order's numbers."""
    names = list(PLACEMENTS) if arguments.placement == "all" else [arguments.placement]
    flags.check_searchable(max(PLACEMENTS[name][0] for name in names) * arguments.ranks, arguments.microbatches)
    given = {name: getattr(arguments, name.replace("-", "_")) for name in _PER_RANK}
    lengths = {len(value) for value in given.values() if isinstance(value, list)}
    if lengths:  # one a stage: of these placements, those that have so many
        allowed = {name: PLACEMENTS[name][0] * arguments.ranks for name in names}
        names = [name for name in names if {allowed[name]} == lengths]
        if not names:
            flags_given = " and ".join(f"{len(v)} for --{name}" for name, v in given.items() if isinstance(v, list))
            stages = " or ".join(map(str, sorted(set(allowed.values()))))
            raise ValueError(f"numbers with commas must be one for each of {stages} stages, got {flags_given}")
    measured = measured_of(arguments, arguments.microbatches)
    check_skip_bytes(arguments)
    for flag, value in (("--memory", arguments.memory), ("--static", arguments.static)):
        flags.check_length(flag, value, arguments.ranks, "ranks")

    def problem_in(placement: str, reserve: float) -> Problem:
        num_actions = 3 * PLACEMENTS[placement][0] * arguments.ranks * arguments.microbatches
        if num_actions > _LARGE and not arguments.json:
            print(f"placement {placement}: looking for an order of {num_actions:,} actions", file=sys.stderr)
        return _problem(arguments, placement, given, measured, reserve)

    def find(reserve: float) -> dict[str, Found]:
        return search_placements(
            partial(problem_in, reserve=reserve),
            names,
            measure=arguments.measure,
            seconds=arguments.seconds,
            seed=arguments.seed,
        )

    def peaks_of(placement: str, timeline: Timeline) -> list[float] | None:
        """Return what each rank holds, where a search does not count all of it."""
        num_chunks, rank_of = PLACEMENTS[placement]
        skips, skip_bytes = arguments.skips, arguments.skip_bytes
        if measured is not None:
            num_stages = num_chunks * arguments.ranks
            return measured.peaks(timeline, num_stages, rank_of, skips=skips, skip_bytes=skip_bytes)
        if not skips:
            return None
        kept, later = (shared(given[name], num_chunks) for name in ("activations", "deferred"))
        peaks = timeline.peak_memory(kept, later, skips=skips, skip_memory=skip_bytes)
        return [peak + held for peak, held in zip(peaks, _of_ranks(arguments.static, arguments), strict=True)]

    def excess(placement: str, timeline: Timeline) -> float:
        """Return by how much an order does not fit."""
        peaks = peaks_of(placement, timeline) or []
        return max((p - m for p, m in zip(peaks, _of_ranks(arguments.memory, arguments), strict=False)), default=0.0)

    results = search_within(find, lambda found: next(excess(name, one.timeline) for name, one in found.items()))
    best, found = next(iter(results.items()))
    num_stages = PLACEMENTS[best][0] * arguments.ranks
    orders, timeline, exact = found.orders, found.timeline, None
    if arguments.exact is not None:
        exact = shortest(found.problem, orders, measure=arguments.measure, seconds=arguments.exact)
        if excess(best, exact.timeline) <= 1:
            orders, timeline = exact.orders, exact.timeline
    peaks = peaks_of(best, timeline)
    if arguments.csv is not None:
        files.write_file("--csv", arguments.csv, lambda path: path.write_text(dump(orders), encoding="utf-8"))
    sizes = flags.sizes_in_words(arguments.ranks, arguments.microbatches, num_stages=num_stages)
    title = f"placement {best}: {sizes}"
    if arguments.svg is not None:
        drawing = svg(picture(timeline, title))
        files.write_file("--svg", arguments.svg, lambda path: path.write_text(drawing, encoding="utf-8"))
    if arguments.json:
        print(
            flags.as_json(
                {
                    "placement": best,
                    "num_stages": num_stages,
                    "num_ranks": arguments.ranks,
                    "num_microbatches": arguments.microbatches,
                    **found.values,
                    "peak_bytes": peaks,
                    "exact": None if exact is None else {"time": exact.time, "least": exact.least},
                    "placements": {name: other.time for name, other in results.items()},
                    "ranks": flags.cells(orders),
                }
            )
        )
        return
    print(title)
    if peaks is None:
        static = _of_ranks(arguments.static, arguments)
        peaks = [peak + held for peak, held in zip(found.problem.peaks(timeline), static, strict=True)]
    print(found.report([amount(peak) for peak in peaks]))
    if exact is not None:
        print(exact.report())
    for name, other in results.items():
        if name != best:
            print(f"placement {name:18}{other.time:.6g}")


def _problem(
    arguments: argparse.Namespace,
    placement: str,
    given: dict[str, flags.Numbers],
    measured: Measured | None,
    reserve: float,
) -> Problem:
    """Return what is asked of one placement.

    Args:
        reserve: memory of each rank that is kept free.
    Raises:
        ValueError: as `problem_of`, in the words of the command line; or an exact answer is asked for and too much.
    """
    try:
        problem = problem_of(
            placement,
            num_ranks=arguments.ranks,
            num_microbatches=arguments.microbatches,
            forward=given["forward"],
            backward_input=given["backward-input"],
            backward_weight=given["backward-weight"],
            activations=given["activations"],
            deferred=given["deferred"],
            latency=arguments.latency,
            static=arguments.static,
            memory=arguments.memory,
            measured=measured,
            skips=arguments.skips,
            skip_bytes=arguments.skip_bytes,
            reserve=reserve,
        )
    except ValueError as rule:
        held = "what ranks hold beside their micro-batches" if measured is not None else "--static"
        said = str(rule).replace("what ranks hold beside their micro-batches", held)
        raise flags.in_flags(ValueError(said)) from rule
    if arguments.exact is not None:
        check_solvable(problem, arguments.measure)
    return problem


def _of_ranks(value: flags.Numbers, arguments: argparse.Namespace) -> list[float]:
    return value if isinstance(value, list) else [value] * arguments.ranks
