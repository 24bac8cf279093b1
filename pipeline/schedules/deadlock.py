"""Proof that the programs of all ranks come to their end, without a process.

Every receive names its source and its message, so what a message meets does not depend on timing, and a rank that goes
on never stops another. All interleavings therefore end alike: in one run in which each rank goes on wherever it can,
all reach their end, or no timing lets them. The run here is of the strictest MPI, in which a send is complete only
once its receive is posted; with buffers sends complete sooner, so what ends here ends there too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from pipeline.schedules.action import Action, Placement, ScheduleError, Skips

_CONTEXT = 2  # steps that a counter-example shows on either side of the one at fault


@dataclass(frozen=True)
class Collective:
    """A call that its ranks make together. Calls of the same ranks meet in the order in which each makes them."""

    name: str
    ranks: tuple[int, ...]

    def __repr__(self) -> str:
        return self.name


Step = Action | Collective

_Message = tuple[int, Action]
"""A message, by the receiving rank and the receive that takes it."""


class _Wait(NamedTuple):
    """Where a rank is, until `lacking()`, the ranks that have not done what it waits for, is empty."""

    at: int
    awaited: Step
    lacking: Callable[[], list[int]]


def check_deadlock_free(
    programs: Sequence[Sequence[Step]],
    *,
    rank_of: Placement,
    num_stages: int,
    skips: Skips = (),
    num_replicas: int = 1,
    closing: Sequence[Sequence[Collective]] = (),
    synchronous_sends: bool = False,
) -> None:
    """Refuse programs that do not all come to their end, run as the executor runs them.

        RECV          posts a receive and goes on
        SEND          starts a send and goes on; with synchronous_sends, waits until its receive is posted
        F, B, BW      wait for what comes from another rank; a backward then for the end of its forward's send
        collective    waits for all its ranks
        the end       waits for all sends; after it come the closing collectives

    (In the first step with a shape a header goes before the data, whose receive is posted by the action that waits
    for it. That changes nothing here: an action waits for the start of a send, and no rank ends before its actions.)

    Args:
        programs: of every rank, from `lower`; collectives may stand in them where they are launched.
        skips: as `lower` had them.
        num_replicas: copies of the pipeline; programs[k * P : (k + 1) * P] are those of replica k on P ranks.
        closing: collectives of every rank after its last send, in order.
    Raises:
        ScheduleError: ranks that wait for each other, as few as there are; `cells` says where they are stuck. Or a
            receive is posted that nothing takes, or a send comes before what it sends.
    """
    num_ranks = len(programs) // num_replicas
    steps = [[*program, *end] for program, end in zip(programs, closing or [[]] * len(programs), strict=True)]
    world = _World(rank_of, num_stages, skips, num_ranks)
    runs = [world.run(rank, steps[rank], len(programs[rank]), synchronous_sends) for rank in range(len(programs))]
    waits = {rank: next(run, None) for rank, run in enumerate(runs)}
    moved = True
    while moved:
        moved = False
        for rank, run in enumerate(runs):
            while (wait := waits[rank]) is not None and not wait.lacking():
                waits[rank] = next(run, None)
                moved = True
    stuck = {rank: wait for rank, wait in waits.items() if wait is not None}
    if stuck:
        raise _deadlock(steps, stuck)


@dataclass
class _World:
    """What has happened so far."""

    rank_of: Placement
    num_stages: int
    skips: Skips
    num_ranks: int
    started: Counter[_Message] = field(default_factory=Counter)
    posted: Counter[_Message] = field(default_factory=Counter)
    taken: Counter[_Message] = field(default_factory=Counter)
    calls: defaultdict[tuple[int, ...], defaultdict[int, list[str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def run(self, rank: int, steps: Sequence[Step], end: int, synchronous_sends: bool) -> Iterator[_Wait]:
        """Do the steps of one rank, and yield wherever it has to wait. Step `end` is the first closing one."""
        done: set[Action] = set()
        sent: dict[Action, tuple[_Message, int]] = {}  # in order; the message of each, and how many such were started
        for index, step in enumerate(steps[:end]):
            if isinstance(step, Collective):
                yield self._call(rank, index, step)
            elif step.kind.receives:
                self.posted[rank, step] += 1
            elif step.kind.sends:
                if step.carries not in done:
                    self._refuse(rank, steps, index, f"sends {step} before {step.carries} has made it")
                message = self._neighbour(rank, step.partner.stage), step.partner
                self.started[message] += 1
                sent[step] = message, self.started[message]
                if synchronous_sends:
                    yield from self._sent(index, *sent[step])
            else:
                for arrival in step.arrivals(self.num_stages, self.skips):
                    source = self._neighbour(rank, arrival.partner.stage)
                    if source == rank:
                        continue
                    yield from self._arrival(rank, index, arrival, source)
                    if arrival.confirms in sent:
                        yield from self._sent(index, *sent[arrival.confirms])
                done.update(step.parts)
        for message, count in sent.values():
            yield from self._sent(end, message, count)
        for index, step in enumerate(steps[:end]):
            if isinstance(step, Action) and step.kind.receives and self.posted[rank, step] > self.taken[rank, step]:
                self._refuse(rank, steps, index, f"posts {step} and no action takes it")
        for index, step in enumerate(steps[end:], start=end):
            assert isinstance(step, Collective)
            yield self._call(rank, index, step)

    def _refuse(self, rank: int, steps: Sequence[Step], index: int, what: str) -> NoReturn:
        raise ScheduleError(f"rank {rank} {what}\n{_excerpt(steps, rank, index)}", [(rank, index)])

    def _neighbour(self, rank: int, stage: int) -> int:
        """Return the rank of a stage in the same replica."""
        return rank - rank % self.num_ranks + self.rank_of(stage, self.num_ranks)

    def _arrival(self, rank: int, index: int, receive: Action, source: int) -> Iterator[_Wait]:
        """Wait until a receive is posted and its message has started."""
        message = rank, receive
        count = self.taken[message] + 1
        if self.posted[message] < count:
            yield _Wait(index, receive, lambda: [rank] * (self.posted[message] < count))
        if self.started[message] < count:
            yield _Wait(index, receive.partner, lambda: [source] * (self.started[message] < count))
        self.taken[message] = count

    def _sent(self, index: int, message: _Message, count: int) -> Iterator[_Wait]:
        """Wait until a send is complete, the count-th of its message."""
        if self.posted[message] < count:
            yield _Wait(index, message[1], lambda: [message[0]] * (self.posted[message] < count))

    def _call(self, rank: int, index: int, collective: Collective) -> _Wait:
        """Wait until all ranks make the same call, as their n-th over these ranks."""
        calls = self.calls[collective.ranks]
        calls[rank].append(collective.name)
        n = len(calls[rank])
        return _Wait(
            index, collective, lambda: [r for r in collective.ranks if calls[r][n - 1 : n] != [collective.name]]
        )


def _deadlock(steps: Sequence[Sequence[Step]], stuck: Mapping[int, _Wait]) -> ScheduleError:
    """Say why the ranks are stuck, by as few of them as will do."""
    waits_for: dict[int, list[int]] = {}
    for rank, wait in stuck.items():
        lacking = wait.lacking()
        never = [r for r in lacking if r not in stuck or wait.awaited not in steps[r][stuck[r].at :]]
        if never:
            return _error(steps, stuck, [rank], f", which rank {never[0]} never does")
        waits_for[rank] = lacking
    cycles = [cycle for rank in stuck if (cycle := _cycle(rank, waits_for))]
    return _error(steps, stuck, min(cycles, key=len), "")


def _cycle(start: int, waits_for: Mapping[int, Sequence[int]]) -> list[int]:
    """Return the shortest way from a rank along what it waits for back to itself; empty where there is none."""
    ways, seen = [[start]], set()
    for way in ways:  # grows while it runs: breadth first
        for rank in waits_for[way[-1]]:
            if rank == start:
                return way
            if rank not in seen:
                seen.add(rank)
                ways.append([*way, rank])
    return []


def _error(
    steps: Sequence[Sequence[Step]], stuck: Mapping[int, _Wait], ranks: Sequence[int], why: str
) -> ScheduleError:
    said, drawn = [], []
    for rank in sorted(ranks):
        index, awaited, lacking = stuck[rank]
        step = steps[rank][index] if index < len(steps[rank]) else None
        # A rank that waits for a receive where no action is, is behind its last one.
        where = step if isinstance(step, Action) or step == awaited else "its end"
        on = "" if why else f" on rank {', '.join(map(str, lacking()))}"
        said.append(f"rank {rank} in {where} waits for {awaited}{on}")
        drawn.append(_excerpt(steps[rank], rank, index))
    return ScheduleError(
        "\n".join([f"deadlock: {'; '.join(said)}{why}", *drawn]), [(r, stuck[r].at) for r in sorted(ranks)]
    )


def _excerpt(steps: Sequence[Step], rank: int, index: int) -> str:
    """Draw the steps around one, that one in brackets."""
    before, after = steps[max(0, index - _CONTEXT) : index], steps[index + 1 : index + 1 + _CONTEXT]
    cells = [*map(str, before), f"[{steps[index] if index < len(steps) else ''}]", *map(str, after)]
    more_before, more_after = index > _CONTEXT, index + 1 + _CONTEXT < len(steps)
    return f"rank {rank}  {'... ' * more_before}{'  '.join(cells)}{' ...' * more_after}"
