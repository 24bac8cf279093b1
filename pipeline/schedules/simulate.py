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
    times = {
        kind: each(name, time, num_stages, "stages", positive=True)
        for kind, name, time in (
            (Kind.F, "forward", forward),
            (Kind.B, "backward_input", backward_input),
            (Kind.W, "backward_weight", backward_weight),
        )
    }
    check_skips(skips, num_stages)
    sizes = each("message_bytes", message_bytes, num_stages - 1, "boundaries")
    through = each("skip_bytes", skip_bytes, len(skips), "skips")
    transfer: dict[Boundary, float] = {boundary: size / bandwidth for boundary, size in enumerate(sizes)}
    transfer |= {skip: size / bandwidth for skip, size in zip(skips, through, strict=True)}
    clock = _Clock(orders, num_stages, times, overlap, latency, transfer, link_of, skips)
    return Timeline(clock.run())


class _Clock:
    """Runs orders in the order of time, as messages that share a link need it."""

    def __init__(
        self,
        orders: Sequence[Sequence[Action]],
        num_stages: int,
        times: Mapping[Kind, Sequence[float]],
        overlap: float,
        latency: float,
        transfer: Mapping[Boundary, float],
        link_of: LinkOf | None,
        skips: Skips,
    ) -> None:
        self._orders = orders
        self._num_stages = num_stages
        self._times = times
        self._overlap = overlap
        self._latency = latency
        self._transfer = transfer  # time on a link, by boundary or skip
        self._skips = skips
        self._link_of = link_of
        self._rank_of = {s.stage: rank for rank, order in enumerate(orders) for action in order for s in action.singles}
        self._rows: list[list[Timed]] = [[] for _ in orders]
        self._there: dict[tuple[int, Action], float] = {}  # when a rank has done a part, or has a message
        self._link_free: dict[Hashable, float] = {}
        self._ends: list[tuple[float, int]] = []  # of actions under way, with their ranks

    def run(self) -> list[list[Timed]]:
        """Return what every rank did when."""
        for rank in range(len(self._orders)):
            self._start(rank)
        while self._ends:
            _, rank = heappop(self._ends)
            for other in {rank, *self._finish(rank)}:
                if not self._rows[other] or (other, self._rows[other][-1].action.parts[0]) in self._there:
                    self._start(other)
        if sum(map(len, self._rows)) < sum(map(len, self._orders)):
            deque(walk(self._orders, self._num_stages), maxlen=0)  # for its error
        return self._rows

    def _start(self, rank: int) -> None:
        """Start a free rank's next action, if it is known when its inputs are there."""
        row, order = self._rows[rank], self._orders[rank]
        if len(row) == len(order):
            return
        action = order[len(row)]
        since = [self._there.get((rank, need)) for need in self._inputs(rank, action)]
        if None in since:
            return
        start = max([row[-1].end if row else 0.0, *(time for time in since if time is not None)])
        end = start + self._time(action)
        if not start < end < math.inf:
            raise ValueError(f"the times differ by more than numbers can tell: {action} from {start:g} to {end:g}")
        row.append(Timed(action, start, end))
        heappush(self._ends, (end, rank))

    def _time(self, action: Action) -> float:
        """Return how long an action takes."""
        times = [sum(self._times[part.kind][part.stage] for part in single.parts) for single in action.singles]
        return sum(times) - (self._overlap * min(times) if action.kind is Kind.PAIR else 0.0)

    def _inputs(self, rank: int, action: Action) -> list[Action]:
        """Return what an action waits for: parts on its own rank, and messages from others."""
        arrivals = action.arrivals(self._num_stages, self._skips)
        is_here = [self._rank_of.get(arrival.partner.stage) == rank for arrival in arrivals]
        return [*action.before, *(a.carries if here else a for a, here in zip(arrivals, is_here, strict=True))]

    def _finish(self, rank: int) -> list[int]:
        """Note that a rank's last action has ended; return the other ranks that get its results."""
        action, _, end = self._rows[rank][-1]
        for part in action.parts:
            self._there[rank, part] = end
        dests = []
        for departure in action.departures(self._num_stages, self._skips):
            dest = self._rank_of.get(departure.partner.stage, rank)
            if dest != rank:
                self._there[dest, departure.partner] = self._arrival(departure, rank, dest, end)
                dests.append(dest)
        return dests

    def _arrival(self, departure: Action, rank: int, dest: int, made: float) -> float:
        """Return when a message is there whose data was made at a time."""
        first, last = sorted((departure.stage, departure.partner.stage))
        transfer = self._transfer[first if departure.other is None else (first, last)]
        link = None if self._link_of is None else self._link_of(rank, dest)
        if link is None:
            return made + (self._latency + transfer)
        begin = max(made, self._link_free.get(link, 0.0))
        self._link_free[link] = begin + transfer
        return begin + (self._latency + transfer)
