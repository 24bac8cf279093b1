"""A recorded step as a Timeline, beside the one that the simulator predicts from its times.

    with pipe.recorder:
        pipe.step(x, y)
    measured = timeline(pipe.recorder.gather(comm))
    print(compare(predict(measured), measured))

Nothing here knows the recorder: an event is a plain row.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pipeline.schedules.action import Action, Kind
from pipeline.schedules.drawing.text import draw
from pipeline.schedules.simulate import simulate
from pipeline.schedules.timeline import Timed, Timeline, stages_in

Row = tuple[int, str, float, float, str]
"""An event as `distributed.trace` notes it: rank, name, start and end in seconds, category."""

_PARTS = {"forward": Kind.F, "backward_input": Kind.B, "backward_weight": Kind.W}


def timeline(events: Sequence[Row]) -> Timeline:
    """Return what the events of one step say about computing; time 0 is the start of the first action.

    Weight halves that ran side by side share their time evenly. An action that waits inside, for parameters that other
    ranks hold, is noted in parts: it lasts from the first to the last of them.

    Raises:
        ValueError: an action ran twice, so this is more than one step, or a rank computed nothing.
    """
    compute = sorted(_whole(events), key=lambda event: event[2])
    num_ranks = 1 + max((event[0] for event in events), default=0)
    rows: list[list[Timed]] = [[] for _ in range(num_ranks)]
    for rank, names, start, end, _ in compute:
        actions = [Action.parse(name) for name in names.split()]
        share = (end - start) / len(actions)
        begin = start - compute[0][2]
        rows[rank] += [Timed(action, begin + i * share, begin + (i + 1) * share) for i, action in enumerate(actions)]
    for rank, row in enumerate(rows):
        if not row:
            raise ValueError(f"a timeline needs an action on every rank, got none on rank {rank}")
        if len({action for action, _, _ in row}) < len(row):
            raise ValueError(f"a timeline is of one step, but an action ran twice on rank {rank}")
    return Timeline(rows)


def _whole(events: Sequence[Row]) -> list[Row]:
    """Return what ranks computed; parts of an action with nothing but waits between them are one."""
    found: list[Row] = []
    last: dict[int, tuple[int, bool]] = {}  # rank -> place of its last action in `found`, whether it waits since then
    states = (event for event in events if event[-1] in ("compute", "wait", "message", "step"))
    for event in sorted(states, key=lambda event: event[2]):
        rank, name, _, end, category = event
        place, waits = last.get(rank, (-1, False))
        if category == "wait":
            last[rank] = place, True
        elif category != "compute":
            last[rank] = -1, False
        elif waits and place >= 0 and found[place][1] == name:
            found[place] = (*found[place][:3], end, category)
            last[rank] = place, False
        else:
            last[rank] = len(found), False
            found.append(event)
    return found


def is_of_schedule(events: Sequence[Row]) -> bool:
    """Return whether what the ranks computed are actions of a schedule, and no plain forward and backward."""
    try:
        return bool([Action.parse(name) for event in events if event[-1] == "compute" for name in event[1].split()])
    except ValueError:
        return False


def events(timeline: Timeline, *, seconds: float = 1e-3) -> list[Row]:
    """List what a timeline shows, for `distributed.trace.perfetto`.

    Args:
        seconds: how long one unit of the timeline's time is.
    """
    return [
        (rank, str(action), start * seconds, end * seconds, "compute")
        for rank, row in enumerate(timeline.rows)
        for action, start, end in row
    ]


def replicas(timeline: Timeline) -> list[Timeline]:
    """Take the ranks of dp x pp apart: one timeline a replica, in which rank p is that of its pipeline.

    A pipeline has every stage once, so there are as many replicas as ranks that hold stage 0. The ranks of a pipeline
    follow each other, as in a `Mesh`.

    Raises:
        ValueError: the ranks do not fall into pipelines of the same stages.
    """
    stages_of = [stages_in(row) for row in timeline.rows]
    num_replicas = sum(0 in stages for stages in stages_of)
    size = len(stages_of) // max(num_replicas, 1)
    pipelines = [stages_of[start : start + size] for start in range(0, len(stages_of), max(size, 1))]
    if num_replicas * size != len(stages_of) or any(pipeline != pipelines[0] for pipeline in pipelines):
        shown = ", ".join(str(sorted(stages)) for stages in stages_of)
        raise ValueError(f"the ranks of dp x pp are pipelines of the same stages, one after another; got {shown}")
    return [Timeline(timeline.rows[k * size : (k + 1) * size]) for k in range(num_replicas)]


def times(*timelines: Timeline) -> dict[str, list[float]]:
    """Return the median time of F, B and W of every stage, as arguments of `simulate`. BW counts half to each of B, W.

    A pair counts only where a stage runs nothing of the kind alone, with a third of its time to each part.

    Args:
        timelines: of the same orders; the ranks of several replicas are measurements of the same stages.
    """
    taken: dict[tuple[int, Kind], list[float]] = {}
    in_pairs: dict[tuple[int, Kind], list[float]] = {}
    for row in (row for one in timelines for row in one.rows):
        for action, start, end in row:
            for part in action.parts:
                noted = in_pairs if action.kind is Kind.PAIR else taken
                noted.setdefault((part.stage, part.kind), []).append((end - start) / len(action.parts))
    taken = in_pairs | taken
    num_stages = 1 + max(stage for stage, _ in taken)
    return {
        name: [median(taken.get((stage, kind), [1.0])) for stage in range(num_stages)] for name, kind in _PARTS.items()
    }


def predict(*measured: Timeline, orders: Sequence[Sequence[Action]] | None = None, latency: float = 0.0) -> Timeline:
    """Simulate with the median times of the actions of measured timelines, each replica by its own.

    Args:
        measured: of the same orders, with the ranks of one pipeline or of all `replicas`.
        orders: what each pipeline is to run, on the same stages; by default what was measured.
        latency: see `simulate`; in seconds.
    Raises:
        ValueError: as `replicas`, and `simulate`.
    """
    rows: list[list[Timed]] = []
    for pipelines in zip(*map(replicas, measured), strict=True):
        taken = times(*pipelines)
        predicted = simulate(
            orders or [[action for action, _, _ in row] for row in pipelines[0].rows],
            num_stages=len(taken["forward"]),
            forward=taken["forward"],
            backward_input=taken["backward_input"],
            backward_weight=taken["backward_weight"],
            latency=latency,
        )
        rows += predicted.rows
    return Timeline(rows)


def compare(predicted: Timeline, measured: Timeline) -> str:
    """Draw both, and set their numbers side by side; times in seconds."""
    figures: dict[str, tuple[float, float]] = {
        "makespan, s": (predicted.makespan, measured.makespan),
        "span bubble, s": (predicted.span_bubble, measured.span_bubble),
        "span bubble rate": (predicted.span_bubble_rate, measured.span_bubble_rate),
        "bubble fraction": (predicted.bubble_fraction, measured.bubble_fraction),
        "efficiency": (predicted.efficiency, measured.efficiency),
    }
    for rank in range(len(measured.rows)):
        figures[f"makespan bubble of rank {rank}, s"] = predicted.makespan_bubble(rank), measured.makespan_bubble(rank)
    lines = ["predicted", draw(predicted), "measured", draw(measured), f"{'':<32}{'predicted':>10}{'measured':>10}"]
    return "\n".join([*lines, *(f"{name:<32}{a:>10.4f}{b:>10.4f}" for name, (a, b) in figures.items())])
