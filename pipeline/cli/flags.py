"""What the flags of `python -m pipeline` may be, and how the command says what is wrong with one.

The library names its own parameters in its errors, as whoever calls it needs; a person at the command line knows flags.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline.cli.files import read_text
from pipeline.cli.own_code import one_line
from pipeline.schedules.action import Action, Placement
from pipeline.schedules.csv_file import dump, from_text, load
from pipeline.schedules.schedule import Order, Schedule
from pipeline.schedules.torch_csv import parse_torch
from pipeline.schedules.validate import validate
from pipeline.schedules.words import UNITS, counted

Numbers = list[float] | float
MOST_LETTERS = 60
MOST_ACTIONS = 1_000_000  # that a command looks at, so that a slip of the finger does not fill the memory
MOST_SEARCHED = 50_000  # in a search, which would take minutes to make its first order


def shortened(text: str) -> str:
    """Cut what somebody typed to what fits on a line."""
    return text if len(text) <= MOST_LETTERS else text[:MOST_LETTERS] + "..."


def count(text: str) -> int:
    """Read a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {shortened(text)!r}")
    return value


def _numbers(
    what: str, allows: Callable[[float], bool], *, commas: bool = False, units: bool = False
) -> Callable[[str], Numbers]:
    what += f", with or without one of {', '.join(UNITS)}" * units + ", or several with commas" * commas

    def one(part: str) -> float:
        unit = next((unit for unit in UNITS if units and part.endswith(unit)), "")
        return float(part.removesuffix(unit)) * UNITS.get(unit, 1)

    def read(text: str) -> Numbers:
        try:
            values = list(map(one, text.split(",") if commas else [text]))
        except ValueError:
            values = [math.nan]  # which no rule allows
        if not all(map(allows, values)):
            raise argparse.ArgumentTypeError(f"must be {what}, got {shortened(text)!r}")
        return values if len(values) > 1 else values[0]

    return read


duration = _numbers("a number above 0", lambda value: 0 < value < math.inf)
durations = _numbers("a number above 0", lambda value: 0 < value < math.inf, commas=True)
share = _numbers("a number from 0 to 1", lambda value: 0 <= value <= 1)
latency = _numbers("a number of at least 0", lambda value: 0 <= value < math.inf)
latencies = _numbers("a number of at least 0", lambda value: 0 <= value < math.inf, commas=True)
rate = _numbers("a number above 0, or inf", lambda value: value > 0)
rates = _numbers("a number above 0, or inf", lambda value: value > 0, commas=True)
sizes = _numbers("a number of at least 0", lambda value: 0 <= value < math.inf, commas=True)
memory = _numbers("a number of at least 0", lambda value: 0 <= value < math.inf, units=True)
memories = _numbers("a number of at least 0", lambda value: 0 <= value < math.inf, units=True, commas=True)
part = _numbers("a number above 0", lambda value: 0 < value < math.inf, units=True)


