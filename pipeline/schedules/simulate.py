"""When each action of a schedule runs, and what it costs in time and memory.

The model of a machine: a rank runs its order one action at a time; an action starts when its rank is free and its
inputs have arrived; what comes from another rank arrives `latency` and its transfer time after it was made; a send
never blocks. Messages do not slow each other, unless they share a link: there they go one after another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import product
from operator import add
from typing import NamedTuple

from pipeline.schedules.action import Action, Kind, ScheduleError, Skips, check_skips
from pipeline.schedules.per_stage import PerStage, each
from pipeline.schedules.timeline import Timed, Timeline

LinkOf = Callable[[int, int], Hashable]
"""`link_of(source, dest)`: what the messages from one rank to another go through; None where nothing is shared."""


Boundary = int | tuple[int, int]
"""Between what stages a message goes: behind which of two neighbours, or the two of a skip connection."""


def link_of_host(ranks_per_host: int) -> LinkOf:
    """Return the links of hosts: all messages that leave one share its link, and those inside share nothing."""

    def link_of(source: int, dest: int) -> Hashable:
        host = source // ranks_per_host
        return None if host == dest // ranks_per_host else host

    return link_of


def walk(orders: Sequence[Sequence[Action]], num_stages: int) -> Iterator[tuple[int, Action]]:
    """Yield (rank, action) in an order in which everything finds its inputs done.

    Raises:
        ScheduleError: no rank can go on; its cells are where each one is stuck.
    """
    done: set[Action] = set()
    at = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order) and done.issuperset(order[at[rank]].needs(num_stages)):
                action = order[at[rank]]
                done.update(action.parts)
                at[rank] += 1
                moved = True
                yield rank, action
    stuck = [(rank, index) for rank, index in enumerate(at) if index < len(orders[rank])]
    if stuck:
        waits = []
        for rank, index in stuck:
            action = orders[rank][index]
            missing = [need for need in action.needs(num_stages) if need not in done]
            waits.append(f"rank {rank} is at {action} and needs {', '.join(map(str, missing))}")
        raise ScheduleError(f"no rank can go on: {'; '.join(waits)}", stuck)


def simulate(
    orders: Sequence[Sequence[Action]],
    *,
    num_stages: int,
    forward: PerStage = 1.0,
    backward_input: PerStage = 1.0,
    backward_weight: PerStage = 1.0,
    latency: float = 0.0,
    message_bytes: PerStage = 0.0,
    bandwidth: float = math.inf,
    overlap: float = 0.0,
    link_of: LinkOf | None = None,
    skips: Skips = (),
    skip_bytes: PerStage = 0.0,
) -> Timeline:
    """Run the orders against a clock.

    Args:
        orders: per rank, compute actions that `validate` accepts.
        forward, backward_input, backward_weight: time of F, B and W; BW takes B + W.
        latency: time from the end of an action until another rank has the first byte of its result.
        message_bytes: size of an activation, and of its gradient: one for every boundary between two stages,
            or one for each, that behind stage 0 first.
        bandwidth: bytes that reach another rank in one unit of time.
        overlap: how much of the shorter one of a pair runs beside the longer one: 0 where a pair takes as long as both
            one after the other, 1 where it takes as long as the longer one.
        link_of: which messages share a link, as `link_of_host`; by default none. A link carries what was made first
            first, and the next message when the last byte of that has left.
        skips: connections between stages beside those of neighbours.
        skip_bytes: size of what a skip connection takes, and of its gradient: one for all, or one for each.
    Raises:
        ValueError: a time is not positive or not one a stage, latency or a size is negative, bandwidth is not
            positive, a rank has nothing to do, or as `check_skips`.
        ScheduleError: the orders cannot be run to their end.
    """
    for rank, order in enumerate(orders):
        if not order:
            raise ValueError(f"every rank needs at least one action, got none on rank {rank}")
    if not 0 <= latency < math.inf:
        raise ValueError(f"latency must be at least 0 and finite, got {latency}")
    if not 0 <= overlap <= 1:
        raise ValueError(f"overlap must be from 0 to 1, got {overlap}")
    if not bandwidth > 0:
        raise ValueError(f"bandwidth must be positive, got {bandwidth}")
    f, b, w = (
        each(name, time, num_stages, "stages", positive=True)
        for name, time in (
            ("forward", forward),
            ("backward_input", backward_input),
            ("backward_weight", backward_weight),
        )
    )
    times = {Kind.F: f, Kind.B: b, Kind.W: w, Kind.BW: tuple(map(add, b, w))}
    check_skips(skips, num_stages)
    sizes = each("message_bytes", message_bytes, num_stages - 1, "boundaries")
    through = each("skip_bytes", skip_bytes, len(skips), "skips")
    transfer: dict[Boundary, float] = {boundary: size / bandwidth for boundary, size in enumerate(sizes)}
    transfer |= {skip: size / bandwidth for skip, size in zip(skips, through, strict=True)}
    rank_of = {s.stage: rank for rank, order in enumerate(orders) for action in order for s in action.singles}
    clock = _Clock(orders, times, overlap, latency, link_of, _Lines(num_stages, skips, transfer, rank_of))
    rows = clock.run()
    if sum(map(len, rows)) < sum(map(len, orders)):
        deque(walk(orders, num_stages), maxlen=0)  # for its error
    return Timeline(rows)


class _Line(NamedTuple):
    """The way of what F or B makes on one stage to an action that waits for it, on this stage or another.

    Attributes:
        dest: the rank at its end.
        transfer: time on a link.
        there: when it is there, by micro-batch.
    """

    dest: int
    transfer: float
    there: dict[int, float]


class _Lines:
    """All lines between the actions of stages, by kind and stage: those that end there, and those that start there."""

    def __init__(
        self, num_stages: int, skips: Skips, transfer: Mapping[Boundary, float], rank_of: Mapping[int, int]
    ) -> None:
        actions = list(product((Kind.F, Kind.B, Kind.W, Kind.BW), range(num_stages)))
        self.into: dict[tuple[Kind, int], list[_Line]] = {action: [] for action in actions}
        self.out_of: dict[tuple[Kind, int], list[_Line]] = {action: [] for action in actions}
        for stage in range(num_stages):
            ahead = [(stage + 1, transfer[stage])] if stage + 1 < num_stages else []
            back = [(stage - 1, transfer[stage - 1])] if stage else []
            ahead += [(taker, transfer[giver, taker]) for giver, taker in sorted(skips) if giver == stage]
            back += [(giver, transfer[giver, taker]) for giver, taker in sorted(skips) if taker == stage]
            own = rank_of.get(stage, 0)
            ways = [(Kind.F, Kind.B, stage, 0.0), (Kind.B, Kind.W, stage, 0.0)]
            ways += [(Kind.F, Kind.F, taker, time) for taker, time in ahead]
            ways += [(Kind.B, Kind.B, giver, time) for giver, time in back]
            for made, waits, other, time in ways:
                line = _Line(rank_of.get(other, own), time, {})
                self.out_of[made, stage].append(line)
                self.into[waits, other].append(line)
        for stage in range(num_stages):
            self.into[Kind.BW, stage] = self.into[Kind.B, stage]
            self.out_of[Kind.BW, stage] = self.out_of[Kind.B, stage]


class _Clock:
    """Runs orders in the order of time, as messages that share a link need it."""

    def __init__(
        self,
        orders: Sequence[Sequence[Action]],
        times: Mapping[Kind, Sequence[float]],
        overlap: float,
        latency: float,
        link_of: LinkOf | None,
        lines: _Lines,
    ) -> None:
        self._orders = orders
        self._times = times
        self._overlap = overlap
        self._latency = latency
        self._link_of = link_of
        self._lines = lines
        self._rows: list[list[Timed]] = [[] for _ in orders]
        self._link_free: dict[Hashable, float] = {}
        self._ends: list[tuple[float, int]] = []  # of actions under way, with their ranks

    def run(self) -> list[list[Timed]]:
        """Return what every rank did when, until no rank can go on."""
        is_free = [not self._start(rank) for rank in range(len(self._orders))]
        while self._ends:
            _, rank = heappop(self._ends)
            is_free[rank] = True
            for other in (rank, *self._finish(rank)):
                if is_free[other] and self._start(other):
                    is_free[other] = False
        return self._rows

    def _start(self, rank: int) -> bool:
        """Start a free rank's next action, if it is known when its inputs are there."""
        row, order = self._rows[rank], self._orders[rank]
        if len(row) == len(order):
            return False
        action = order[len(row)]
        start = row[-1].end if row else 0.0
        into = self._lines.into
        for kind, stage, i, _, _ in action.singles:
            for line in into[kind, stage]:
                there = line.there.get(i)
                if there is None:
                    return False
                if there > start:
                    start = there
        end = start + self._time(action)
        if not start < end < math.inf:
            raise ValueError(f"the times differ by more than numbers can tell: {action} from {start:g} to {end:g}")
        row.append(Timed(action, start, end))
        heappush(self._ends, (end, rank))
        return True

    def _time(self, action: Action) -> float:
        """Return how long an action takes."""
        if action.beside is None:
            return self._times[action.kind][action.stage]
        both = [self._times[single.kind][single.stage] for single in action.singles]
        return sum(both) - self._overlap * min(both)

    def _finish(self, rank: int) -> list[int]:
        """Note that a rank's last action has ended; return the other ranks that get its results."""
        action, _, end = self._rows[rank][-1]
        dests = []
        for kind, stage, i, _, _ in action.singles:
            for line in self._lines.out_of[kind, stage]:
                if line.dest == rank:
                    line.there[i] = end
                else:
                    line.there[i] = self._arrival(rank, line, end)
                    dests.append(line.dest)
        return dests

    def _arrival(self, rank: int, line: _Line, made: float) -> float:
        """Return when a message is there whose data was made at a time."""
        link = None if self._link_of is None else self._link_of(rank, line.dest)
        if link is None:
            return made + (self._latency + line.transfer)
        begin = max(made, self._link_free.get(link, 0.0))
        self._link_free[link] = begin + line.transfer
        return begin + (self._latency + line.transfer)
