"""Orders that are only begun: what each rank may do next, and how short the step can still become.

What has started is known by counts alone, since micro-batches are alike and go through a stage in turn. Actions are
started in the order of time, and of ranks where times are equal. So what a rank could have started before the last
start, it has passed over: it waits, and takes none of that before something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pipeline.schedules.problem import Problem
from pipeline.schedules.room import Room, end_of, windows

_NEVER = float("inf")


class Partial(NamedTuple):
    """Orders that are begun. An action is a number here: stages in turn, all F first, then all B, then all W.

    Attributes:
        started: how many have, a number.
        free: when each rank has ended what it started.
        arrived: when the inputs are there of those that have not started, a number; only what comes from another rank.
        held: memory that each rank holds.
        now, rank: the last start.
        number: what started there; -1 at the beginning.
        before: the orders without it.
    """

    started: tuple[int, ...]
    free: tuple[float, ...]
    arrived: tuple[tuple[float, ...], ...]
    held: tuple[float, ...]
    now: float
    rank: int
    number: int
    before: Partial | None


class Partials:
    """How the orders of a problem go on from where they are begun."""

    def __init__(self, problem: Problem, *, span: bool) -> None:
        last, stages = problem.num_stages - 1, range(problem.num_stages)
        self._m = problem.num_microbatches
        self._stages = problem.num_stages
        self._ranks = problem.num_ranks
        self.size = 3 * self._stages * self._m
        self._room = Room(problem)
        self._kept = problem.activations
        self._deferred = problem.deferred
        self._limit = problem.limit
        self._own = problem.stages_of_rank
        self._rank = [problem.rank_of(s, self._ranks) for s in stages] * 3
        self._time = [*problem.forward, *problem.backward_input, *problem.backward_weight]
        self._change = [x for changes in self._room.change for x in changes]
        # What each waits for: of the stage before, of the stage behind, of its own.
        self._waits_for = [s - 1 for s in stages]
        self._waits_for += [self._stages + s + 1 if s < last else s for s in stages]
        self._waits_for += [self._stages + s for s in stages]
        delay = [0.0, *problem.transfer, *problem.transfer, 0.0, *(0.0 for _ in stages)]
        self._delay = delay  # from the end of that until it is here
        self._is_local = [b < 0 or self._rank[a] == self._rank[b] for a, b in enumerate(self._waits_for)]
        self._feeds = {b: a for a, b in enumerate(self._waits_for) if not self._is_local[a]}
        chain = [*stages, *(self._stages + s for s in reversed(stages)), *(2 * self._stages + s for s in stages)]
        self._chain = chain  # each behind what it waits for
        self._choices = [[a for s in own for a in (self._stages + s, s, 2 * self._stages + s)] for own in self._own]
        # From the end of an action until what is to be short is over, at least. A span begins with a rank's first F.
        head = [0.0]
        for s in range(last):
            head.append(head[-1] + problem.forward[s] + problem.transfer[s])
        self._begin = [head[own[0]] if span else 0.0 for own in self._own]
        tail = [-self._begin[rank] for rank in self._rank]
        for a in reversed(chain):
            b = self._waits_for[a]
            if b >= 0:
                tail[b] = max(tail[b], delay[a] + self._time[a] + tail[a])
        self._by_tail = [[(tail[a], a) for a in sorted(own, key=lambda a: -tail[a])] for own in self._choices]
        # F on the first stage, B on the last, how many fit between them, for how long, and what comes after the last.
        self._windows = [
            (w.first, self._stages + w.last, w.most, w.length, tail[self._stages + w.last]) for w in windows(problem)
        ]
        self._trip = [0.0] * self._stages  # of a micro-batch, from its F on a stage to the end of its B there
        there_and_back = 0.0
        for s in reversed(stages):
            there_and_back += problem.forward[s] + problem.backward_input[s]
            self._trip[s] = there_and_back
            there_and_back += 2 * problem.transfer[s - 1] if s else 0.0
        self._last_weight = [min(problem.backward_weight[s] for s in own) for own in self._own]

    def begin(self) -> Partial:
        """Return orders in which nothing has started."""
        count = (0,) * (3 * self._stages)
        return Partial(count, (0.0,) * self._ranks, ((),) * len(count), (0.0,) * self._ranks, 0.0, 0, -1, None)

    def kind_and_stage(self, number: int) -> tuple[int, int]:
        """Return what a number stands for: 0, 1 or 2 for F, B or W, and the stage."""
        return divmod(number, self._stages)

    def next(self, partial: Partial) -> Iterator[Partial]:
        """Yield the orders with one more start, all that can become a shortest one.

        Not those in which a rank idles for so long that it could have done something which takes no memory: to do it
        there would have delayed nothing.
        """
        count, free, arrived, held, now, last_rank, _, _ = partial
        found = []
        too_late = _NEVER
        for rank in range(self._ranks):
            for a in self._choices[rank]:
                done, b = count[a], self._waits_for[a]
                if done == self._m:
                    continue
                start = free[rank]
                if self._is_local[a]:
                    if b >= 0 and done == count[b]:
                        continue
                elif not arrived[a]:
                    continue
                elif arrived[a][0] > start:
                    start = arrived[a][0]
                if start < now or (start == now and rank < last_rank) or start >= too_late:
                    continue
                takes_none = self._change[a] <= 0 or self._room.is_ample[rank]
                if a < self._stages:
                    if not self._room.allows(rank, a, held[rank], count):
                        continue
                elif not takes_none and held[rank] + self._change[a] > self._room.limit[rank]:
                    continue
                if takes_none:
                    too_late = min(too_late, start + self._time[a])
                found.append((start, rank, a))
        for start, rank, a in found:
            if start < too_late:
                yield self._with(partial, start, rank, a)

    def _with(self, partial: Partial, start: float, rank: int, a: int) -> Partial:
        end = start + self._time[a]
        count, free, held = list(partial.started), list(partial.free), list(partial.held)
        count[a] += 1
        free[rank] = end
        held[rank] += self._change[a]
        arrived = partial.arrived
        to = self._feeds.get(a)
        if to is not None or not self._is_local[a]:
            queues = list(arrived)
            if not self._is_local[a]:
                queues[a] = queues[a][1:]
            if to is not None:
                queues[to] = (*queues[to], end + self._delay[to])
            arrived = tuple(queues)
        return Partial(tuple(count), tuple(free), arrived, tuple(held), start, rank, a, partial)

    def key(self, partial: Partial) -> tuple[object, ...]:
        """Return what is equal for orders that can go on in the same ways."""
        count, free, arrived, _, now, last_rank, _, _ = partial
        # What a rank passes over counts as -1, and what is there before it is free as there when it is free.
        from_when = [x if x > now or (x == now and r >= last_rank) else -1.0 for r, x in enumerate(free)]
        waiting = []
        for a, queue in enumerate(arrived):
            if queue:
                rank = self._rank[a]
                least = from_when[rank]
                if least >= 0:
                    waiting.append(tuple([x if x > least else least for x in queue]))
                else:
                    is_before = rank < last_rank
                    waiting.append(tuple([-1.0 if x < now or (x == now and is_before) else x for x in queue]))
        return (count, tuple(from_when), tuple(waiting))

    # -- what is still ahead ----------------------------------------------------------------------

    def outlook(self, partial: Partial) -> tuple[float, float]:
        """Return a time that nothing these orders become is below, and the sum over ranks; inf if they are stuck."""
        earliest = self._earliest(partial)
        if earliest is None:
            return _NEVER, _NEVER
        count, free, _, held, now, _, _, _ = partial
        time, stages, m = self._time, self._stages, self._m
        longest = together = 0.0
        for rank, own in enumerate(self._own):
            ready = max(free[rank], now)
            work = area = pending = 0.0
            first_backward = _NEVER
            room = self._room.limit[rank] - held[rank]
            for s in own:
                to_do_f, to_do_b, to_do_w = m - count[s], m - count[stages + s], m - count[2 * stages + s]
                work += to_do_f * time[s] + to_do_b * time[stages + s] + to_do_w * time[2 * stages + s]
                pending += (to_do_w - to_do_b) * time[2 * stages + s]
                room += (to_do_w - to_do_b) * self._deferred[s]
                if to_do_b:
                    start, b = earliest[stages + s], time[stages + s]
                    first_backward = min(first_backward, start)
                    under_way = to_do_b - to_do_f
                    until_end = under_way * (start + b - ready) + b * under_way * (under_way - 1) / 2
                    area += self._kept[s] * (to_do_f * self._trip[s] + until_end)
            if not work:
                longest = max(longest, free[rank] - self._begin[rank])
                together += free[rank]
                continue
            end = ready + work
            if first_backward < _NEVER:
                # Before it there are forwards for which there is room, and the weight halves of what is done.
                filled = ready + pending + self._forwards_time(own, count, room)
                end += max(0.0, first_backward - filled)
                # What is held, times for how long, is no more than the limit for all the time; one W comes after it.
                end = max(end, ready + area / self._limit[rank] + self._last_weight[rank])
            longest = max(longest, end - self._begin[rank])
            together += end
            # Actions with so much behind them, one after the other, from the first that can start.
            from_when, taken = _NEVER, 0.0
            for tail, a in self._by_tail[rank]:
                if count[a] < m:
                    from_when = min(from_when, earliest[a])
                    taken += (m - count[a]) * time[a]
                    longest = max(longest, from_when + taken + tail)
        for f, b, most, length, tail in self._windows:
            to_do = m - count[f]
            if to_do:
                inside = count[f] - count[b]
                first = earliest[f]
                slots = [max(first, earliest[b] + i * time[b]) for i in range(1, inside + 1)]
                slots += [first + i * time[f] for i in range(most - inside)]
                longest = max(longest, end_of(sorted(slots), length, to_do) + tail)
        return longest, together

    def _forwards_time(self, own: list[int], count: tuple[int, ...], room: float) -> float:
        """Return the time of the forwards that fit, as if they were divisible where a rank has several stages."""
        total = 0.0
        for s in sorted(own, key=lambda s: self._kept[s] / self._time[s]):
            fit: float = self._m - count[s]
            if self._kept[s] > 0:
                fit = min(fit, room / self._kept[s])
                if len(own) == 1:
                    fit = int(fit)
                room -= fit * self._kept[s]
            total += fit * self._time[s]
        return total

    def _earliest(self, partial: Partial) -> list[float] | None:
        """Return when the next of each number can start at the earliest; None if the ranks wait for each other.

        What a rank has passed over, or has no room for, comes after something else that the rank does. What that is
        may depend on others that wait, so times are lowered from inf on, until nothing changes.
        """
        count, free, arrived, _, now, _, _, _ = partial
        blocked = self._blocked(partial)
        earliest = [_NEVER] * len(count)
        time, rank_of = self._time, self._rank
        ready = [x if x > now else now for x in free]
        released = [_NEVER] * self._ranks
        while True:
            for a in self._chain:
                if count[a] == self._m:
                    continue
                rank, b = rank_of[a], self._waits_for[a]
                start = ready[rank]
                if self._is_local[a]:
                    if b >= 0 and count[a] == count[b] and earliest[b] + time[b] > start:
                        start = earliest[b] + time[b]
                else:
                    there = arrived[a][0] if arrived[a] else earliest[b] + time[b] + self._delay[a]
                    if there > start:
                        start = there
                if a in blocked and released[rank] > start:
                    start = released[rank]
                earliest[a] = start
            if not blocked:
                return earliest
            lower = [_NEVER] * self._ranks
            for rank in {rank_of[a] for a in blocked}:
                for a in self._choices[rank]:
                    if a not in blocked and count[a] < self._m and earliest[a] + time[a] < lower[rank]:
                        lower[rank] = earliest[a] + time[a]
            if lower == released:
                stuck = any(earliest[a] == _NEVER and count[a] < self._m for a in self._chain)
                return None if stuck else earliest
            released = lower

    def _blocked(self, partial: Partial) -> set[int]:
        """Return what cannot be the next action of its rank."""
        count, free, arrived, held, now, last_rank, _, _ = partial
        blocked = set()
        for rank in range(self._ranks):
            waits = free[rank] < now or (free[rank] == now and rank < last_rank)
            for a in self._choices[rank]:
                if count[a] == self._m:
                    continue
                if a < self._stages and not self._room.allows(rank, a, held[rank], count):
                    blocked.add(a)
                elif waits and self._is_local[a]:
                    b = self._waits_for[a]
                    if b < 0 or count[a] < count[b]:
                        blocked.add(a)
                elif waits and arrived[a]:
                    there = arrived[a][0]
                    if there < now or (there == now and rank < last_rank):
                        blocked.add(a)
        return blocked