def skips(text: str) -> list[tuple[int, int]]:
    """Read skip connections, as 0-3,1-2."""
    ends = [re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", part) for part in text.split(",")]
    found = [(int(match[1]), int(match[2])) for match in ends if match is not None]
    if len(found) < len(ends) or len(set(found)) < len(found) or any(giver >= taker for giver, taker in found):
        raise argparse.ArgumentTypeError(
            f"must be stages and later stages, as 0-3,1-2, each once, got {shortened(text)!r}"
        )
    return found


def counts(text: str) -> list[int]:
    """Read whole numbers of at least 1, as 2..16 or 2,4,8."""
    first, dots, last = text.partition("..")
    try:
        given = [count(number) for number in ((first, last) if dots else text.split(","))]
    except argparse.ArgumentTypeError as error:
        what = "whole numbers of at least 1, as 2..16 or 2,4,8"
        raise argparse.ArgumentTypeError(f"must be {what}, got {shortened(text)!r}") from error
    if not dots:
        return given
    numbers = range(given[0], given[1] + 1)
    if numbers and numbers[-1] > MOST_ACTIONS:  # before there is a list of them
        raise argparse.ArgumentTypeError(f"must go to {MOST_ACTIONS:,} at most, got {shortened(text)!r}")
    if not numbers:
        raise argparse.ArgumentTypeError(f"must go from a number to a larger one, got {shortened(text)!r}")
    return list(numbers)


def check_length(flag: str, value: Numbers, count: int, of_what: str) -> None:
    """Check that a flag has one number, or one for each of what a schedule has.

    Raises:
        ValueError: it has another number of them.
    """
    if isinstance(value, list) and len(value) != count:
        raise ValueError(f"{flag} must be one number or one for each of the {of_what}, got {len(value)} for {count}")


def check_size(num_actions: int) -> None:
    """Check that a schedule is not too large to look at.

    Raises:
        ValueError: it has too many actions.
    """
    if num_actions > MOST_ACTIONS:
        raise ValueError(
            f"stages times micro-batches must make at most {MOST_ACTIONS:,} actions, got about {num_actions:,}"
        )


def check_searchable(num_stages: int, num_microbatches: int) -> None:
    """Check that a search can make an order of so many in the time that it is given.

    Raises:
        ValueError: it has too many actions.
    """
    num_actions = 3 * num_stages * num_microbatches
    if num_actions > MOST_SEARCHED:
        raise ValueError(f"a search must have at most {MOST_SEARCHED:,} actions, F, B and W, got {num_actions:,}")


def find_schedule(name: str, schedules: Mapping[str, Schedule]) -> Schedule:
    """Find a schedule by its name, read it from a file, or import it.

    Raises:
        ValueError: there is none of this name, or the file cannot be read or holds none.
    """
    if name in schedules:
        return schedules[name]
    if name.endswith(".csv"):
        try:
            return load(name)
        except OSError as error:
            raise ValueError(f"{name} cannot be read: {error.strerror}") from error
    if ":" in name:
        found = imported(name, "the schedule")
        if isinstance(found, Schedule):
            return replace(found, order=_checked(name, found.order), rank_of=_checked_placement(name, found.rank_of))
        if callable(found):  # an order: one stage a rank
            return Schedule(name, _checked(name, found))
        raise ValueError(f"{name} must be a Schedule or an order, a function, got {type(found).__name__}")
    raise ValueError(f"schedule must be one of {', '.join(schedules)}, or a .csv file, or MODULE:NAME, got {name!r}")


def _checked(name: str, found: Callable[..., Any]) -> Order:
    """Return somebody's order as one that gives actions, or a ValueError."""

    def order(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
        try:
            actions = list(islice(found(rank, num_ranks, num_microbatches), MOST_ACTIONS + 1))
        except (Exception, SystemExit) as error:  # whatever the function does
            raise ValueError(f"{name} gives no order: {one_line(error)}") from error
        check_size(len(actions))
        for action in actions:
            if not isinstance(action, Action):
                raise ValueError(f"{name} must give actions, as pipeline.F(0, 1), got {shortened(repr(action))}")
        return actions

    return order


def _checked_placement(name: str, found: Callable[..., Any]) -> Placement:
    """Return somebody's placement as one that raises no other error than a ValueError."""

    def rank_of(stage: int, num_ranks: int) -> int:
        try:
            rank: int = found(stage, num_ranks)
        except (Exception, SystemExit) as error:
            raise ValueError(f"{name} places stage {stage} on no rank: {one_line(error)}") from error
        return rank

    return rank_of


def imported(name: str, what: str, allowed: str = "MODULE:NAME") -> Any:
    """Return what MODULE:NAME stands for; a module may lie in the folder that the command is run in.

    Raises:
        ValueError: there is none.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute or module.startswith("."):
        raise ValueError(f"{what} must be {allowed}, got {name!r}")
    sys.path.insert(0, "")  # as `python -c` does
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # whatever the module's own code does
        raise ValueError(f"{what} {name!r} cannot be found: {one_line(error)}") from error


def load_torch(path: str) -> list[list[Action]]:
    """Read orders from a file of torch.distributed.pipelining.

    Raises:
        ValueError: it cannot be read, or is not a training step.
    """
    orders = parse_torch(read_text(path))
    from_text(dump(orders), Path(path).name)  # for its errors
    return orders


def sizes_of(
    schedules: Iterable[object], given: tuple[int | None, int | None], usual: tuple[int, int]
) -> tuple[int, int]:
    """Return ranks and micro-batches: what is given, or else what a schedule is written for, or else the usual ones."""
    written_for = (one.sizes for one in schedules if isinstance(one, Schedule) and one.sizes is not None)
    default_ranks, default_microbatches = next(written_for, usual)
    num_ranks, num_microbatches = given
    return (
        default_ranks if num_ranks is None else num_ranks,
        default_microbatches if num_microbatches is None else num_microbatches,
    )


def sizes_in_words(num_ranks: int, num_microbatches: int, *, num_stages: int | None = None) -> str:
    """Say the sizes of a schedule."""
    ranks = counted(num_ranks, "rank")
    on = ranks if num_stages is None else f"{counted(num_stages, 'stage')} on {ranks}"
    return f"{on}, {counted(num_microbatches, 'micro-batch')}"


def in_flags(rule: ValueError) -> ValueError:
    """Return what the library says of its parameters in the words of the command line."""
    words = {
        "num_microbatches": "--microbatches",
        "num_ranks": "the number of ranks",
        "width must": "--width must",
        "message_bytes must": "--message-bytes must",
        "memory must": "--memory must",
    }
    text = str(rule)
    for name, word in words.items():
        text = text.replace(name, word)
    return ValueError(text)


def orders_of(schedule: Schedule, num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Return the order of every rank, which is valid.

    Raises:
        ValueError: the schedule does not allow these sizes, in the words of the command line.
        ScheduleError: it breaks a rule, as somebody's own may.
    """
    num_stages = schedule.num_stages(num_ranks)
    check_size(2 * num_stages * num_microbatches)
    try:
        orders = schedule.orders(num_ranks, num_microbatches)
    except ValueError as rule:
        raise in_flags(rule) from rule
    validate(
        orders,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        rank_of=schedule.rank_of,
        trains=schedule.trains,
    )
    return orders


def as_json(value: Any) -> str:
    """Write what a command found as JSON; what is infinite is null, as JSON has no such number."""

    def finite(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(value), indent=2, allow_nan=False)


def cells(orders: Sequence[Sequence[Action]]) -> list[list[str]]:
    """Return orders as the cells of a table, a row a rank."""
    return [[str(action) for action in order] for order in orders]
