"""Schedules as text: against time for a README, as lists for an error message."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from pipeline.schedules.action import Action
from pipeline.schedules.timeline import Timeline, stages_in
from pipeline.schedules.words import counted

MOST_LETTERS = 1_000_000  # of a drawing against time
MOST_CELLS = 400  # of orders that are drawn whole
CONTEXT = 4  # cells on either side of a marked one where they are not


def draw(timeline: Timeline, *, width: int | None = None) -> str:
    """Draw what each rank does against time, one row a rank.

        rank 0 |F0|F1|     |B0   |F2|B1   |  |B2   |
        rank 1    |F0|B0   |F1|B1   |F2|B2   |

    The shortest action is one column wide and the others in proportion; space is idle time. A full backward is a
    wide B. A rank with several stages names the stage first, as in `2F0`. A pair is one box, as `0F4&3B1`.

    Args:
        width: letters of a line; what is longer goes on in further lines below.
    Raises:
        ValueError: there is no room for one action in a line, or it would have more than MOST_LETTERS, because the
            times differ so much or there are so many.
    """
    several_stages = any(len(stages_in(row)) > 1 for row in timeline.rows)

    def label(action: Action) -> str:
        if action.beside is not None:
            return "&".join(map(label, action.singles))
        # B and BW are one letter, so that the micro-batch numbers stand one under the other.
        stage = str(action.stage) if several_stages else ""
        return f"{stage}{action.kind.value[0]}{action.microbatch}"

    shortest = min(end - start for row in timeline.rows for _, start, end in row)
    # With its bar. A pair's label is long, and has the width of its own time.
    column = 1 + max(len(label(single)) for row in timeline.rows for timed in row for single in timed.action.singles)
    pairs = [(action, end - start) for row in timeline.rows for action, start, end in row if action.beside is not None]
    column = max([column, *(math.ceil((1 + len(label(action))) * shortest / time) for action, time in pairs)])

    num_letters = timeline.makespan / shortest * column * len(timeline.rows)
    if not num_letters <= MOST_LETTERS:
        raise ValueError(
            f"a drawing has at most {MOST_LETTERS:,} letters, got {num_letters:,.3g}: the shortest action takes "
            f"{shortest:g} of {timeline.makespan:g} in all, on {counted(len(timeline.rows), 'rank')}"
        )

    def place(time: float) -> int:
        # Rounding down keeps every action at least a column wide; the last term is for times that are
        # a rounding error below a whole column.
        return int(time / shortest * column + 1e-6)

    lines = {}
    labels: set[int] = set()  # where letters are
    for rank, row in enumerate(timeline.rows):
        line = [" "] * (place(row[-1].end) + 1)
        for action, start, end in row:
            left, right = place(start), place(end)
            line[left] = line[right] = "|"
            line[left + 1 : right] = label(action).ljust(right - left - 1)
            labels.update(range(left + 1, left + 1 + len(label(action))))
        lines[rank] = "".join(line)
    if width is None:
        return _with_rank_numbers(lines)
    room = width - len(f"rank {len(lines) - 1} ")
    if room <= column:
        raise ValueError(
            f"width must have room for an action, at least {width - room + column + 1} letters, got {width}"
        )
    length = max(map(len, lines.values()))
    bands = [0]
    while bands[-1] + room < length:
        most = bands[-1] + room - 1
        bands.append(next((at for at in range(most, bands[-1], -1) if at not in labels), most))
    return "\n\n".join(
        _with_rank_numbers(
            # a bar on the edge ends one line and begins the next
            {rank: line[begin:end] + "|" * (line[end : end + 1] == "|") for rank, line in lines.items()}
        )
        for begin, end in zip(bands, [*bands[1:], length], strict=True)
    )


def draw_order(orders: Sequence[Sequence[Action | str]], mark: Collection[tuple[int, int]] = ()) -> str:
    """Draw the orders as written, the cells (rank, index) of `mark` in brackets.

        rank 0  0F0   0F1   0BW0  0BW1
        rank 1  1F0   1BW0 [1BW0] 1F1 <-- here

    A marked index behind the end of an order is drawn as an empty cell: something is missing there.
    """
    width = 2 + max((len(str(action)) for order in orders for action in order), default=0)

    def cell(rank: int, index: int) -> str:
        text = str(orders[rank][index]) if index < len(orders[rank]) else ""
        return (f"[{text}]" if (rank, index) in mark else f" {text} ").ljust(width)

    marked_ranks = {rank for rank, _ in mark}
    is_small = sum(map(len, orders)) <= MOST_CELLS
    shown = range(len(orders)) if is_small else sorted(marked_ranks)
    lines = {}
    for rank in shown:
        indices = range(len(orders[rank]) + 1)
        if not is_small:
            marked = [index for r, index in mark if r == rank]
            indices = range(max(0, marked[0] - CONTEXT), min(len(orders[rank]), marked[0] + CONTEXT) + 1)
        line = "".join(cell(rank, index) for index in indices).rstrip()
        lines[rank] = "... " * (indices[0] > 0) + line + " <-- here" * (rank in marked_ranks)
    return _with_rank_numbers(lines)


def _with_rank_numbers(lines: Mapping[int, str]) -> str:
    width = len(str(max(lines, default=0)))
    return "\n".join(f"rank {rank:{width}} {line}".rstrip() for rank, line in lines.items())
