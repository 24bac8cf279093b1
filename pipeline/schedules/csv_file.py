"""A schedule as a file that a person can write: CSV, one row a rank, cells such as `2F0`.

    0F0, 0F1,     ,     , 0BW0, 0BW1
       , 1F0, 1BW0, 1F1, 1BW1

A forward and a backward that overlap are one cell, `0F4&3BW1`. Blank cells may stand for idle time; they are ignored,
since when an action runs follows from what it waits for. The rows say which rank owns a stage.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from pipeline.schedules.action import Action, Kind, ScheduleError
from pipeline.schedules.drawing.text import draw_order
from pipeline.schedules.schedule import Schedule
from pipeline.schedules.validate import validate
from pipeline.schedules.words import counted

MOST_LETTERS = 40  # of a cell
_TORCH = re.compile(r"[0-9]+I[0-9]+|.*OVERLAP_F_B")  # a cell that only PyTorch writes
MOST_CHARACTERS = 16 << 20  # of a file


def dump(orders: Sequence[Sequence[Action]]) -> str:
    """Write orders, or programs, as text."""
    return "".join(",".join(map(str, order)) + "\n" for order in orders)


def parse(text: str) -> list[list[Action]]:
    """Read back what `dump` writes or a person wrote, as it stands: nothing but the cells is checked.

    Raises:
        ScheduleError: a cell is no action; the grid is drawn with the cell marked.
    """
    kinds = ", ".join(kind.value for kind in (Kind.F, Kind.B, Kind.W, Kind.BW))  # `lower` adds the others
    rows = [[cell for cell in row if cell] for row in cells_of(text)]
    orders: list[list[Action]] = []
    for rank, row in enumerate(rows):
        orders.append([])
        for index, cell in enumerate(row):
            try:
                orders[-1].append(Action.parse(cell))
            except ValueError:
                rule = (
                    f"a cell is a stage, one of {kinds}, and a micro-batch, as 1F0, or F of one micro-batch "
                    "and a backward of another, as 0F4&3BW1"
                )
                if _TORCH.fullmatch(cell):
                    rule += " (`python -m pipeline dump FILE --from torch` reads PyTorch's cells)"
                raise ScheduleError(
                    f"{rule}; got {cell!r} on rank {rank}\n{draw_order(rows, [(rank, index)])}", [(rank, index)]
                ) from None
    return orders


def cells_of(text: str) -> list[list[str]]:
    """Return the cells of a table, row by row, without the spaces around them.

    Raises:
        ScheduleError: it is no table.
    """
    try:
        return [[_shortened(cell.strip()) for cell in row] for row in csv.reader(text.strip().splitlines())]
    except csv.Error as error:
        raise ScheduleError(f"a schedule must be a table of cells with commas between: {error}") from None


def _shortened(cell: str) -> str:
    """Cut a cell that is no action anyway, so that the drawing of the fault stays one."""
    return cell if len(cell) <= MOST_LETTERS else cell[:MOST_LETTERS] + "..."


def from_text(text: str, name: str) -> Schedule:
    """Make a schedule of a text, for the number of ranks and micro-batches that it shows.

    Raises:
        ScheduleError: it is not a training step; the grid is drawn with the faulty cell marked.
    """
    try:
        orders = parse(text)
    except ScheduleError as fault:
        raise ScheduleError(f"{name}: {fault}", fault.cells) from None
    if not orders:
        raise ScheduleError(f"{name}: a schedule has one row a rank, got none")
    singles = [[single for action in order for single in action.singles] for order in orders]
    rank_of = {action.stage: rank for rank, own in reversed([*enumerate(singles)]) for action in own}
    num_ranks, num_stages = len(orders), max(rank_of, default=-1) + 1
    num_microbatches = 1 + max((action.microbatch for own in singles for action in own), default=0)

    def owner(stage: int, ranks: int) -> int:
        if ranks != num_ranks:
            raise ValueError(f"{name} is written for {counted(num_ranks, 'rank')}, got {ranks}")
        return rank_of[stage]

    try:
        if num_stages == 0:
            raise ScheduleError("a schedule has at least one action, got none")
        for rank in range(num_ranks):
            num_owned = sum(owned_by == rank for owned_by in rank_of.values())
            if num_owned * num_ranks != num_stages:
                raise ScheduleError(
                    f"every rank has the same number of stages, got {num_owned} on rank {rank} "
                    f"of {num_stages} on {num_ranks} ranks\n{draw_order(orders)}"
                )
        validate(orders, num_stages=num_stages, num_microbatches=num_microbatches, rank_of=owner)
    except ScheduleError as fault:
        raise ScheduleError(f"{name}: {fault}", fault.cells) from None
    return Schedule(
        name,
        lambda rank, num_ranks, num_microbatches: list(orders[rank]),
        num_chunks=num_stages // num_ranks,
        rank_of=owner,
        sizes=(num_ranks, num_microbatches),
    )


def load(path: str | PathLike[str]) -> Schedule:
    """Read a schedule from a file; its name is the file's.

    Raises:
        OSError: the file cannot be read.
        ScheduleError: it is not text, or as `from_text`.
    """
    name = Path(path).name
    try:
        with Path(path).open(encoding="utf-8-sig") as file:  # spreadsheets write a mark in front
            text = file.read(MOST_CHARACTERS + 1)
    except UnicodeDecodeError:
        raise ScheduleError(f"{name}: a schedule must be text in UTF-8") from None
    if len(text) > MOST_CHARACTERS:
        raise ScheduleError(f"{name}: a schedule must have at most {MOST_CHARACTERS:,} characters")
    return from_text(text, name)
