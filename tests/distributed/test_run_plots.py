"""Pictures of a run: what is read, what they say, and that it is to be seen in them."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from distributed.run.plots import LINE, POINT, Curve, Plot, draw_plots, limits, plots, read_metrics, smooth, totals

FILES = ["loss.png", "throughput.png", "exposed_communication.png"]


def metrics_of(num_steps: int = 200, **more: Any) -> list[dict[str, Any]]:
    """Make a run whose loss falls from 5 towards 1, each step 0.1 s long, a quarter of it spent waiting."""
    return [
        {
            "step": step,
            "loss": 1 + 4 * 0.97**step,
            "seconds": 0.1,
            "exposed_comm_seconds": 0.025,
            "tokens_per_second": 30720.4,
            **more,
        }
        for step in range(num_steps)
    ]


def write(folder: Path, metrics: list[dict[str, Any]], tail: str = "") -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in metrics) + tail)
    return path


# Reading


@pytest.mark.parametrize("tail", ["", '{"step": 3, "lo', '{"step": 3, "loss": 1.0}'])
def test_what_a_kill_tore_is_left_out(tmp_path: Path, tail: str) -> None:
    metrics = metrics_of(3)
    assert read_metrics(write(tmp_path, metrics, tail)) == metrics


def test_of_a_step_that_was_done_again_the_later_line_holds(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 0}, {"step": 1, "loss": 4.0}]
    rows += [{"step": 2, "grad_norm": 1.0}]
    expected = [{"step": 0}, {"step": 1, "loss": 4.0}, {"step": 2, "loss": 2.0, "grad_norm": 1.0}]
    assert read_metrics(write(tmp_path, rows)) == expected


NO_METRICS = {
    '{"step": 1, "lo{"step": 2}': " cannot be read: Expecting ':' delimiter",
    "": " cannot be read: Expecting value",
    "\ufffd": " cannot be read: Expecting value",
    "[1]": ": Expected `object`, got `array`",
    '{"step": 1, "loss": "2"}': ": Expected `float \\| null`, got `str` - at `",
    '{"step": 1, "loss": []}': ": Expected `float \\| null`, got `array` - at `",
    f'{{"step": 1{"0" * 400}}}': ": Number out of range",
    '{"loss": 1}': ": each line of metrics has a step, an integer from 0, got ",
    '{"step": null}': ": each line of metrics has a step, an integer from 0, got ",
    '{"step": -1}': ": each line of metrics has a step, an integer from 0, got ",
    '{"step": 1.5}': ": each line of metrics has a step, an integer from 0, got ",
    '{"step": 1e400}': ": each line of metrics has a step, an integer from 0, got ",
}


@pytest.mark.parametrize("line", NO_METRICS)
def test_a_line_that_says_nothing_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, [{"step": 0}], line + '\n{"step": 2}\n')
    with pytest.raises(ValueError, match=f"^line 2 of .*metrics.jsonl{NO_METRICS[line]}"):
        read_metrics(path)


# What is shown


def test_titles_say_what_one_sees() -> None:
    metrics = metrics_of()
    metrics[99]["validation_loss"] = 2.0
    metrics[199]["validation_loss"] = 1.25
    assert [(plot.title, plot.axis) for plot in plots(metrics, "nats a byte")] == [
        ("Loss goes from 5.000 to 1.009 nats a byte, validation 1.250", "loss, nats a byte"),
        ("30,720 tokens a second over all steps", "tokens a second"),
        ("25% of the time is spent waiting for other ranks", "share of a step's time"),
    ]


def test_values_stand_at_their_steps() -> None:
    metrics = metrics_of(5)
    metrics[2]["loss"] = metrics[4]["exposed_comm_seconds"] = metrics[1]["tokens_per_second"] = None
    metrics[3]["seconds"] = 0.0
    metrics[1]["validation_loss"] = 7.0
    loss, speed, share = plots(metrics, "nats")
    assert loss.curve.steps.tolist() == [0, 1, 3, 4]
    assert loss.points is not None
    assert (loss.points.steps.tolist(), loss.points.values.tolist()) == ([1], [7])
    assert speed.curve.steps.tolist() == [0, 2, 3, 4]
    assert (share.curve.steps.tolist(), share.curve.values.tolist()) == ([0, 1, 2], [25, 25, 25])


@pytest.mark.parametrize(
    ("missing", "names"),
    [
        (["loss"], ["throughput", "exposed_communication"]),
        (["tokens_per_second"], ["loss", "exposed_communication"]),
        (["exposed_comm_seconds"], ["loss", "throughput"]),
        (["seconds"], ["loss", "throughput"]),
    ],
)
def test_a_picture_without_numbers_is_not_drawn(missing: list[str], names: list[str]) -> None:
    assert [plot.name for plot in plots(metrics_of(3, **dict.fromkeys(missing)), "nats")] == names
    metrics = [{key: row[key] for key in row if key not in missing} for row in metrics_of(3)]
    assert [plot.name for plot in plots(metrics, "nats")] == names


def test_speed_is_in_the_unit_of_the_run() -> None:
    (plot,) = plots([{"step": 1, "samples_per_second": 3.14159}], "nats")
    assert (plot.title, plot.axis) == ("3.14 samples a second over all steps", "samples a second")


def test_a_running_median_passes_over_outliers_and_follows_the_rest() -> None:
    steps = np.arange(1000.0)
    values = 7 * steps
    values[::10] = 1e9
    line = smooth(Curve(steps, values))
    np.testing.assert_array_equal(line.steps, steps)
    assert np.abs(line.values - 7 * steps)[20:-20].max() <= 7 * 3
    assert np.abs(line.values - 7 * steps).max() <= 7 * 15  # a window that the run's end cuts in half


def test_a_long_run_gets_no_more_points_than_one_can_see() -> None:
    steps = np.arange(10_000.0)
    line = smooth(Curve(steps, steps))
    assert len(line.steps) == 2000
    assert (line.steps[0], line.steps[-1]) == (0, 9999)
    assert (line.values[500:1500] == line.steps[500:1500]).all()


@pytest.mark.parametrize("from_zero", [False, True])
def test_the_axis_holds_everything_but_outliers(from_zero: bool) -> None:
    steps = np.arange(1000.0)
    values = 100 - steps / 20  # 100 to 50
    values[[0, 500, 501, 502]] = 105, 1e6, np.inf, np.nan
    points = Curve(np.array([300.0, 600.0]), np.array([45.0, 110.0]))
    plot = Plot("", "", "", Curve(steps, values), from_zero=from_zero)
    low, high = limits(plot, smooth(plot.curve))
    assert (low == 0) if from_zero else (45 < low < 50)
    assert (100 < high < 105) if from_zero else (105 < high < 110)  # a course is shown from its first value on
    low, high = limits(plot._replace(points=points), smooth(plot.curve))
    assert (low == 0) if from_zero else (40 < low < 45)
    assert 110 < high < 120


def test_totals_weigh_steps_by_their_time() -> None:
    rows = [
        {"step": 0, "seconds": 1.0, "tokens_per_second": 300.0, "exposed_comm_seconds": 0.5},
        {"step": 1, "seconds": 3.0, "tokens_per_second": 100.0, "exposed_comm_seconds": 0.0},
    ]
    assert totals(rows) == (4.0, 150.0, 0.125)
    assert totals([{"step": 0}]) == (0.0, None, None)


def test_a_run_that_went_on_is_marked_where_it_did() -> None:
    rows = metrics_of(9)
    for step, (ranks, dp, pp) in {0: (2, 1, 2), 3: (2, 1, 2), 5: (2, 2, 1)}.items():
        rows[step] |= {"ranks": ranks, "dp": dp, "pp": pp}
    rows[7] |= {"ranks": 3}
    marks = [(3, "resumed"), (5, "goes on as dp 2 x pp 1"), (7, "goes on as 3 ranks")]
    assert [plot.marks for plot in plots(rows, "nats")] == [marks] * 3
    assert [plot.marks for plot in plots(metrics_of(3, ranks=None), "nats")] == [[]] * 3


# Drawing


def pixels_of(path: Path, colour: str) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return rows and columns of the pixels in one colour, beneath the legend of a picture 800 wide and 500 high."""
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    image = imread(path)
    assert image.shape == (500, 800, 4)
    rows, columns = np.nonzero((np.abs(image[..., :3] - to_rgb(colour)) < 0.01).all(axis=-1))
    return rows[rows > 60], columns[rows > 60]


