"""Pictures of a run, from the `metrics.jsonl` that it wrote: one JSON object a line, with the numbers of one step.

    {"step": 7, "loss": 2.41, "seconds": 0.062, "exposed_comm_seconds": 0.004, "tokens_per_second": 49500.0}

Only `step` is compulsory: a picture whose numbers are missing is not drawn. The first line that a process writes also
says on how many `ranks` it is, and as which `dp` and `pp`; where such a line is not the run's first, a picture marks
where the run was gone on with. Titles say what the screen and `summary.json` say.

It needs matplotlib, but neither a display nor matplotlib's global state, so that a training script may draw as it ends.
"""

import itertools
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minigrad.extras import needs
from minigrad.files import atomic_write
from minigrad.json_files import parse_json
from minigrad.words import counted

Numbers = NDArray[np.float64]
Metrics = Sequence[dict[str, Any]]

INCHES, DOTS_PER_INCH = (8, 5), 100
INK, MUTED, RULE, LINE, POINT = "#1f2933", "#616e7c", "#e4e7eb", "#2563ab", "#d9661f"
LONGEST_LINE = 2000  # points of the smooth line: more than a picture has columns


class Curve(NamedTuple):
    """A number over the steps of a run."""

    steps: Numbers
    values: Numbers


class Totals(NamedTuple):
    """What all steps of a run come to.

    Attributes:
        speed: samples or tokens a second; None where nothing was noted.
        waited: the share of the time in waits for other ranks, likewise.
    """

    seconds: float
    speed: float | None
    waited: float | None


class Plot(NamedTuple):
    """What one picture shows.

    Attributes:
        title: what one sees in it.
        axis: what the values are, with their unit.
        curve: one value a step.
        points: measured now and then, for validation.
        marks: steps before which the run was gone on with, and what is to be said of each.
        from_zero: whether the axis begins at 0.
        percent: whether the values are percentages.
    """

    name: str
    title: str
    axis: str
    curve: Curve
    points: Curve | None = None
    marks: Sequence[tuple[int, str]] = ()
    from_zero: bool = True
    percent: bool = False


def draw_plots(folder: str | PathLike[str], *, loss_unit: str = "nats a byte") -> list[Path]:
    """Draw loss, throughput and exposed communication of a run.

    They are PNG files in `folder`, beside its metrics.jsonl.

    Returns:
        The files; those of them that this run has numbers for.
    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: see read_metrics.
    """
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError(needs("a plot", "matplotlib", "draw"))
    folder = Path(folder)
    return [_draw(plot, folder) for plot in plots(read_metrics(folder / "metrics.jsonl"), loss_unit)]


