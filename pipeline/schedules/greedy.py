"""An order by rules: a free rank takes the most urgent action whose inputs are there, or waits for a more urgent one.

Which action is most urgent, and how long it pays to wait, is a `Rule`; trying rules is the search.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from pipeline.schedules.action import Action, Kind
from pipeline.schedules.problem import ROUNDING, Problem

_NEVER = float("inf")


@dataclass(frozen=True)
class Rule:
    """How a rank chooses.

    Of what could run, that with the smallest `offset + period * microbatch` goes first. With a period, offsets are a
    building block that repeats: when F, B and W of a stage would run for micro-batch 0. With none they rank the kinds.

    Attributes:
        offsets: per stage, those of its F, B and W.
        period: how much later each micro-batch is.
        target: the time of a step that is aimed at; an action is put off rather than started where it would make
            something more urgent so late that the step takes longer.
        first_patience: the idle time before its first backward that a rank accepts, rather than run something else.
        patience: the same after its first backward, for what is on its way to it.
        reserve: keep room free for a forward on each later stage of a rank, so that what has begun can always end.
            Without it more fits, and some rules get stuck.
        exceptions: by rank and place in its order, the kind (0, 1, 2 for F, B, W) and stage that goes there instead.
    """

    offsets: tuple[tuple[float, float, float], ...]
    period: float
    target: float
    first_patience: float = 0.0
    patience: float = 0.0
    reserve: bool = True
    exceptions: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict)


class Built(NamedTuple):
    """Orders, the makespan and the longest span that they take, and the ends of all ranks together.

    Attributes:
        gaps: rank and place in its order before which it idles.
    """

    orders: list[list[Action]]
    makespan: float
    span: float
    ends: float
    gaps: list[tuple[int, int]]


class _Choice(NamedTuple):
    """An action of one stage that its rank may choose."""

    kind: int
    stage: int
    duration: float
    offset: float
    held: float  # memory that it takes, or frees
    room: float  # memory that must be free to start it
    latest: float  # when the last micro-batch's must start
    pace: float  # how much earlier that of each micro-batch before it


_KINDS = (Kind.F, Kind.B, Kind.W)
_F, _B, _W = range(3)


def build(problem: Problem, rule: Rule) -> Built | None:
    """Build the orders of all ranks; None where the rule runs out of memory that nothing frees.

    Cost: about 5 microseconds an action and a stage of its rank.
    """
    m, num_stages = problem.num_microbatches, problem.num_stages
    last = num_stages - 1
    owner = [problem.rank_of(s, problem.num_ranks) for s in range(num_stages)]
    choices = _choices(problem, rule)
    count = [[0] * num_stages for _ in _KINDS]  # actions of this kind and stage that were started
    # When the inputs of each are there: of F and B they come from other stages, of W from B itself.
    ready: list[list[list[float]]] = [[[] for _ in range(num_stages)] for _ in _KINDS]
    ready[_F][0] = [0.0] * m
    free = [0.0] * problem.num_ranks
    held = [0.0] * problem.num_ranks
    room = [limit * (1 + ROUNDING) for limit in problem.limit]
    started: list[float | None] = [None] * problem.num_ranks
    no_backward = [True] * problem.num_ranks
    orders: list[list[Action]] = [[] for _ in range(problem.num_ranks)]
    gaps: list[tuple[int, int]] = []
    events = [(0.0, owner[0])]  # a rank looks for something to do
    while events:
        now, rank = heappop(events)
        if free[rank] > now:
            continue
        patience = rule.first_patience if no_backward[rank] else rule.patience
        chosen, key = None, _NEVER
        coming = []  # what is on its way
        only = rule.exceptions.get((rank, len(orders[rank])))
        for choice in choices[rank]:
            if only is not None and only != (choice.kind, choice.stage):
                continue
            index = count[choice.kind][choice.stage]
            arrivals = ready[choice.kind][choice.stage]
            if index == len(arrivals) or held[rank] + choice.room > room[rank]:
                continue
            own_key = choice.offset + rule.period * index
            if arrivals[index] > now:
                coming.append((own_key, arrivals[index], choice.latest - choice.pace * (m - 1 - index), choice.kind))
            elif own_key < key:
                chosen, key = choice, own_key
        if chosen is None:
            continue
        end = now + chosen.duration
        for own_key, arrival, latest, kind in coming:
            if own_key < key and not (no_backward[rank] and kind == _F):
                waits = arrival - now <= patience or (end > max(arrival, latest) and not no_backward[rank])
                if waits:
                    chosen = None
                    break
        if chosen is None:
            continue
        kind, stage = chosen.kind, chosen.stage
        microbatch = count[kind][stage]
        count[kind][stage] += 1
        held[rank] += chosen.held
        if started[rank] is None:
            started[rank] = now
        elif now > free[rank]:
            gaps.append((rank, len(orders[rank])))
        free[rank] = end
        orders[rank].append(Action(_KINDS[kind], stage, microbatch))
        heappush(events, (end, rank))
        if kind == _F:
            # The last stage's backward has its input where its forward is done.
            to, what = (stage + 1, _F) if stage < last else (stage, _B)
        elif kind == _B:
            no_backward[rank] = False
            ready[_W][stage].append(end)
            to, what = stage - 1, _B
        if kind != _W and to >= 0:
            arrival = end + (problem.transfer[min(stage, to)] if to != stage else 0.0)
            ready[what][to].append(arrival)
            heappush(events, (arrival, owner[to]))
    if any(done < m for done in count[_W]):
        return None
    spans = [end - start for start, end in zip(started, free, strict=True) if start is not None]
    return Built(orders, max(free), max(spans), sum(free), gaps)


def _choices(problem: Problem, rule: Rule) -> list[list[_Choice]]:
    """List what each rank can choose from."""
    choices = []
    for stages in problem.stages_of_rank:
        own = []
        for at, s in enumerate(stages):
            kept, later = problem.activations[s], problem.deferred[s]
            reserved = sum(problem.activations[after] for after in stages[at + 1 :]) if rule.reserve else 0.0
            if later > kept:  # or no backward finds room
                reserved += later - kept
            latest_f, pace_f, latest_b, pace_b = _latest(problem, rule.target, s)
            f, b, w = rule.offsets[s]
            own += [
                _Choice(_F, s, problem.forward[s], f, kept, kept + reserved, latest_f, pace_f),
                _Choice(_B, s, problem.backward_input[s], b, later - kept, later - kept, latest_b, pace_b),
                _Choice(_W, s, problem.backward_weight[s], w, -later, -later, _NEVER, 0.0),
            ]
        choices.append(own)
    return choices


def _latest(problem: Problem, target: float, stage: int) -> tuple[float, float, float, float]:
    """Return when F and B of the last micro-batch must start for a step to end in time, and how far apart all do.

    What is left then is the way to the last stage, and the way up to the first one and its weight half.
    """
    end = target - problem.backward_weight[0]
    for s in range(stage + 1):
        end -= problem.backward_input[s] + (problem.transfer[s - 1] if s else 0.0)
    latest_b = end
    last = problem.num_stages - 1
    for s in range(stage + 1, last + 1):
        end -= problem.backward_input[s] + problem.transfer[s - 1]
    for s in range(stage, last + 1):
        end -= problem.forward[s] + (problem.transfer[s] if s < last else 0.0)
    pace_b = max(problem.backward_input[: stage + 1])
    return end, max(pace_b, problem.forward[last] + problem.backward_input[last]), latest_b, pace_b
