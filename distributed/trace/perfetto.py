"""What ran when, as a file that Perfetto (ui.perfetto.dev) and Chrome's about:tracing open.

An Event says nothing of schedules, so that a simulated timeline and the log of a real run become the same picture.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple


class Event(NamedTuple):
    """Something that a rank did.

    Of one rank and category events do not overlap. Times are in seconds.
    """

    rank: int
    name: str
    start: float
    end: float
    category: str


def perfetto(rows: Sequence[tuple[int, str, float, float, str]]) -> str:
    """Write events in the Trace Event Format.

    Each rank is a process, and in it each category a thread.

    Args:
        rows: Events, or tuples of the same five, as `pipeline.events` makes them of a simulated timeline.

    Source: "Trace Event Format", the Chromium project; X is a complete event, M names things, times in microseconds.
    """
    events = [Event(*row) for row in rows]
    categories = list(dict.fromkeys(event.category for event in events))
    tracks = sorted({(event.rank, categories.index(event.category)) for event in events})
    records: list[dict[str, Any]] = []
    for rank in sorted({rank for rank, _ in tracks}):
        records.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        records.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
    for rank, index in tracks:
        records.append(
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": index, "args": {"name": categories[index]}}
        )
    for rank, name, start, end, category in events:
        place = {"pid": rank, "tid": categories.index(category)}
        # Nanoseconds are exact enough, and rounding keeps neighbours from overlapping by the last bit of a float.
        begin = round(start * 1e6, 3)
        duration = round(round(end * 1e6, 3) - begin, 3)
        records.append({"ph": "X", "name": name, "cat": category, **place, "ts": begin, "dur": duration})
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": records}, indent=0) + "\n"
