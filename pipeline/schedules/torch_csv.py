"""The CSV of torch.distributed.pipelining, which torchtitan reads with `pipeline_parallel_schedule_csv`.

The grid is the same, a row a rank, but the letters are not:

    here    F    B (input half)    W    BW (both)
    there   F    I                 W    B

PyTorch writes a pair, `0F1&7BW0` here, as `(0F1;7B0)OVERLAP_F_B`. Its files may hold communication; that is left out,
since it follows from the order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipeline.schedules.action import Action, Kind, ScheduleError, pair
from pipeline.schedules.csv_file import cells_of

_THERE = {Kind.F: "F", Kind.B: "I", Kind.W: "W", Kind.BW: "B"}
_HERE = {letter: kind for kind, letter in _THERE.items()}
_COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")
_OVERLAPPED = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")
_CELL = re.compile(r"([0-9]+)([A-Z_]+)([0-9]*)")


def dump_torch(orders: Sequence[Sequence[Action]]) -> str:
    """Write orders as PyTorch's `_PipelineScheduleRuntime` reads them.

    Raises:
        ValueError: an order holds communication, which PyTorch adds itself.
    """
    for order in orders:
        for action in order:
            if not action.kind.is_compute:
                raise ValueError(f"an order holds compute actions only (F, B, W, BW, F&B), got {action}")
    return "".join(",".join(map(_written, order)) + "\n" for order in orders)


def parse_torch(text: str) -> list[list[Action]]:
    """Read the orders of such a file; nothing but the cells is checked.

    Raises:
        ScheduleError: a cell is nothing that PyTorch writes, or it is no table.
    """
    return [
        [action for index, cell in enumerate(row) for action in _read(cell, rank, index)]
        for rank, row in enumerate(cells_of(text))
    ]


def _written(action: Action) -> str:
    if action.beside is not None:
        return f"({';'.join(map(_written, action.singles))})OVERLAP_F_B"
    return f"{action.stage}{_THERE[action.kind]}{action.microbatch}"


def _read(cell: str, rank: int, index: int) -> list[Action]:
    """Return the action of a cell; none where it is blank or communication."""
    overlapped = _OVERLAPPED.fullmatch(cell)
    try:
        if overlapped is not None:
            return [pair(*map(_single, overlapped.groups()))]
        match = _CELL.fullmatch(cell)
        is_communication = match is not None and match[2] in _COMMUNICATION
        return [] if not cell or is_communication else [_single(cell)]
    except ValueError:
        raise ScheduleError(
            f"a cell of PyTorch is a stage, one of {', '.join(_HERE)}, and a micro-batch, as 1F0, or two of different "
            f"micro-batches overlapped, as (0F1;1B0)OVERLAP_F_B; got {cell!r} on rank {rank}",
            [(rank, index)],
        ) from None


def _single(cell: str) -> Action:
    match = _CELL.fullmatch(cell.strip())
    if match is None or match[2] not in _HERE or not match[3]:
        raise ValueError
    return Action(_HERE[match[2]], int(match[1]), int(match[3]))