def read_metrics(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Read the numbers of a run, in order of steps.

    A run that was resumed writes some steps twice: the later line holds. A line without its newline, which a kill left
    behind, is left out.

    Raises:
        ValueError: a line is no JSON object of numbers with a step; a number that was not finite is null.
    """
    by_step: dict[int, dict[str, Any]] = {}
    *lines, _ = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        where = f"line {number} of {path}"
        row: dict[str, Any] = parse_json(line, dict[str, float | None], where)
        step = row.get("step")
        if step is None or not step.is_integer() or step < 0:
            raise ValueError(f"{where}: each line of metrics has a step, an integer from 0, got {line[:60]!r}")
        by_step[int(step)] = by_step.get(int(step), {}) | row | {"step": int(step)}
    return [by_step[step] for step in sorted(by_step)]


def totals(metrics: Metrics) -> Totals:
    """Sum a run up."""
    seconds = sum(row.get("seconds") or 0.0 for row in metrics)
    key = speed_key(metrics)
    speeds = [(row[key], row.get("seconds") or 1.0) for row in metrics if key and row.get(key) is not None]
    speed = sum(each * taken for each, taken in speeds) / sum(taken for _, taken in speeds) if speeds else None
    both = [row for row in metrics if row.get("seconds") and row.get("exposed_comm_seconds") is not None]
    waited = sum(row["exposed_comm_seconds"] for row in both) / sum(row["seconds"] for row in both) if both else None
    return Totals(seconds, speed, waited)


def speed_key(metrics: Metrics) -> str | None:
    """Return the key of the run's speed, `"tokens_per_second"`."""
    return next((key for row in metrics for key in row if key.endswith("_per_second") and row[key] is not None), None)


def speed_text(speed: float) -> str:
    """Return a speed as a person reads it."""
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def marks_of(metrics: Metrics) -> list[tuple[int, str]]:
    """Return the steps with which another process began.

    Each comes with what it changed in the layout.
    """
    begun = [(row["step"], _layout(row)) for row in metrics if row.get("ranks")]
    return [
        (step, "resumed" if layout == before else f"goes on as {layout}")
        for (_, before), (step, layout) in itertools.pairwise(begun)
    ]


def _layout(row: dict[str, Any]) -> str:
    parts = [f"{name} {row[name]:g}" for name in ("dp", "pp") if row.get(name)]
    return " x ".join(parts) or counted(int(row["ranks"]), "rank")


def plots(metrics: Metrics, loss_unit: str) -> Iterator[Plot]:
    """Choose what to show of a run, and say in each title what it shows.

    Args:
        metrics: one a step.
        loss_unit: nats, say.
    """
    marks, whole = marks_of(metrics), totals(metrics)
    loss, validation = curve_of(metrics, "loss"), curve_of(metrics, "validation_loss")
    if len(loss.steps):
        title = f"Loss goes from {loss.values[0]:.3f} to {loss.values[-1]:.3f} {loss_unit}"
        if len(validation.steps):
            title += f", validation {validation.values[-1]:.3f}"
        yield Plot("loss", title, f"loss, {loss_unit}", loss, validation, marks, from_zero=False)

    key = speed_key(metrics)
    if key is not None and whole.speed is not None:
        unit = key.replace("_per_", " a ")
        title = f"{speed_text(whole.speed)} {unit} over all steps"
        yield Plot("throughput", title, unit, curve_of(metrics, key), marks=marks)

    both = [row for row in metrics if row.get("seconds") and row.get("exposed_comm_seconds") is not None]
    waited, seconds = curve_of(both, "exposed_comm_seconds"), curve_of(both, "seconds")
    if whole.waited is not None:
        share = Curve(waited.steps, 100 * waited.values / seconds.values)
        title = f"{whole.waited:.0%} of the time is spent waiting for other ranks"
        yield Plot("exposed_communication", title, "share of a step's time", share, marks=marks, percent=True)


def curve_of(metrics: Metrics, key: str) -> Curve:
    """Return the values of a key, where there are any.

    Args:
        metrics: one a step.
        key: a name in them.
    """
    rows = [(row["step"], row[key]) for row in metrics if row.get(key) is not None]
    steps, values = np.array(rows, np.float64).reshape(-1, 2).T
    return Curve(steps, values)


def smooth(curve: Curve) -> Curve:
    """Return the running median over a twenty-fifth of the run.

    It has no more points than a picture can show. The window is centred, and cut off where it would reach beyond the
    run.
    """
    length = len(curve.steps)
    places = np.unique(np.linspace(0, length - 1, min(length, LONGEST_LINE)).astype(int))
    half = length // 50
    medians = [np.median(curve.values[max(0, place - half) : place + half + 1]) for place in places]
    return Curve(curve.steps[places], np.array(medians))


def limits(plot: Plot, line: Curve) -> tuple[float, float]:
    """Return the ends of the axis.

    All values but single outliers lie between them; infinities lie outside.

    Args:
        plot: what is shown.
        line: its curve as it is drawn, smoothed.
    """
    curves = [plot.curve, line] + ([plot.points] if plot.points is not None else [])
    values, *shown = (curve.values[np.isfinite(curve.values)] for curve in curves)
    if not len(values):
        return 0.0, 1.0
    high = max(np.percentile(values, 95), *np.concatenate(shown))
    if plot.from_zero:
        return 0.0, 1.05 * high or 1.0
    low, high = min(values.min(), *np.concatenate(shown)), max(high, values[0])
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin


def _draw(plot: Plot, folder: Path) -> Path:
    """Draw each step faintly, the running median boldly over it, and what was measured now and then as points."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    line = smooth(plot.curve)
    axes.plot(*plot.curve, color=LINE, alpha=0.4, linewidth=0.8, label="each step")
    axes.plot(*line, color=LINE, linewidth=2.2, label="running median")
    if plot.points is not None and len(plot.points.steps):
        axes.plot(*plot.points, "o-", color=POINT, linewidth=1.2, markersize=5, label="validation")
    axes.set_ylim(limits(plot, line))
    for step, words in plot.marks:
        is_early = step < plot.curve.steps[-1] / 2
        axes.axvline(step - 0.5, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            words,
            (step - 0.5, 0.98),
            xycoords=axes.get_xaxis_transform(),
            xytext=(4 if is_early else -4, 0),  # where there is more room
            textcoords="offset points",
            rotation=90,
            ha="left" if is_early else "right",
            va="top",
            color=MUTED,
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.6, "pad": 1},
        )

    size = 13 if len(plot.title) < 70 else 10  # a picture is 800 points wide
    axes.set_title(plot.title, loc="left", color=INK, fontsize=size, fontweight="bold", pad=30)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.02),
        ncols=3,
        frameon=False,
        labelcolor=MUTED,
        borderpad=0,
        borderaxespad=0,
    )
    axes.set_xlabel("step", color=MUTED, fontsize=11)
    axes.set_ylabel(plot.axis, color=MUTED, fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.10g}%" if plot.percent else "{x:,.10g}")
    axes.tick_params(colors=MUTED, labelsize=10)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    path = folder / f"{plot.name}.png"
    with atomic_write(path) as unfinished:
        FigureCanvasAgg(figure).print_png(unfinished, metadata={"Software": None})
    return path