def test_three_pictures_lie_beside_the_metrics_and_show_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an extra: pip install 'minigrad-distributed[draw]'")
    metrics = metrics_of()
    for row in metrics[49::50]:
        row["validation_loss"] = row["loss"]
    write(tmp_path, metrics)
    assert draw_plots(tmp_path) == [tmp_path / name for name in FILES]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["metrics.jsonl", *FILES])
    rows, columns = pixels_of(tmp_path / "loss.png", LINE)
    assert rows[np.argmax(columns)] - rows[np.argmin(columns)] > 300
    assert len(pixels_of(tmp_path / "loss.png", POINT)[0]) > 4 * 20
    assert len(pixels_of(tmp_path / "throughput.png", POINT)[0]) == 0
    first = [(tmp_path / name).read_bytes() for name in FILES]
    draw_plots(tmp_path)
    assert [(tmp_path / name).read_bytes() for name in FILES] == first


def test_one_loss_out_of_all_bounds_does_not_hide_the_rest(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an extra: pip install 'minigrad-distributed[draw]'")
    metrics = metrics_of()
    metrics[100]["loss"] = 1e6
    metrics[101]["loss"] = float("inf")
    metrics[150]["loss"] = float("nan")
    write(tmp_path, metrics)
    draw_plots(tmp_path)
    rows, _ = pixels_of(tmp_path / "loss.png", LINE)
    assert np.ptp(rows) > 300


@pytest.mark.parametrize(("num_steps", "value"), [(1, 0.0), (2, 5.0), (1, float("nan")), (2, float("inf"))])
def test_shortest_and_flattest_runs_are_drawn(tmp_path: Path, value: float, num_steps: int) -> None:
    pytest.importorskip("matplotlib", reason="an extra: pip install 'minigrad-distributed[draw]'")
    numbers = dict.fromkeys(["loss", "validation_loss", "tokens_per_second", "exposed_comm_seconds"], value)
    write(tmp_path, metrics_of(num_steps, **numbers))
    assert len(draw_plots(tmp_path)) == 3


def test_a_run_without_a_step_has_no_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an extra: pip install 'minigrad-distributed[draw]'")
    write(tmp_path, [])
    assert draw_plots(tmp_path) == []


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"a plot needs matplotlib: pip install matplotlib, or pip install '.\[draw\]'"
    ):
        draw_plots(tmp_path)
