"""The work of a rank as flags, for the commands that set schedules side by side."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from pipeline.cli import flags
from pipeline.cli.schedule_flags import NAMES, add_skip_bytes, add_skips, check_skip_bytes
from pipeline.schedules.compare import Candidate, Work, searched
from pipeline.schedules.schedule import SCHEDULES, Schedule
from pipeline.schedules.search import PLACEMENTS

SEARCH = "search"


class _Flag(NamedTuple):
    what: str
    read: Callable[[str], Any]
    swept: Callable[[str], Any] | None = None  # reads several, where a sweep goes over them
    default: str = ""  # in words, where the number is none that could be given


_FLAGS = {
    "forward": _Flag("time of a forward of a micro-batch on a rank", flags.duration),
    "backward-input": _Flag("time of the input half of its backward", flags.duration),
    "backward-weight": _Flag("time of the weight half of its backward", flags.duration),
    "overlap": _Flag("share of the shorter one of a pair, F&B, that runs beside the longer one, 0 to 1", flags.share),
    "latency": _Flag("time until another rank has the first byte of a message", flags.latency, flags.latencies),
    "message-bytes": _Flag("bytes between two stages; with commas, one for each boundary", flags.memories),
    "bandwidth": _Flag("bytes of a message in a unit of time", flags.rate, flags.rates),
    "ranks-per-host": _Flag(
        "ranks whose messages to others share a link, one after another", flags.count, default=": none do"
    ),
    "activations": _Flag("memory of a micro-batch on a rank from its forward to its backward", flags.memory),
    "deferred": _Flag("memory of it from the input half of its backward to the weight half", flags.memory),
    "static": _Flag("memory of weights, their gradients and optimizer state", flags.memory),
    "memory": _Flag("memory that a rank has, as 8GiB", flags.memory, flags.memories),
    "gradient-bytes": _Flag("gradients of a rank, reduced over replicas beside the backward", flags.memory),
    "bucket-bytes": _Flag("the most that is reduced at a time", flags.part),
    "reduction-latency": _Flag("time that each bucket takes besides its bytes", flags.latency),
    "reduction-bandwidth": _Flag("bytes that are reduced in a unit of time", flags.rate),
}


def add_work(parser: argparse.ArgumentParser, *, swept: bool = False) -> None:
    """Declare schedules and their work.

    Args:
        swept: whether links and memory may be several, with commas.
    """
    what = f"names, .csv files, MODULE:NAME, or {SEARCH} for an order that is searched (default: all names)"
    parser.add_argument("schedules", nargs="*", default=[], metavar="SCHEDULE", help=what)
    defaults = vars(Work())
    for option, (what, read, read_several, default_in_words) in _FLAGS.items():
        default = defaults[option.replace("-", "_")]
        shown = default_in_words or (": any number" if default == math.inf else f" {default:g}")
        if swept and read_several is not None:
            what, read = f"{what}; with commas, several", read_several
        text = f"{what} (default{shown})"
        parser.add_argument(f"--{option}", type=read, default=default, metavar="X", help=text)
    add_skips(parser)
    add_skip_bytes(parser)
    what = f"a {SEARCH} begins no try after (default 10)"
    parser.add_argument("--seconds", type=flags.duration, default=10.0, metavar="S", help=what)
    parser.add_argument("--seed", type=int, default=0, help=f"of the random rules of a {SEARCH} (default 0)")


def candidates_of(arguments: argparse.Namespace) -> dict[str, Candidate]:
    """Return the schedules that were asked for, and a search where one was, by name."""

    def search(num_ranks: int, num_microbatches: int, work: Work) -> Schedule:
        flags.check_searchable(max(chunks for chunks, _ in PLACEMENTS.values()) * num_ranks, num_microbatches)
        try:
            return searched(num_ranks, num_microbatches, work, seconds=arguments.seconds, seed=arguments.seed)
        except ValueError as rule:
            raise flags.in_flags(rule) from rule

    names = dict.fromkeys(arguments.schedules or SCHEDULES)
    return {name: search if name == SEARCH else flags.find_schedule(name, NAMES) for name in names}


def values_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the flags, by the names of `Work`.

    Raises:
        ValueError: there are not as many sizes as skip connections.
    """
    check_skip_bytes(arguments)
    names = [*(option.replace("-", "_") for option in _FLAGS), "skips", "skip_bytes"]
    return {name: getattr(arguments, name) for name in names}
